"""Dispatches of the second interface on GPUs, in normal mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uccl.ep._cuda.normal import NormalMode
from uccl.ep._cuda.normal_dispatch import Arrived, Sent, Wanted
from uccl.ep._cuda.routing import Rows
from uccl.ep._cuda.workspace import Placed, most_rows
from uccl.ep._group import align_all
from uccl.ep._handles import EPHandle

#: The largest alignment that kernels take.
MAX_ALIGNMENT = 1 << 16


@dataclass
class Asked:
    """The arguments of a caller of dispatch."""

    num_experts: int
    most: int
    """The most tokens of any rank."""
    alignment: int
    num_sms: int
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    is_col_major: bool
    """Whether the scales of one channel are contiguous."""
    zero_copy: bool
    """Whether rows may stay in the buffer."""

    def of_experts(self) -> int | None:
        """The alignment of each expert's rows; None: rows are by token."""
        return self.alignment if self.do_expand else None

    def wanted(self, placed: Placed | None, choices: torch.dtype) -> Wanted:
        """The engine's options, with rows of this layout; None: the host waits for counts."""
        return Wanted(
            placed,
            self.of_experts(),
            None if self.do_expand else choices,
            zeroes_gaps=self.do_zero_padding,
            is_col_major=self.is_col_major,
            may_stay=self.zero_copy,
            most=self.most,
            blocks=self.num_sms,
        )


def first(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, topk_idx: torch.Tensor
) -> tuple[Arrived, EPHandle]:
    """Dispatches by choices. The handle has no owner yet."""
    if not 1 <= asked.alignment <= MAX_ALIGNMENT:
        raise ValueError(f"expert_alignment is 1 to {MAX_ALIGNMENT}, not {asked.alignment}")
    routed, local, placed = (
        mode.by_choices(topk_idx, asked.num_experts),
        asked.num_experts // mode.ranks,
        None,
    )
    if not asked.do_cpu_sync:
        placed = Placed.at_most(mode.ranks * asked.most, asked.of_experts(), routed.top_k, local)
    got, rows, counts = mode.dispatch(
        in_columns(x), weights, routed, asked.wanted(placed, topk_idx.dtype)
    )
    counts, have = align_all(counts, asked.alignment), rows.layout.tokens
    expanded = sum(counts)
    if not asked.do_cpu_sync:
        expanded = most_rows(mode.ranks * asked.most, routed.top_k, local, asked.alignment)
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
        num_unaligned_recv_tokens_per_expert=rows.per_expert(),
        tell_ends=rows.ends_of_experts
        if asked.do_expand
        else lambda: aligned_sums(rows.per_expert(), asked.alignment),
        tell_sources=rows.metadata if asked.do_expand else lambda: rows.metadata_of(got.choices),
        native=rows,
        owner=None,
    )
    return got, handle


def again(
    mode: NormalMode, x: Sent, weights: torch.Tensor | None, asked: Asked, handle: EPHandle
) -> Arrived:
    """Dispatches to the places of an earlier dispatch."""
    before: Rows = handle.native
    placed: Placed | None = Placed(handle.num_recv_tokens)
    if asked.do_cpu_sync and not handle.num_recv_tokens_per_expert_list and not before.layout.stays:
        placed = None
    elif asked.do_expand:
        placed = Placed(handle.num_recv_tokens, asked.alignment, handle.num_expanded_tokens)
    wanted = asked.wanted(placed, handle.topk_idx.dtype)
    return mode.dispatch(in_columns(x), weights, mode.again(before), wanted)[0]


def in_columns(x: Sent) -> Sent:
    """Gives scales two dimensions, with a column for each word."""
    rows, scales = x
    return (rows, scales.unsqueeze(1)) if scales is not None and scales.dim() == 1 else x


def aligned_sums(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Inclusive sums of the aligned counts."""
    if alignment > 1:
        counts = (counts + (alignment - 1)).div_(alignment, rounding_mode="floor").mul_(alignment)
    return counts.cumsum(0, dtype=torch.int32)
