"""The workspace of a dispatch in normal mode on a GPU: one allocation for its small tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl import _core


class Workspace(NamedTuple):
    """One allocation for all small tensors of a dispatch."""

    memory: torch.Tensor
    address: int
    """The address of the memory."""
    layout: _core.EpCudaWorkspaceLayout

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
