"""Dispatches of the second interface of ranks that have GPUs, in normal mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uccl.ep._elastic_handle import EPHandle
from uccl.ep._gpu_normal import Arriving, NormalMode, Placed, Rows, most_rows
from uccl.ep._group import align_all, scales_for

#: As kernels have it.
MAX_ALIGNMENT = 1 << 16
#: Rows, and their scales if they have any.
Sent = tuple[torch.Tensor, "torch.Tensor | None"]


@dataclass
class Asked:
    """What a caller of dispatch wants."""

    num_experts: int
    most: int
    """Tokens of any rank."""
    alignment: int
    num_sms: int
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    is_col_major: bool
    """Whether the scales of one channel are one behind the other."""
    zero_copy: bool
    """Whether rows may stay in the buffer."""

    def most_rows(self, mode: NormalMode, top_k: int) -> tuple[int, int]:
        """How many tokens may arrive, and how many rows they may have by expert."""
        tokens = mode.ranks * self.most
        return tokens, most_rows(tokens, top_k, self.num_experts // mode.ranks, self.alignment)


def first(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, topk_idx: torch.Tensor
) -> tuple[Arriving, EPHandle]:
    """Dispatches by choices. The handle has no owner yet."""
    if not 1 <= asked.alignment <= MAX_ALIGNMENT:
        raise ValueError(f"expert_alignment is 1 to {MAX_ALIGNMENT}, not {asked.alignment}")
    routed = mode.by_choices(topk_idx, asked.num_experts)
    call = mode.begin(x, weights, routed, asked.most, asked.num_sms, asked.zero_copy)
    alignment, counts = asked.alignment if asked.do_expand else None, []
    if asked.do_cpu_sync:
        # Scales of one channel lie at a distance that follows from how many rows there are.
        may_guess = x[1] is None or not asked.is_col_major

        def make(have: int) -> Arriving:
            return arriving(x, weights, topk_idx, have, asked)

        to, rows, counts = call.receive_counted(make, alignment, may_guess, zeroes_gaps=asked.do_zero_padding)
        counts = align_all(counts, asked.alignment)
        have, expanded = rows.layout.tokens, sum(counts)
    else:
        have, expanded = asked.most_rows(mode, topk_idx.shape[1])
        place = call.in_place()
        have = place[0].shape[0] if place else have
        to = arriving(x, weights, topk_idx, expanded if asked.do_expand else have, asked, place)
        rows = call.receive(to, Placed(have, alignment=alignment), zeroes_gaps=asked.do_zero_padding)
    handle = EPHandle(
        do_expand=asked.do_expand,
        num_experts=asked.num_experts,
        expert_alignment=asked.alignment,
        num_max_tokens_per_rank=asked.most,
        num_sms=asked.num_sms,
        topk_idx=topk_idx,
        num_recv_tokens=have,
        num_expanded_tokens=expanded,
        num_recv_tokens_per_expert_list=counts,
        psum_num_recv_tokens_per_scaleup_rank=rows.ends_of_ranks(),
        psum_num_recv_tokens_per_expert=ends_of(rows, asked),
        num_unaligned_recv_tokens_per_expert=rows.per_expert(),
        recv_src_metadata=rows.metadata() if asked.do_expand else None,
        native=rows,
        owner=None,
    )
    return to, handle


def again(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, handle: EPHandle
) -> Arriving:
    """Dispatches to where tokens went."""
    before: Rows = handle.native
    call = mode.begin(x, weights, mode.again(before), blocks=asked.num_sms, may_stay=asked.zero_copy)
    have = handle.num_expanded_tokens if asked.do_expand else handle.num_recv_tokens
    if asked.do_cpu_sync and not handle.num_recv_tokens_per_expert_list and not before.stayed:
        have = Placed.of(call.counts(), asked.alignment if asked.do_expand else None).length()
    to = arriving(x, weights, handle.topk_idx, have, asked, call.in_place())
    call.receive(to, before.layout, zeroes_gaps=asked.do_zero_padding)
    return to


def arriving(
    x: Sent,
    weights: torch.Tensor | None,
    topk_idx: torch.Tensor,
    have: int,
    asked: Asked,
    place: Sent | None = None,
) -> Arriving:
    """Tensors for so many rows, which may stay in a place."""
    (rows, scales), top_k = x, topk_idx.shape[1]
    made = place or (rows.new_empty((have, rows.shape[1])), scales_for(scales, have, asked.is_col_major))
    return Arriving(
        *made,
        None if asked.do_expand else topk_idx.new_empty((have, top_k)),
        None if weights is None else weights.new_empty((have,) if asked.do_expand else (have, top_k)),
        stays=place is not None,
    )


def ends_of(rows: Rows, asked: Asked) -> torch.Tensor:
    """Where the last row of each expert ends; by token, sums of aligned counts, of each expert and those before it."""
    if asked.do_expand:
        return rows.ends_of_experts()
    return aligned_sums(rows.per_expert(), asked.alignment)


def aligned_sums(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Sums of aligned counts, of each and those before it."""
    if alignment > 1:
        counts = (counts + (alignment - 1)).div_(alignment, rounding_mode="floor").mul_(alignment)
    return counts.cumsum(0, dtype=torch.int32)
