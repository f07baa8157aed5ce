"""Normal mode's dispatch and combine on GPUs: from entry to usable output, and in a CUDA graph.

    python3 -m bench.ep.gpu_normal --ranks 2 --num-tokens 4096 --hidden 7168 --num-topk 8 --num-experts 256 --num-sms 24

bench/ep/gpu.py describes the method. A dispatch includes its layout. A token's row counts once for
each of its ranks, its own among them, though only rows for other ranks cross the link. Dispatches
that return counts wait for them on the host; those with rows for the worst case do not, and a graph
repeats them.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable

import torch

from bench.ep.engine import Received, Tokens
from bench.ep.gpu import Calls, Measured, of_nccl, on_gpus, run
from bench.ep.inputs import Routing, rows_between
from bench.ep.plain import Rows
from bench.ep.table import Ratio


class ManyTokens(Calls):
    """Calls of normal mode."""

    repeats = 4
    waiting: tuple[str, ...] = ("dispatch, fp8", "dispatch, bf16")

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from bench.ep.ours import Ours

        super().__init__(args, rank)
        self.engine = Ours(self.shape, args.num_sms, **ends)
        self.buffer, self.routing = self.engine.buffer, Routing(self.shape, rank)
        self.rows = torch.randn(self.counts()[0], args.hidden, device="cuda").bfloat16()
        self.copied = self.rows.clone()
        self.first: Received | None = None
        self.viewed: Received | None = None

    def rows_between(self) -> Rows:
        """A row for each rank of a token."""
        return rows_between(self.shape)

    def dispatch(self, x: Tokens, worst: int = 0) -> Received:
        return self.engine.dispatch(x, self.routing, self.engine.layout(self.routing), worst)

    def dispatch_view(self, x: Tokens) -> Received:
        """A dispatch with zero_copy: received rows are views of the buffer."""
        return self.engine.dispatch_view(x, self.routing, self.engine.layout(self.routing))

    def all(self) -> dict[str, Callable[[], Any]]:
        routing, most = self.routing, self.args.ranks * self.args.num_tokens
        first = self.first = self.first or self.dispatch(routing.x)
        viewed = self.viewed = self.viewed or self.dispatch_view(routing.x)
        return {
            "dispatch, fp8": lambda: self.dispatch(routing.quantised),
            "dispatch, bf16": lambda: self.dispatch(routing.x),
            "dispatch, worst case, fp8": lambda: self.dispatch(routing.quantised, most),
            "dispatch, worst case, bf16": lambda: self.dispatch(routing.x, most),
            "dispatch, handle, bf16": lambda: self.engine.dispatch_reusing(routing.x, first.handle),
            "dispatch, in place, fp8": lambda: self.dispatch_view(routing.quantised),
            "dispatch, in place, bf16": lambda: self.dispatch_view(routing.x),
            "dispatch, handle, in place, bf16": lambda: self.engine.dispatch_view_reusing(
                routing.x, viewed.handle
            ),
            "combine": lambda: self.engine.combine(first.tokens, first.handle),
            "copy on this GPU, bf16": lambda: self.copied.copy_(self.rows),
        }

    def compared(self, measured: Measured) -> list[Ratio]:
        forms = {name: name.split(", ")[-1] for name in measured if name.startswith("dispatch")}
        return of_nccl(measured, {**forms, "combine": "bf16"})


def main() -> None:
    parser = on_gpus("normal mode's dispatch and combine on GPUs")
    parser.set_defaults(num_tokens=4096, num_experts=256, rounds=12)
    parser.add_argument("--num-sms", type=int, default=24)
    run(parser.parse_args(), ManyTokens)


if __name__ == "__main__":
    main()
