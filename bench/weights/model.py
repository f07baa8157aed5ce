"""The tensors of a model, cut as trainers and as inference ranks cut them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Elements of two bytes.
WIDTH = 2
COLUMNS = 4096
ROWS = 4096


@dataclass(frozen=True)
class Part:
    """A part of a tensor: rows and columns."""

    name: str
    number: int
    shape: tuple[int, int]
    offsets: tuple[int, int]
    sizes: tuple[int, int]


def tensors(total: int) -> list[tuple[int, int]]:
    """Shapes of about ``total`` bytes together, in pairs."""
    count = max(total // (ROWS * COLUMNS * WIDTH), 2)
    return [(ROWS, COLUMNS)] * (count // 2 * 2)


def parts(role: str, rank: int, ranks: int, total: int) -> Iterator[Part]:
    """Trainers have rows of each tensor (FSDP); servers columns of every second one, and rows of the others in turn
    (tensor-parallel layers)."""
    for number, shape in enumerate(tensors(total)):
        dim = 1 if role == "server" and number % 2 else 0
        size = shape[dim] // ranks
        # Rows of servers are not those of the trainer of the same rank.
        position = ranks - 1 - rank if role == "server" and dim == 0 else rank
        offsets, sizes = [0, 0], list(shape)
        offsets[dim], sizes[dim] = position * size, size
        yield Part(f"t{number}", number, shape, (offsets[0], offsets[1]), (sizes[0], sizes[1]))


class Arrays:
    """Memory of a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.lib: Any = np
        if device != "cpu":
            import torch

            torch.cuda.set_device(device)
            self.lib = torch

    def empty(self, sizes: tuple[int, int]) -> Any:
        if self.lib is np:
            return np.zeros(sizes, np.int16)
        return self.lib.zeros(sizes, dtype=self.lib.int16, device=self.device)

    def expected(self, part: Part, version: int) -> Any:
        """The values of a part in a version."""
        arange = {"dtype": self.lib.int32}
        if self.lib is not np:
            arange["device"] = self.device
        first_row, first_column = part.offsets
        rows = self.lib.arange(first_row, first_row + part.sizes[0], **arange) * 7
        columns = self.lib.arange(first_column, first_column + part.sizes[1], **arange) * 13
        values = rows[:, None] + columns[None, :] + (part.number + version)
        values &= 0x7FFF
        return values.astype(np.int16) if self.lib is np else values.to(self.lib.int16)

    def is_equal(self, one: Any, other: Any) -> bool:
        return bool((one == other).all())

    def synchronize(self) -> None:
        if self.lib is not np:
            self.lib.cuda.synchronize()

    def address(self, array: Any) -> int:
        address: int = array.ctypes.data if self.lib is np else array.data_ptr()
        return address
