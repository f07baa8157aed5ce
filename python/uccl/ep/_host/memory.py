"""Memory for outputs, which is used again once all returned tensors in it are gone.

Worst-case outputs are large and mostly untouched. Fresh memory from the kernel would be zeroed at
each call, which takes longer than the call.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any

import torch

from uccl import _core
from uccl.ep._untraced import untraced

#: Blocks that are kept while they are unused: enough for the calls that may be in flight.
KEPT = 16
#: Smaller tensors come from torch's own allocator.
SMALLEST = 1 << 18


class Block:
    """Memory of torch, or memory that peers read in place."""

    def __init__(self, size: int, native: Any = None) -> None:
        self.size, self.native = size, native
        self._owner: Any = (
            torch.empty(size, dtype=torch.uint8) if native is None else _core.EpBlock(native, size)
        )

    @property
    def address(self) -> int:
        """The address of the first byte."""
        address: int = self._owner.data_ptr() if self.native is None else self._owner.address
        return address

    def is_free(self) -> bool:
        """Whether no peer reads it any more."""
        return self.native is None or bool(self._owner.is_read())


class Memory:
    """Blocks for the tensors that one buffer's calls return."""

    def __init__(self, native: Any) -> None:
        """``native`` is the engine's end of the group that reads shared memory."""
        self._native = native
        self._free: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``."""
        if prod(shape) * dtype.itemsize < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        return self._lend(shape, dtype, None)

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, in memory that the other ranks of the group read in place."""
        return self._lend(shape, dtype, self._native)

    def _lend(self, shape: tuple[int, ...], dtype: torch.dtype, native: Any) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        block = self._take(size, native) or Block(max(size, 1), native)
        lent = (ctypes.c_ubyte * size).from_address(block.address)
        # The tensor and all its views keep `lent`; when the last of them goes, the block is free.
        weakref.finalize(lent, keep_block, self._free, block).atexit = False  # type: ignore[misc]
        flat = torch.frombuffer(lent, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        return flat.view(shape)

    def _take(self, size: int, native: Any) -> Block | None:
        """The free block of this size that was freed last, if there is one."""
        for at in range(len(self._free) - 1, -1, -1):
            free = self._free[at]
            if free.size == size and free.native is native and free.is_free():
                return self._free.pop(at)
        return None


@untraced
def keep_block(free: list[Block], block: Block) -> None:
    """Keeps a block for later calls, and drops the oldest beyond ``KEPT``."""
    free.append(block)
    del free[:-KEPT]
