"""What a dispatch of the second interface leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable

import torch


@dataclass(eq=False)
class EPHandle:
    """What a combine, or a dispatch of the same tokens again, needs of a dispatch. Counts are of this rank's experts."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    #: ``[n, K]``: what was dispatched by.
    topk_idx: torch.Tensor
    #: Rows for tokens, and for tokens and experts; the most there can be where the host did not wait for counts.
    num_recv_tokens: int
    num_expanded_tokens: int
    #: Aligned counts; empty where the host did not wait for them.
    num_recv_tokens_per_expert_list: list[int]
    #: ``[R]`` i32: how many tokens arrived from the ranks up to each.
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    #: ``[E/R]`` i32.
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    #: Makes ``psum_num_recv_tokens_per_expert``.
    tell_ends: Callable[[], torch.Tensor] = field(repr=False)
    #: Makes ``recv_src_metadata``.
    tell_sources: Callable[[], torch.Tensor] = field(repr=False)
    native: Any = field(repr=False)
    owner: Any = field(repr=False)
    #: What DeepEP has where it relays.
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: inclusive sums of aligned counts; expanded: where the last row of each expert ends. Few callers read it, so without
        ``do_expand`` it is made each time that it is read, from the counts of the dispatch, or of its last repetition by a graph."""
        return self.tell_ends()

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """``[m, K + 2]`` i32 of each token that arrived: ``rank * T + token``, ``rank * K + last choice`` of this rank's experts, and the row of
        each choice, or -1. It is made when it is first read; without ``do_expand`` from ``recv_topk_idx``, as that is then."""
        return self.tell_sources()

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """``[n, K]`` i32 of this rank's tokens: ``rank * T + place`` among its tokens that go to the same rank, at the last choice of each rank,
        else -1."""
        places = places_by_choice(self.topk_idx, self.num_experts // self.owner.num_ranks, self.owner.num_ranks)
        return torch.where(places >= 0, self.owner.rank_idx * self.num_max_tokens_per_rank + places, -1).int()


def places_by_choice(topk_idx: torch.Tensor, local_experts: int, ranks: int) -> torch.Tensor:
    """``[n, K]``: how many tokens before it go to the same rank, at the last choice of each rank, else -1."""
    owners = topk_idx.long().div(local_experts, rounding_mode="floor")
    goes = (owners.unsqueeze(2) == torch.arange(ranks, device=owners.device)).any(1)
    places = (goes.cumsum(0) - 1).gather(1, owners.clamp(min=0))
    last = owners >= 0
    for later in range(1, owners.shape[1]):
        last[:, :-later] &= owners[:, :-later] != owners[:, later:]
    return torch.where(last, places, -1)
