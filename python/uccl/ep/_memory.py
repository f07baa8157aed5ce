"""Memory for outputs, which is used again once nobody holds what was returned in it.

Worst-case outputs are large and mostly untouched. Fresh memory of the kernel's would be zeroed at each call, which
takes longer than the call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from math import prod

import torch

#: Blocks of one size that are kept while nobody uses them: those of the calls that may be under way.
KEPT = 4
#: Below this, torch's own allocator does.
SMALLEST = 1 << 18


class Memory:
    """Blocks that one buffer's calls return tensors in."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``."""
        size = prod(shape) * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        lent = (ctypes.c_ubyte * size).from_address(block.data_ptr())
        # The tensor and all its views keep `lent`; when the last of them goes, the block is free.
        weakref.finalize(lent, give_back, free, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype).view(shape)


def give_back(free: list[torch.Tensor], block: torch.Tensor) -> None:
    """Keeps a block for the next call, unless there are enough."""
    if len(free) < KEPT:
        free.append(block)
