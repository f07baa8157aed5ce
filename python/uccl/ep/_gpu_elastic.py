"""Dispatches of the second interface of ranks that have GPUs: rows by rank, in normal mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uccl.ep._elastic_handle import EPHandle
from uccl.ep._gpu_normal import Arriving, NormalMode, Rows
from uccl.ep._group import align, scales_for

#: What to do instead.
NO_EXPAND = (
    "do_expand and do_zero_padding are not there yet on GPUs: dispatch without them, and sort the rows by recv_topk_idx, "
    "which has each row's experts; or use low_latency_dispatch of uccl.ep.Buffer, whose rows are by expert"
)

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

    def check(self) -> None:
        """Raises for what is not there."""
        if self.do_expand or self.do_zero_padding:
            raise NotImplementedError(NO_EXPAND)


def first(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, topk_idx: torch.Tensor
) -> tuple[Arriving, EPHandle]:
    """Dispatches by choices. The handle has no owner yet."""
    asked.check()
    call = mode.begin(x, weights, mode.by_choices(topk_idx, asked.num_experts), asked.most)
    arrived, aligned = None, []
    if asked.do_cpu_sync:
        arrived, counts = call.counts()
        aligned = [align(count, asked.alignment) for count in counts]
    if arrived is None:
        have, local = mode.ranks * asked.most, asked.num_experts // mode.ranks
        most = have * min(topk_idx.shape[1], local) + (asked.alignment - 1) * local
        expanded = align(most, asked.alignment)
    else:
        have, expanded = arrived, sum(aligned)
    to = arriving(x, weights, topk_idx, have, asked.is_col_major)
    rows = call.receive(to, arrived, zeroes_foreign=False)
    per_expert = rows.per_expert()
    handle = EPHandle(
        do_expand=False,
        num_experts=asked.num_experts,
        expert_alignment=asked.alignment,
        num_max_tokens_per_rank=asked.most,
        num_sms=asked.num_sms,
        topk_idx=topk_idx,
        num_recv_tokens=have,
        num_expanded_tokens=expanded,
        num_recv_tokens_per_expert_list=aligned,
        psum_num_recv_tokens_per_scaleup_rank=rows.ends_of_ranks(),
        psum_num_recv_tokens_per_expert=ends_of(per_expert, asked.alignment),
        num_unaligned_recv_tokens_per_expert=per_expert,
        recv_src_metadata=None,
        native=rows,
        owner=None,
    )
    return to, handle


def again(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, handle: EPHandle
) -> Arriving:
    """Dispatches to where tokens went."""
    asked.check()
    before: Rows = handle.native
    call = mode.begin(x, weights, mode.again(before))
    arrived = before.arrived
    if asked.do_cpu_sync and arrived is None:
        arrived, _ = call.counts()
    have = mode.ranks * asked.most if arrived is None else arrived
    to = arriving(x, weights, handle.topk_idx, have, asked.is_col_major)
    call.receive(to, arrived, zeroes_foreign=False)
    return to


def arriving(
    x: Sent, weights: torch.Tensor | None, topk_idx: torch.Tensor, have: int, is_col_major: bool
) -> Arriving:
    """Tensors for so many rows."""
    (rows, scales), top_k = x, topk_idx.shape[1]
    return Arriving(
        rows.new_empty((have, rows.shape[1])),
        scales_for(scales, have, is_col_major),
        topk_idx.new_empty((have, top_k)),
        None if weights is None else weights.new_empty((have, top_k)),
    )


def ends_of(per_expert: torch.Tensor, alignment: int) -> torch.Tensor:
    """Sums of aligned counts, of each expert and those before it."""
    if alignment > 1:
        per_expert = (per_expert + (alignment - 1)).div_(alignment, rounding_mode="floor").mul_(alignment)
    return per_expert.cumsum(0, dtype=torch.int32)
