"""This project's normal mode, as a program calls it."""

from __future__ import annotations

from typing import Any

import torch
from uccl.ep import Buffer, Config

from bench.ep.engine import Engine, Layout, Received, Tokens
from bench.ep.inputs import Routing, Shape


def room(most: Shape) -> int:
    """Bytes of a buffer for two calls of bf16, including each row's metadata."""
    return 2 * most.ranks * most.tokens * (2 * most.hidden + 1024) + (1 << 20)


class Ours(Engine):
    """``uccl.ep.Buffer``."""

    has_views = True

    def __init__(self, most: Shape, sms: int, **ends: Any) -> None:
        """Makes a buffer for calls of the shape ``most``. ``ends`` describe the group of ranks."""
        self.sms = sms
        self.buffer = Buffer(num_nvl_bytes=room(most), device="cuda", timeout=20, **ends)

    def layout(self, routing: Routing) -> Layout:
        per_rank, _, per_expert, token_in_rank, _ = self.buffer.get_dispatch_layout(
            routing.ids, routing.shape.experts
        )
        return per_rank, token_in_rank, per_expert

    def dispatch(
        self, x: Tokens, routing: Routing, layout: Layout, worst: int = 0, zero_copy: bool = False
    ) -> Received:
        """With ``worst`` the result has that many rows, and the host waits for nothing."""
        returned = self.buffer.dispatch(
            x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[1],
            num_tokens_per_expert=layout[2],
            topk_idx=routing.ids,
            topk_weights=routing.weights,
            num_worst_tokens=worst,
            zero_copy=zero_copy,
            config=Config(self.sms),
        )
        return Received(*returned[:5])

    def dispatch_view(self, x: Tokens, routing: Routing, layout: Layout) -> Received:
        return self.dispatch(
            x, routing, layout, worst=routing.shape.ranks * routing.shape.tokens, zero_copy=True
        )

    def dispatch_reusing(self, x: Tokens, handle: Any) -> Tokens:
        return self.buffer.dispatch(x, handle=handle, config=Config(self.sms))[0]

    def dispatch_view_reusing(self, x: Tokens, handle: Any) -> Tokens:
        return self.buffer.dispatch(x, handle=handle, config=Config(self.sms), zero_copy=True)[0]

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self.buffer.combine(rows, handle, config=Config(self.sms))[0]

    def check(self) -> None:
        super().check()
        self.buffer.check()
