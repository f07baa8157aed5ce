"""Memory for outputs, which is used again once all returned tensors in it are gone.

Worst-case outputs are large and mostly untouched. Fresh memory from the kernel would be zeroed at
each call, which takes longer than the call.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any, Callable

import torch

from uccl import _core

#: Blocks that are kept while they are unused: enough for the calls that may be in flight.
KEPT = 16
#: Smaller tensors come from torch's own allocator.
SMALLEST = 1 << 18


class Block:
    """Memory of torch, or memory that peers read in place."""

    def __init__(self, size: int, native: Any = None) -> None:
        self.size, self.native = size, native
        self._owner = (
            torch.empty(size, dtype=torch.uint8) if native is None else _core.EpBlock(native, size)
        )

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return self._owner.data_ptr() if self.native is None else self._owner.address

    def is_free(self) -> bool:
        """Whether no peer reads it any more."""
        return self.native is None or self._owner.is_read()


class Memory:
    """Blocks for the tensors that one buffer's calls return."""

    def __init__(self) -> None:
        self._free: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``."""
        if prod(shape) * dtype.itemsize < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        return self._lend(shape, dtype, None)

    def shared(self, native: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, in memory that the other ranks of ``native``'s group read where it is."""
        return self._lend(shape, dtype, native)

    def _lend(self, shape: tuple[int, ...], dtype: torch.dtype, native: Any) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        block = self._take(
            lambda free: free.size == size and free.native is native and free.is_free()
        )
        block = block or Block(max(size, 1), native)
        lent = (ctypes.c_ubyte * size).from_address(block.address)
        # The tensor and all its views keep `lent`; when the last of them goes, the block is free.
        weakref.finalize(lent, give_back, self._free, block).atexit = False
        flat = torch.frombuffer(lent, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        return flat.view(shape)

    def _take(self, fits: Callable[[Block], bool]) -> Block | None:
        for at in range(len(self._free) - 1, -1, -1):
            if fits(self._free[at]):
                return self._free.pop(at)
        return None


def give_back(free: list[Block], block: Block) -> None:
    """Keeps a block for later calls, and drops the oldest beyond ``KEPT``."""
    free.append(block)
    del free[:-KEPT]
