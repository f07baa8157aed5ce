"""Asynchronous calls beside a matrix product: the part of the shorter one that takes no time.

    python3 -m bench.ep.overlap --mode many --ranks 2 --num-tokens 4096 --num-sms 8 12 16 24
    python3 -m bench.ep.overlap --mode few --ranks 2 --num-tokens 128 --num-experts 288

bench/ep/gpu.py describes the method. A call is made on the communication stream, a product of bf16
matrices on the current one, and then the current stream waits for the call. Hidden: what both
together take less than one after the other, as a fraction of the shorter one. Blocks of a call take
multiprocessors from the product while they run, so with as many as `--num-sms` of 132, at most
1 - num_sms / 132 of a call is hidden by a product that is limited by them.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any, Callable

import torch

from bench.ep.gpu import Calls, Measured, on_gpus, run
from bench.ep.inputs import Routing, rows_between, rows_by_choice
from bench.ep.plain import Rows
from bench.ep.table import Ratio, Rounds

PRODUCT, BESIDE = "matrix product", ", beside it"


class Overlap(Calls):
    """Calls alone, a product alone, and each call beside it."""

    repeats = 4

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        super().__init__(args, rank)
        self.routing = Routing(self.shape, rank)
        rows = args.product_rows or (512 if args.mode == "few" else 8192)
        self.left = torch.randn(rows, args.hidden, device="cuda").bfloat16()
        self.right = torch.randn(args.hidden, 4096, device="cuda").bfloat16()
        self.product = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")

    def multiply(self) -> None:
        torch.mm(self.left, self.right, out=self.product)

    def asynchronous(self) -> dict[str, Callable[[], Any]]:
        """Functions that make a call and return its event, last or last but one."""
        raise NotImplementedError

    def all(self) -> dict[str, Callable[[], Any]]:
        made: dict[str, Callable[[], Any]] = {PRODUCT: self.multiply}
        for name, call in self.asynchronous().items():
            made[name] = self.waited(call)
            made[name + BESIDE] = self.waited(call, self.multiply)
        return made

    def waited(self, call: Callable[[], Any], *beside: Callable[[], None]) -> Callable[[], Any]:
        """A call, the work beside it, and the wait for the call."""

        def both() -> Any:
            returned = call()
            for work in beside:
                work()
            event = next(one for one in returned if hasattr(one, "current_stream_wait"))
            event.current_stream_wait()
            return returned

        return both

    def size(self, name: str) -> int:
        """No rate: the bytes of a call and a product do not add up."""
        return 0

    def compared(self, measured: Measured) -> list[Ratio]:
        product = measured[PRODUCT]
        return [
            Ratio(
                f"{name}: hidden",
                combined(hidden, measured[name], product, measured[name + BESIDE]),
                combined(shorter, measured[name], product, measured[name + BESIDE]),
                "at least 0.90",
            )
            for name in measured
            if name + BESIDE in measured
        ]


def hidden(call: float, product: float, both: float) -> float:
    """What both take less than one after the other."""
    return call + product - both


def shorter(call: float, product: float, both: float) -> float:
    """The time of the shorter one."""
    return min(call, product)


def combined(of: Callable[[float, float, float], float], *measured: Rounds) -> Rounds:
    """A value of the medians of each round."""
    return {
        how: [
            [of(*map(statistics.median, taken))]
            for taken in zip(*(rounds[how] for rounds in measured))
        ]
        for how in measured[0]
        if all(how in rounds for rounds in measured)
    }


class ManyTokens(Overlap):
    """Calls of normal mode."""

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from bench.ep.ours import Ours

        super().__init__(args, rank, **ends)
        self.buffer = Ours(self.shape, max(args.num_sms), **ends).buffer

    def rows_between(self) -> Rows:
        """A row for each rank of a token."""
        return rows_between(self.shape)

    def asynchronous(self) -> dict[str, Callable[[], Any]]:
        from uccl.ep import Config

        routing, buffer, experts = self.routing, self.buffer, self.args.num_experts
        per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(routing.ids, experts)
        asked = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": token_in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": routing.ids,
            "topk_weights": routing.weights,
            # No counts, so that a graph repeats the call.
            "num_worst_tokens": self.args.ranks * self.args.num_tokens,
        }
        rows, *_, handle, _ = buffer.dispatch(routing.x, **asked)

        def dispatch(sms: int) -> Any:
            return buffer.dispatch(routing.x, **asked, config=Config(sms), async_finish=True)

        def combine(sms: int) -> Any:
            return buffer.combine(rows, handle, config=Config(sms), async_finish=True)

        return {
            f"{call.__name__}, {sms} blocks": partial(call, sms)
            for sms in self.args.num_sms
            for call in (dispatch, combine)
        }


class FewTokens(Overlap):
    """Calls of low latency mode."""

    repeats = 20

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import Buffer

        super().__init__(args, rank, **ends)
        size = Buffer.get_low_latency_rdma_size_hint(
            args.num_tokens, args.hidden, args.ranks, args.num_experts
        )
        self.buffer = Buffer(
            num_rdma_bytes=size, low_latency_mode=True, device="cuda", timeout=20, **ends
        )

    def rows_between(self) -> Rows:
        """A row for each expert of a token."""
        return rows_by_choice(self.shape)

    def asynchronous(self) -> dict[str, Callable[[], Any]]:
        routing, buffer, args = self.routing, self.buffer, self.args

        def dispatch(**options: Any) -> Any:
            return buffer.low_latency_dispatch(
                routing.x, routing.ids, args.num_tokens, args.num_experts, **options
            )

        rows, _, handle, _, _ = dispatch(use_fp8=False)

        def combine() -> Any:
            return buffer.low_latency_combine(
                rows, routing.ids, routing.weights, handle, async_finish=True
            )

        return {
            "dispatch, fp8": lambda: dispatch(async_finish=True),
            "dispatch, bf16": lambda: dispatch(use_fp8=False, async_finish=True),
            "combine": combine,
        }


def main() -> None:
    parser = on_gpus("asynchronous calls beside a matrix product")
    parser.set_defaults(num_experts=256, rounds=12)
    parser.add_argument("--mode", choices=("few", "many"), default="many")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[8, 12, 16, 24])
    parser.add_argument(
        "--product-rows", type=int, default=0, help="of the product; 0: 512 (few) or 8192 (many)"
    )
    args = parser.parse_args()
    run(args, FewTokens if args.mode == "few" else ManyTokens)


if __name__ == "__main__":
    main()
