"""The handles of dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable

import torch

from uccl.ep._backend import NormalHandleState


class NormalHandle(tuple[Any, ...]):
    """A dispatch's handle for :meth:`Buffer.combine`: DeepEP's tuple, and the backend's handle."""

    state: NormalHandleState
    num_tokens: int


class LowLatencyHandle(tuple[Any, ...]):
    """``(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)``, and the
    backend's handle."""

    state: Any = None
    """The backend's handle; None before the receive."""
    owner: Any = None
    stream: torch.cuda.Stream | None = None
    """The current stream at the dispatch; None on the CPU."""
    to_combine: torch.Tensor | None = None
    """Memory that the caller got for its rows: a combine with ``zero_copy`` sends it."""
    rank_bound: int
    """Ranks that the received rows have room for."""


@dataclass(eq=False)
class EPHandle:
    """A dispatch's handle, for combines and for dispatches of the same tokens. Counts are of this
    rank's experts."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    #: ``[n, K]``: the experts of the dispatched tokens.
    topk_idx: torch.Tensor
    #: Received tokens, and their rows by expert; upper bounds if the host did not wait for counts.
    num_recv_tokens: int
    num_expanded_tokens: int
    #: Aligned counts; empty if the host did not wait for them.
    num_recv_tokens_per_expert_list: list[int]
    #: ``[E/R]`` i32: tokens of each expert.
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    #: Computes ``psum_num_recv_tokens_per_scaleup_rank``.
    make_rank_ends: Callable[[], torch.Tensor] = field(repr=False)
    #: Computes ``psum_num_recv_tokens_per_expert``.
    make_expert_ends: Callable[[], torch.Tensor] = field(repr=False)
    #: Computes ``recv_src_metadata``.
    make_source_metadata: Callable[[], torch.Tensor] = field(repr=False)
    #: The backend's handle.
    state: NormalHandleState = field(repr=False)
    owner: Any = field(repr=False)
    #: Tables of DeepEP's relays; None here.
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """``[num_scaleup_ranks]`` i32: tokens from the scale-up ranks up to each, over all nodes.
        The last is the number of received tokens.

        Each read makes it, as for ``psum_num_recv_tokens_per_expert``.
        """
        return self.make_rank_ends()

    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: inclusive sums of aligned counts; with ``do_expand``, the end of each
        expert's rows.

        Few callers read it, so without ``do_expand`` each read computes it, from the counts of the
        dispatch, or of its last repetition by a graph.
        """
        return self.make_expert_ends()

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """``[m, K + 2]`` i32 of the received tokens: ``rank * T + token``, ``rank * K + last
        choice`` of this rank's experts, and for each choice its row, or -1.

        The first read computes it; without ``do_expand`` from ``recv_topk_idx`` as it is then.
        """
        return self.make_source_metadata()

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """``[n, K]`` i32 of this rank's tokens: ``rank * T + place`` at the last choice of each
        rank, else -1. The place is the number of earlier tokens for the same rank."""
        places = places_by_choice(
            self.topk_idx, self.num_experts // self.owner.num_ranks, self.owner.num_ranks
        )
        return torch.where(
            places >= 0, self.owner.rank_idx * self.num_max_tokens_per_rank + places, -1
        ).int()


def places_by_choice(topk_idx: torch.Tensor, local_experts: int, ranks: int) -> torch.Tensor:
    """``[n, K]``: the number of earlier tokens for the same rank, at the last choice of each rank,
    else -1."""
    owners = topk_idx.long().div(local_experts, rounding_mode="floor")
    token_in_rank = (owners.unsqueeze(2) == torch.arange(ranks, device=owners.device)).any(1)
    places = (token_in_rank.cumsum(0) - 1).gather(1, owners.clamp(min=0))
    last = owners >= 0
    for later in range(1, owners.shape[1]):
        last[:, :-later] &= owners[:, :-later] != owners[:, later:]
    return torch.where(last, places, -1)
