"""This project's normal mode, as a program calls it."""

from __future__ import annotations

from typing import Any

import torch
from uccl.ep import Buffer, Config

from bench.ep.engine import Arrived, Engine, Layout, Tokens
from bench.ep.inputs import Routed, Shape


def room(most: Shape) -> int:
    """Bytes of a buffer for two calls of bf16, including each row's metadata."""
    return 2 * most.ranks * most.tokens * (2 * most.hidden + 1024) + (1 << 20)


class Ours(Engine):
    """``uccl.ep.Buffer``."""

    has_in_place = True

    def __init__(self, most: Shape, sms: int, **ends: Any) -> None:
        """Makes a buffer for calls of the shape ``most``. ``ends`` describe the group of ranks."""
        self.sms = sms
        self.buffer = Buffer(num_nvl_bytes=room(most), device="cuda", timeout=20, **ends)

    def layout(self, routed: Routed) -> Layout:
        per_rank, _, per_expert, goes, _ = self.buffer.get_dispatch_layout(
            routed.ids, routed.shape.experts
        )
        return per_rank, goes, per_expert

    def dispatch(
        self, x: Tokens, routed: Routed, layout: Layout, worst: int = 0, zero_copy: bool = False
    ) -> Arrived:
        """With ``worst`` the result has that many rows, and the host waits for nothing."""
        returned = self.buffer.dispatch(
            x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[1],
            num_tokens_per_expert=layout[2],
            topk_idx=routed.ids,
            topk_weights=routed.weights,
            num_worst_tokens=worst,
            zero_copy=zero_copy,
            config=Config(self.sms),
        )
        return Arrived(*returned[:5])

    def in_place(self, x: Tokens, routed: Routed, layout: Layout) -> Arrived:
        return self.dispatch(
            x, routed, layout, worst=routed.shape.ranks * routed.shape.tokens, zero_copy=True
        )

    def again(self, x: Tokens, handle: Any) -> Tokens:
        return self.buffer.dispatch(x, handle=handle, config=Config(self.sms))[0]

    def again_in_place(self, x: Tokens, handle: Any) -> Tokens:
        return self.buffer.dispatch(x, handle=handle, config=Config(self.sms), zero_copy=True)[0]

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self.buffer.combine(rows, handle, config=Config(self.sms))[0]

    def check(self) -> None:
        super().check()
        self.buffer.check()
