"""Normal mode and low latency mode in a CUDA graph, for all numbers of ranks, SMs and tokens: a table, and a picture of it.

    python3 -m bench.ep.sweep --all-ranks 2 4 --sms 8 24 64 128 --max-seconds 300 --svg bench/results/NAME.svg

Medians of the slowest rank, microseconds, of calls that a graph repeats: dispatches of bf16, in
normal mode with rows for the worst case, and combines. Low latency mode chooses its SMs itself. All
calls of one number of tokens take their turn in every round; larger numbers are left out when the
time is up. NCCL's all_to_all moves the rows of normal mode, also those that stay with their rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.ep.gpu import NCCL, PATIENCE_S, FewTokens, Measured, measure, on_gpus, slowest
from bench.ep.gpu_normal import ManyTokens
from bench.ep.inputs import row_bytes
from bench.ep.meeting import Meeting
from bench.ep.picture import Curve, picture
from bench.ep.plain import Rows, exchange
from bench.ep.table import all_of

FEW, MANY = "low latency", "normal"
DISPATCH, COMBINE = "dispatch, bf16", "combine"
#: The most tokens of a rank in low latency mode.
MOST_FEW = 1024
#: Microseconds by ranks, call and tokens.
Swept = dict[tuple[int, str], dict[int, float]]


class Few(FewTokens):
    """Low latency mode's calls."""

    def all(self) -> dict[str, Callable[[], Any]]:
        calls = super().all()
        return {f"{FEW}, {what}": calls[what] for what in (DISPATCH, COMBINE)}


class Many(ManyTokens):
    """Normal mode's calls, with each number of SMs, and NCCL's."""

    waiting = ()

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        super().__init__(
            argparse.Namespace(**{**vars(args), "num_sms": max(args.sms)}), rank, **ends
        )

    def all(self) -> dict[str, Callable[[], Any]]:
        calls = super().all()
        worst, combine = calls["dispatch, worst case, bf16"], calls[COMBINE]
        swept: dict[str, Callable[[], Any]] = {}
        for sms in self.args.sms:
            swept[f"{MANY}, {sms} SMs, {DISPATCH}"] = partial(self._with, sms, worst)
            swept[f"{MANY}, {sms} SMs, {COMBINE}"] = partial(self._with, sms, combine)
        rows: Rows = self.rows_between()
        swept[NCCL + "bf16"] = exchange(rows, self.rank, row_bytes("bf16", self.args.hidden))
        return swept

    def _with(self, sms: int, call: Callable[[], Any]) -> Any:
        self.engine.sms = sms
        return call()


def rank_of(rank: int, args: argparse.Namespace, folder: str) -> None:
    """The process of a rank: measures all numbers of tokens that there is time for."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    swept: dict[int, Measured] = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for tokens in args.tokens:
            # Rank 0's clock decides for all.
            is_over = [time.time() > args.until]
            dist.broadcast_object_list(is_over, 0)
            if is_over[0]:
                break
            swept[tokens] = of_tokens(rank, args, tokens, folder)
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, swept)
    if rank == 0:
        torch.save(
            {tokens: slowest([each[tokens] for each in everyone]) for tokens in swept},
            f"{folder}/swept",
        )
    dist.destroy_process_group()


def of_tokens(rank: int, args: argparse.Namespace, tokens: int, folder: str) -> Measured:
    """Measures both modes with this number of tokens."""
    measured: Measured = {}
    for kind in (Few, Many):
        if kind is Few and tokens > MOST_FEW:
            continue
        place = Path(folder) / f"{kind.__name__}-{tokens}"
        place.mkdir(exist_ok=True)
        meeting = Meeting(place, rank, args.ranks, PATIENCE_S)
        shaped = argparse.Namespace(**{**vars(args), "num_tokens": tokens})
        measured |= measure(kind(shaped, rank, group=dist.group.WORLD), meeting.barrier, ("graph",))
    return measured


def sweep(args: argparse.Namespace, ranks: int, swept: Swept) -> None:
    """Adds the times of calls with this number of ranks."""
    shaped = argparse.Namespace(**{**vars(args), "ranks": ranks})
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (shaped, folder), nprocs=ranks)
        for tokens, measured in torch.load(f"{folder}/swept").items():
            for name, rounds in measured.items():
                swept.setdefault((ranks, name), {})[tokens] = statistics.median(
                    all_of(rounds, "graph")
                )


def report(args: argparse.Namespace, swept: Swept) -> None:
    print(
        f"{torch.cuda.get_device_name()}; hidden {args.hidden}, top-{args.num_topk} of {args.num_experts} experts"
    )
    print(
        f"microseconds in a graph, medians of {args.rounds} rounds of {args.calls}, by tokens of a rank\n"
    )
    print(f"{'ranks':6}{'':38}" + "".join(f"{tokens:>9}" for tokens in args.tokens))
    for (ranks, name), taken in swept.items():
        cells = "".join(
            f"{taken[tokens]:9.1f}" if tokens in taken else f"{'-':>9}" for tokens in args.tokens
        )
        print(f"{ranks:<6}{name:38}{cells}", flush=True)


def main() -> None:
    parser = on_gpus("both modes for all numbers of ranks, SMs and tokens")
    parser.set_defaults(num_experts=256, rounds=5)
    powers = [*(4**power for power in range(7)), 8192]
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", default=powers, help="instead of --num-tokens"
    )
    parser.add_argument(
        "--sms", type=int, nargs="+", default=[8, 24, 64, 128], metavar="N", help="of normal mode"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=300, help="after which no more is begun"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture")
    parser.add_argument(
        "--all-ranks",
        type=int,
        nargs="+",
        metavar="N",
        default=[2, 4],
        help="instead of --ranks, as far as there are GPUs",
    )
    args = parser.parse_args()
    args.tokens.sort()
    began, counts = (
        time.time(),
        [ranks for ranks in args.all_ranks if ranks <= torch.cuda.device_count()],
    )
    if not counts:
        parser.error(f"there are {torch.cuda.device_count()} GPUs")
    swept: Swept = {}
    for nth, ranks in enumerate(counts, 1):
        # Each number of ranks has its share of the time.
        args.until = began + args.max_seconds * nth / len(counts)
        sweep(args, ranks, swept)
    report(args, swept)
    if args.svg:
        curves = [
            Curve(f"{ranks} ranks, {name}", sorted(taken.items()))
            for (ranks, name), taken in swept.items()
        ]
        args.svg.write_text(picture("tokens of a rank", "microseconds in a graph", curves))


if __name__ == "__main__":
    main()
