"""What a dispatch of the second interface leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
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
    #: ``[E/R]`` i32: inclusive sums of aligned counts; expanded: where the last row of each expert ends.
    psum_num_recv_tokens_per_expert: torch.Tensor
    #: ``[E/R]`` i32.
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    #: ``[m, K + 2]`` i32: ``rank * T + token``, ``rank * K + last choice``, and the row of each choice, or -1. On GPUs None
    #: without ``do_expand``.
    recv_src_metadata: torch.Tensor | None
    native: Any = field(repr=False)
    owner: Any = field(repr=False)
