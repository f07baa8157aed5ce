"""The routing of tokens in normal mode on a GPU: by their choices, or by an earlier dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from uccl.ep._cuda.group import GpuGroup
from uccl.ep._cuda.workspace import Placed, Small

if TYPE_CHECKING:
    from uccl.ep._cuda.normal_dispatch import Dispatches

#: As in the kernels: a token's origin is its rank times this, plus an index.
ORIGIN_RANK = 64


@dataclass
class LaidOut:
    """A layout that a caller has asked for, which a dispatch of the same choices may use."""

    native: Any
    topk_idx: torch.Tensor
    version: int
    """The version of the choices: a write to them changes it."""
    num_experts: int
    memory: torch.Tensor
    stream: int
    """The number of the stream of the layout."""
    is_captured: bool
    """Whether a graph computes the layout, and does so in each repetition: then only dispatches in
    graphs use it. Other layouts are used outside of graphs only."""

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
    origin: torch.Tensor, source_tokens: torch.Tensor, choices: torch.Tensor, slots: int
) -> torch.Tensor:
    """For rows by token: ``rank * slots + token``, ``rank * K + last choice``, and the row of each
    choice, or -1."""
    ranks, top_k = origin.div(ORIGIN_RANK, rounding_mode="floor"), choices.shape[1]
    numbers = torch.arange(top_k, dtype=torch.int32, device=choices.device)
    last = torch.where(choices >= 0, numbers, -1).amax(1)
    token = ranks * slots + source_tokens
    return torch.cat(
        [token.unsqueeze(1), (ranks * top_k + last).unsqueeze(1), rows_of_choices(choices)], dim=1
    )


def rows_of_choices(choices: torch.Tensor) -> torch.Tensor:
    """``[m, K]`` i32: for rows by token, the row of each choice, or -1."""
    rows = torch.arange(choices.shape[0], dtype=torch.int32, device=choices.device)
    return torch.where(choices >= 0, rows.unsqueeze(1), -1)


@dataclass
class Routed:
    """The routing of a dispatch: choices of tokens, their ranks, or an earlier dispatch."""

    tokens: int
    top_k: int
    num_experts: int
    #: ``[n, K]``
    topk_idx: torch.Tensor | None = None
    #: The layout of these choices, if the caller has asked for it.
    laid_out: LaidOut | None = None
    #: ``[n, R]`` bool, and i32 by expert.
    ranks: tuple[torch.Tensor, torch.Tensor] | None = None
    again: Rows | None = None


@dataclass
class Rows:
    """A dispatch's handle, for combines and for dispatches to the same places."""

    of: Dispatches
    """The dispatches of the handle's buffer, which calls of other buffers with this handle go
    through."""
    native: Any
    routed: Routed
    slots: int
    """The most tokens of any rank."""
    layout: Placed
    memory: torch.Tensor
    """Scratch of the first combine, and of this dispatch."""
    laid_out: torch.Tensor | None
    """The memory of the layout, if there was one before."""
    small: Small
    """The tables about rows, often in the same memory."""
    stream: int
    """The number of the stream of the dispatch."""
    spare: int
    """The address of the first combine's scratch in ``memory``; 0 once it is used."""

    @property
    def gpu(self) -> GpuGroup:
        """The group of the dispatch."""
        return self.of.gpu

    def kept(self) -> tuple[torch.Tensor, ...]:
        """The memory that calls with this handle read."""
        own, told = self.memory, self.small.memory
        kept = (own,) if told is own else (own, told)
        return kept if self.laid_out is None else (*kept, self.laid_out)

    def ends_of_ranks(self) -> torch.Tensor:
        """``[R]`` i32: tokens from the ranks up to each."""
        return self.small.tensor(self.small.cut.at.starts + 1, (self.gpu.ranks,))

    def prefixes(self) -> torch.Tensor:
        """``[R, R]`` i32, as DeepEP has it: each column is this rank's, the only one that it has."""
        return self.small.tensor(
            self.small.cut.at.starts + 1, (self.gpu.ranks, self.gpu.ranks), strides=(1, 0)
        )

    def per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: tokens of each expert."""
        return self.small.tensor(self.small.cut.at.per_expert, (self._experts(),))

    def source_tokens(self) -> torch.Tensor:
        """``[m]`` i32: numbers of tokens at their ranks."""
        return self.small.tensor(self.small.cut.at.src_info, (self.layout.tokens,))

    def ends_of_experts(self) -> torch.Tensor:
        """``[E/R]`` i32: the end of each expert's rows, where rows are by expert."""
        return self.small.tensor(self.small.cut.at.ends, (self._experts(),))

    def metadata(self) -> torch.Tensor:
        """``[m, K + 2]`` i32, where rows are by expert: ``rank * T + token``, ``rank * K + last
        choice``, and the row of each choice, or -1."""
        return self.small.tensor(
            self.small.cut.at.metadata, (self.layout.tokens, 2 + self.routed.top_k)
        )

    def metadata_of(self, choices: torch.Tensor) -> torch.Tensor:
        """The same table where rows are by token, from the received choices."""
        stream = self.gpu.stream()
        self.gpu.keep_for(stream, self.stream, (*self.kept(), choices))
        origin = self.small.tensor(self.small.cut.at.origin, (self.layout.tokens,))
        return metadata_by_token(origin, self.source_tokens(), choices, self.slots)

    def _experts(self) -> int:
        return self.routed.num_experts // self.gpu.ranks
