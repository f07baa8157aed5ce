#!/usr/bin/env python3
"""Normal mode's dispatch and combine on GPUs: from entry to usable output, and in a CUDA graph.

    python3 bench/ep_gpu_normal.py --ranks 2 --num-tokens 4096 --hidden 7168 --num-topk 8 --num-experts 256 --num-sms 24

Measured as bench/ep_gpu.py does. A dispatch is its layout too. A token's row counts once for each of its ranks, its own among them;
the second figure of bytes is of rows for other ranks, which cross the link. Dispatches that return counts wait for them on the host; those with
rows for the worst case do not, and a graph repeats them.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable

import torch

from ep import arguments
from ep_gpu import Calls, run


class ManyTokens(Calls):
    """Calls of normal mode."""

    repeats = 4
    waiting = ("dispatch, fp8", "dispatch, bf16")

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import Buffer, Config

        self.args, self.rank, self.config = args, rank, Config(args.num_sms)
        tokens, hidden = args.num_tokens, args.hidden
        # Two calls of bf16, with what goes with rows.
        size = 2 * args.ranks * tokens * (2 * hidden + 1024) + (1 << 20)
        self.buffer = Buffer(num_nvl_bytes=size, device="cuda", timeout=20, **ends)
        torch.manual_seed(rank)
        self.x = torch.randn(tokens, hidden).bfloat16().cuda()
        scales = torch.ones(tokens, hidden // 128, device="cuda")
        self.quantised = self.x.to(torch.float8_e4m3fn), scales
        self.ids = torch.rand(tokens, args.num_experts).topk(args.num_topk).indices.cuda()
        self.weights = torch.rand(tokens, args.num_topk).cuda()
        self.rows = torch.randn(self.counts()[0], hidden, device="cuda").bfloat16()
        self.copied = self.rows.clone()
        self.made, self.handle = None, None

    def counts(self) -> tuple[int, int]:
        """One for each rank of a token."""
        owners = self.ids // (self.args.num_experts // self.args.ranks)
        goes = torch.stack([(owners == rank).any(1) for rank in range(self.args.ranks)])
        return int(goes.sum()), int(goes.sum() - goes[self.rank].sum())

    def dispatch(self, x: Any, worst: int = 0) -> Any:
        per_rank, _, per_expert, goes, _ = self.buffer.get_dispatch_layout(self.ids, self.args.num_experts)
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_worst_tokens=worst,
            config=self.config,
        )

    def again(self) -> Any:
        return self.buffer.dispatch(self.x, handle=self.handle, config=self.config)

    def combine(self) -> Any:
        return self.buffer.combine(self.made, self.handle, config=self.config)

    def all(self) -> dict[str, Callable[[], Any]]:
        if self.handle is None:
            self.made, _, _, _, self.handle, _ = self.dispatch(self.x)
        most = self.args.ranks * self.args.num_tokens
        return {
            "dispatch, fp8": lambda: self.dispatch(self.quantised),
            "dispatch, bf16": lambda: self.dispatch(self.x),
            "dispatch, worst case, fp8": lambda: self.dispatch(self.quantised, most),
            "dispatch, worst case, bf16": lambda: self.dispatch(self.x, most),
            "dispatch, handle, bf16": self.again,
            "combine": self.combine,
            "copy on this GPU, bf16": lambda: self.copied.copy_(self.rows),
        }


def main() -> None:
    parser = arguments("normal mode's dispatch and combine on GPUs")
    parser.set_defaults(num_tokens=4096, num_experts=256, rounds=12)
    parser.add_argument("--num-sms", type=int, default=24)
    run(parser.parse_args(), ManyTokens)


if __name__ == "__main__":
    main()
