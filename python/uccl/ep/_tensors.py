"""Tensors as arguments of the engine, and the tensors of its results."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from uccl.ep._checks import CPU, check, on_device


class TokenScales(NamedTuple):
    """The scales of tokens, with strides in words."""

    words: int
    """Their address."""
    token_words: int
    """Words of a token."""
    token_stride: int
    word_stride: int


class RowScales(NamedTuple):
    """The scales of received rows, with strides in words."""

    words: int
    """Their address."""
    row_stride: int
    word_stride: int
    expert_stride: int = 0
    """Added for each expert before the row's."""


class ScaleTiles(NamedTuple):
    """The scales of received rows in tiles."""

    words: int
    """Their address."""
    tile_rows: int
    """Tile rows of each expert."""


class PoolMemory:
    """A range of a GPU's memory that torch makes a tensor of. The pool lives as long as this
    object."""

    def __init__(self, native: Any, offset: int, size: int) -> None:
        # The group's end may drop the pool when ranks meet anew.
        self._hold = native.pool_hold()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (native.pool + offset, False),
            "version": 3,
        }


def pool_tensor(
    native: Any, dtype: torch.dtype, offset: int, count: int | None, device: torch.device
) -> torch.Tensor:
    """Elements of a rank's own pool on a device, starting ``offset`` bytes into it."""
    size = torch.empty(0, dtype=dtype).element_size()
    most = (native.pool_len - offset) // size
    count = most if count is None else count
    if offset < 0 or count < 0 or count > most:
        raise ValueError(f"{count} elements at byte {offset} of a pool of {native.pool_len} bytes")
    if device != CPU:
        if count == 0:
            return torch.empty(0, dtype=dtype, device=device)
        return torch.as_tensor(PoolMemory(native, offset, count * size), device=device).view(dtype)
    memory = (ctypes.c_ubyte * (count * size)).from_address(native.pool + offset)
    # The pool lives as long as the tensor. Of an emulated GPU the group's end may drop it earlier.
    memory.uccl_group = native.pool_hold() if hasattr(native, "pool_hold") else native
    return torch.frombuffer(memory, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def address(tensor: torch.Tensor | None) -> int:
    """A tensor's address; 0 for None, and for one without elements."""
    return 0 if tensor is None else tensor.data_ptr()


def weights_address(weights: torch.Tensor | None) -> int:
    """The address of weights. It is 1 for weights of no token: all ranks give weights or none does,
    so these differ from None."""
    return 0 if weights is None else address(weights) or 1


def scales_in(
    scales: torch.Tensor | None, tokens: int, device: torch.device = CPU
) -> TokenScales | None:
    """Scales of four bytes each, of any strides."""
    if scales is None:
        return None
    on_device("scales", scales, device)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.element_size() != 4 or scales.dim() != 2 or scales.shape[0] != tokens:
        raise ValueError(
            f"scales are of {scales.dtype} and {tuple(scales.shape)}, and should be of 4 bytes and "
            f"({tokens}, any)"
        )
    token_stride, word_stride = scales.stride()
    return TokenScales(address(scales), scales.shape[1], token_stride, word_stride)


def scales_for(scales: torch.Tensor | None, rows: int, is_col_major: bool) -> torch.Tensor | None:
    """A tensor for the scales of so many rows, of as many dimensions."""
    if scales is None:
        return None
    if not is_col_major:
        return scales.new_empty((rows, *scales.shape[1:]))
    return scales.new_empty((scales.shape[1], align(rows, 4)))[:, :rows].t()


def biases(bias: Any, out: torch.Tensor) -> tuple[int, int]:
    """Addresses of up to two biases, of the shape and dtype of ``out``."""
    given = bias if isinstance(bias, tuple) else (bias, None)
    if len(given) > 2:
        raise ValueError(f"there are up to two biases, not {len(given)}")
    first, second = (*given, None)[:2]
    for tensor in (first, second):
        if tensor is not None:
            check("bias", tensor, tuple(out.shape), torch.bfloat16, device=out.device)
    return address(first), address(second)


def align(count: int, to: int) -> int:
    """The count rounded up to a multiple."""
    return -(-count // to) * to


def align_all(counts: list[int], to: int) -> list[int]:
    """Each count rounded up to a multiple."""
    return counts if to == 1 else [align(count, to) for count in counts]
