"""The cost of rows by expert: ElasticBuffer's dispatches with and without do_expand, beside writes
of the additional rows.

    python3 -m bench.ep.expand --ranks 2 --num-tokens 4096 --num-sms 24 0

No dispatch waits for the host (do_cpu_sync=False), so a graph repeats each. bench/ep/gpu.py
describes the method; a dispatch includes its layout. Expanded, a received token is written once for
each of its local experts instead of once. The additional bytes are also written alone: copied on
this GPU by torch, which reads as many and uses all SMs, and filled, which reads none. Neither is
limited to the SMs of a dispatch.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Callable

import torch

from bench.ep.gpu import Calls, Measured, on_gpus, run
from bench.ep.inputs import Routing, row_bytes, rows_between, rows_by_choice
from bench.ep.plain import Rows
from bench.ep.table import Line, Ratio, difference

FORMS = ("bf16", "fp8")


class Expanded(Calls):
    """Dispatches by token and by expert, and writes of the additional bytes."""

    repeats = 4

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import ElasticBuffer

        from bench.ep.ours import room

        super().__init__(args, rank)
        self.buffer = ElasticBuffer(
            num_bytes=room(self.shape),
            num_max_tokens_per_rank=args.num_tokens,
            device="cuda",
            num_cpu_timeout_secs=40,
            num_gpu_timeout_secs=20,
            **{"group": None, **ends},
        )
        self.routing = Routing(self.shape, rank)
        #: By form: the bytes that expanding writes beyond those of one row for a token.
        self.more = {
            form: (self._rows(True) - self._rows(False)) * row_bytes(form, args.hidden)
            for form in FORMS
        }
        made = {
            form: torch.ones(count, dtype=torch.uint8, device="cuda")
            for form, count in self.more.items()
        }
        self.pairs = {form: (made[form], made[form].clone()) for form in FORMS}

    def rows_between(self) -> Rows:
        """A row for each rank of a token."""
        return rows_between(self.shape)

    def all(self) -> dict[str, Callable[[], Any]]:
        calls: dict[str, Callable[[], Any]] = {}
        for form in FORMS:
            for sms in self.args.num_sms:
                calls[_name("contiguous", sms, form)] = self._dispatch(form, sms, False)
                calls[_name("expanded", sms, form)] = self._dispatch(form, sms, True)
            target, source = self.pairs[form]
            calls[f"copy of the difference, {form}"] = partial(target.copy_, source)
            calls[f"fill of the difference, {form}"] = partial(target.fill_, 3)
        return calls

    def size(self, name: str) -> int:
        form = name.split(", ")[-1]
        if "difference" in name:
            return self.more[form]
        # Received bytes, of NCCL's exchange too.
        return self._rows(name.startswith("expanded")) * row_bytes(form, self.args.hidden)

    def remarks(self) -> list[str]:
        lines = []
        for form in FORMS:
            sizes = [
                self._rows(is_expanded) * row_bytes(form, self.args.hidden) / 1e6
                for is_expanded in (False, True)
            ]
            lines.append(
                f"{form}: rank {self.rank} writes {sizes[0]:.2f} MB contiguous, {sizes[1]:.2f} MB expanded: "
                f"{self.more[form] / 1e6:.2f} MB more"
            )
        return [f"rows that arrive: {self._rows(False)}, expanded {self._rows(True)}", *lines]

    def lines(self, measured: Measured) -> list[Line]:
        more = [
            Line(name.replace("expanded", "expanded - contiguous"), self._longer(measured, name), 0)
            for name in measured
            if name.startswith("expanded")
        ]
        return super().lines(measured) + more

    def compared(self, measured: Measured) -> list[Ratio]:
        ratios = []
        for name in [name for name in measured if name.startswith("expanded")]:
            form, longer = name.split(", ")[-1], self._longer(measured, name)
            for what, bar in (("copy", "at most 1.00"), ("fill", "")):
                of_difference = measured[f"{what} of the difference, {form}"]
                ratios.append(
                    Ratio(
                        f"{name.removeprefix('expanded, ')}: difference / {what}",
                        longer,
                        of_difference,
                        bar,
                    )
                )
            contiguous = measured[name.replace("expanded", "contiguous")]
            ratios.append(Ratio(f"{name}: time / contiguous", measured[name], contiguous))
        return ratios

    def _longer(self, measured: Measured, name: str) -> dict[str, list[list[float]]]:
        return difference(measured[name], measured[name.replace("expanded", "contiguous")])

    def _rows(self, is_expanded: bool) -> int:
        """Rows that this rank receives."""
        rows = rows_by_choice(self.shape) if is_expanded else rows_between(self.shape)
        return sum(counts[self.rank] for counts in rows)

    def _dispatch(self, form: str, sms: int, is_expanded: bool) -> Callable[[], Any]:
        routing = self.routing
        return lambda: self.buffer.dispatch(
            routing.quantised if form == "fp8" else routing.x,
            topk_idx=routing.ids,
            topk_weights=routing.weights,
            num_experts=self.shape.experts,
            num_sms=sms,
            do_handle_copy=False,
            do_cpu_sync=False,
            do_expand=is_expanded,
        )


def _name(what: str, sms: int, form: str) -> str:
    return f"{what}, {f'{sms} SMs' if sms else 'all SMs'}, {form}"


def main() -> None:
    parser = on_gpus("rows by expert beside rows by token")
    parser.set_defaults(num_tokens=4096, num_experts=256, rounds=12)
    parser.add_argument(
        "--num-sms", type=int, nargs="+", default=[24, 0], help="each is measured; 0: all"
    )
    run(parser.parse_args(), Expanded)


if __name__ == "__main__":
    main()
