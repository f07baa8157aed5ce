"""The routing of tokens in normal mode on a GPU, and the handle of a dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from uccl import _core
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.plans import ShapePlans
from uccl.ep._cuda.workspace import Workspace
from uccl.ep._row_layout import RowLayout, rows_of_choices


@dataclass
class DispatchLayout:
    """The result of ``get_dispatch_layout``, which a dispatch of the same choices reuses."""

    native: Any
    topk_idx: torch.Tensor
    version: int
    """The version of the choices: a write to them changes it."""
    num_experts: int
    memory: torch.Tensor
    stream: int
    """The number of the stream of the layout."""
    is_captured: bool
    """Whether a graph computes the layout, and does so in each repetition. Only dispatches in
    graphs use such a layout; other layouts are used outside of graphs only."""

    def is_of(self, topk_idx: torch.Tensor, num_experts: int) -> bool:
        """Whether a dispatch by these choices would compute the same layout now."""
        return (
            self.topk_idx is topk_idx
            and self.version == version_of(topk_idx)
            and self.num_experts == num_experts
            and self.is_captured == torch.cuda.is_current_stream_capturing()
        )


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes with each write of torch to the tensor; 0 for a tensor of inference
    mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def metadata_by_token(
    origin: torch.Tensor, source_tokens: torch.Tensor, choices: torch.Tensor, max_tokens: int
) -> torch.Tensor:
    """For rows by token: ``rank * max_tokens + token``, ``rank * K + last choice``, and the row of
    each choice, or -1."""
    ranks, top_k = origin.div(_core.ep_cuda_origin_rank(), rounding_mode="floor"), choices.shape[1]
    numbers = torch.arange(top_k, dtype=torch.int32, device=choices.device)
    last = torch.where(choices >= 0, numbers, -1).amax(1)
    token = ranks * max_tokens + source_tokens
    return torch.cat(
        [token.unsqueeze(1), (ranks * top_k + last).unsqueeze(1), rows_of_choices(choices)], dim=1
    )


@dataclass
class Routing:
    """The routing of a dispatch: choices of tokens, their ranks, or a handle to be cached."""

    tokens: int
    top_k: int
    num_experts: int
    #: ``[n, K]``
    topk_idx: torch.Tensor | None = None
    #: The dispatch layout of these choices, if the caller has asked for it.
    layout: DispatchLayout | None = None
    #: ``[n, R]`` bool, and i32 by expert.
    ranks: tuple[torch.Tensor, torch.Tensor] | None = None
    #: The handle of an earlier dispatch of the same tokens.
    cached: CudaHandle | None = None


@dataclass
class CudaHandle:
    """A dispatch's handle, for combines and for dispatches to the same places."""

    plans: ShapePlans
    """The plans of the handle's buffer: calls of other buffers with this handle go through it."""
    native: _core.EpCudaNormalHandle
    routing: Routing
    memory: torch.Tensor
    """The memory with the scratch of the first combine, and of this dispatch."""
    layout_memory: torch.Tensor | None
    """The memory of the dispatch layout, if there was one."""
    workspace: Workspace
    """The workspace with the tables about rows, often in ``memory``."""
    stream: int
    """The number of the stream of the dispatch."""
    free_scratch: int
    """The address of the first combine's scratch in ``memory``; 0 once it is used."""

    @property
    def group(self) -> CudaGroup:
        """The group of the dispatch."""
        return self.plans.group

    def memory_in_use(self) -> tuple[torch.Tensor, ...]:
        """The memory that calls with this handle read."""
        own, tables = self.memory, self.workspace.memory
        kept = (own,) if tables is own else (own, tables)
        return kept if self.layout_memory is None else (*kept, self.layout_memory)

    @property
    def row_layout(self) -> RowLayout:
        """The layout of the received rows; an upper bound if the host has no counts."""
        return self.native.row_layout

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.routing.tokens

    @property
    def num_recv_tokens(self) -> int:
        """Received tokens, or an upper bound if the host has no counts."""
        return self.row_layout.tokens

    @property
    def top_k(self) -> int:
        """Choices of each token."""
        return self.routing.top_k

    def normal_tables(self, token_in_rank: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The tensors of DeepEP's handle; those of its channels are empty."""
        offsets, ranks, channels = self._offsets(), self.group.ranks, self.group.channels
        # Each column of the prefixes is this rank's, since it has no other.
        prefixes = self.workspace.tensor(offsets.starts + 1, (ranks, ranks), strides=(1, 0))
        if token_in_rank is None:
            token_in_rank = channels
        return prefixes, channels, channels, self.source_tokens(), token_in_rank, channels

    def rank_ends(self, scaleup_ranks: int) -> torch.Tensor:
        """``[scaleup_ranks]`` i32: tokens from the scale-up ranks up to each, over all nodes."""
        starts, ranks = self._offsets().starts, self.group.ranks
        if scaleup_ranks == ranks:
            return self.workspace.tensor(starts + 1, (ranks,))
        stream = self.group.stream()
        self.group.keep_for(stream, self.stream, self.memory_in_use())
        counts = self.workspace.tensor(starts, (ranks + 1,)).diff()
        by_node = counts.view(-1, scaleup_ranks)
        return by_node.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: tokens of each local expert."""
        return self.workspace.tensor(self._offsets().per_expert, (self._experts(),))

    def source_tokens(self) -> torch.Tensor:
        """``[m]`` i32: token numbers at their ranks."""
        return self.workspace.tensor(self._offsets().src_info, (self.row_layout.tokens,))

    def expert_ends(self) -> torch.Tensor:
        """``[E/R]`` i32: the end of each expert's rows, for rows by expert."""
        return self.workspace.tensor(self._offsets().ends, (self._experts(),))

    def source_metadata(self, choices: torch.Tensor | None) -> torch.Tensor:
        """``[m, K + 2]`` i32: ``rank * T + token``, ``rank * K + last choice``, and the row of each
        choice, or -1. For rows by token, ``choices`` are the received ones."""
        offsets, tokens = self._offsets(), self.row_layout.tokens
        if choices is None:
            return self.workspace.tensor(offsets.metadata, (tokens, 2 + self.routing.top_k))
        stream = self.group.stream()
        self.group.keep_for(stream, self.stream, (*self.memory_in_use(), choices))
        origin = self.workspace.tensor(offsets.origin, (tokens,))
        return metadata_by_token(origin, self.source_tokens(), choices, self.native.max_tokens)

    def _offsets(self) -> _core.EpCudaWorkspaceLayout:
        return self.workspace.layout

    def _experts(self) -> int:
        return self.routing.num_experts // self.group.ranks
