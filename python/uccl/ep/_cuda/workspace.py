"""The workspace of a dispatch in normal mode on a GPU: one allocation for its small tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl import _core
from uccl.ep._tensors import align

#: Alignment of an offset, in words of four bytes: torch has other kernels for tensors that are not
#: aligned so.
OFFSET_WORDS = 4


def to_words(length: int) -> int:
    """Rounds a length in bytes up to words of four bytes."""
    return align(length, 4) // 4


class WorkspaceOffsets(NamedTuple):
    """The sub-buffers of a workspace: their offsets or lengths, in words of four bytes."""

    combine_scratch: int
    """Scratch of the handle's first combine."""
    dispatch_scratch: int
    """Scratch of the dispatch."""
    starts: int
    """``[R + 1]``: the first token of each rank."""
    per_expert: int
    """``[E/R]``: tokens of each local expert."""
    src_info: int
    """``[m]``: token numbers at their ranks."""
    origin: int
    """``[m]``: ranks of tokens, and this rank's index among the token's ranks."""
    ends: int
    """``[E/R]``: the end of each expert's rows, for rows by expert."""
    metadata: int
    """``[m, K + 2]``: sources and rows of tokens, for rows by expert."""
    choices: int
    weights: int
    scales: int

    def packed(self) -> WorkspaceLayout:
        """The layout of sub-buffers with these lengths, one behind the other."""
        offsets, end = [], 0
        for length in self:
            offsets.append(end)
            end += align(length, OFFSET_WORDS)
        return WorkspaceLayout(WorkspaceOffsets(*offsets), end)


class WorkspaceLayout:
    """The offsets of a workspace's sub-buffers, and its length in words."""

    def __init__(self, offsets: WorkspaceOffsets, length: int) -> None:
        self.offsets, self.length = offsets, length
        #: The engine's copy of the offsets.
        self.native = _core.EpCudaWorkspaceLayout(offsets)


class Workspace(NamedTuple):
    """One allocation for all small tensors of a dispatch."""

    memory: torch.Tensor
    address: int
    """The address of the memory."""
    layout: WorkspaceLayout

    def tensor(
        self,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.int32,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A sub-buffer as a tensor that is no view for torch: autograd then allows writes in place,
        regardless of when the memory was allocated."""
        made = torch.empty(0, dtype=dtype, device=self.memory.device)
        return made.set_(
            self.memory.untyped_storage(),
            4 * offset // dtype.itemsize,
            shape,
            strides or (*shape[1:], 1),
        )
