#!/usr/bin/env python3
"""Low latency dispatch and combine on GPUs: from entry to usable output, and in a CUDA graph.

    python3 bench/ep_gpu.py --ranks 2 --num-tokens 128 --hidden 7168 --num-topk 8 --num-experts 288

Ranks are processes, one for each GPU, or threads of one process that share the only one. Times are of CUDA events on each rank's stream,
the slowest rank's, medians of all rounds: once as a program calls it, with what the host takes, and once as a call of a graph that
repeats it, which is what the kernels take with the waits among them. Rows count once for each expert of a token, also those that stay
with their rank; the second figure of bytes is of rows for other ranks. Beside them: a copy of as many bytes on this GPU, or, between
GPUs, NCCL's all_to_all of the same rows, as many from each rank to each, its own too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep import arguments
from ep_inputs import Routed, row_bytes, rows_by_choice, shape_of
from ep_plain import Rows, exchange
from ep_timing import elapsed

Times = dict[str, list[float]]


class Thread:
    """A rank in a thread, as a communicator of MPI's is."""

    def __init__(self, board: list[bytes], barrier: threading.Barrier, rank: int) -> None:
        self._board, self._barrier, self._rank = board, barrier, rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._board)

    def allgather(self, mine: bytes) -> list[bytes]:
        self._board[self._rank] = mine
        self._barrier.wait()
        everyone = list(self._board)
        self._barrier.wait()
        return everyone


class Calls:
    """A rank's calls, by name."""

    #: Of each in a graph.
    repeats = 20
    #: Those that wait on the host, which no graph can repeat.
    waiting: tuple[str, ...] = ()
    args: argparse.Namespace
    rank: int
    buffer: Any
    #: What is copied beside them, and where to.
    rows: torch.Tensor
    copied: torch.Tensor

    def rows_between(self) -> Rows:
        """Rows from each rank to each."""
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """Rows of this rank, and those of them for other ranks."""
        rows = self.rows_between()[self.rank]
        return sum(rows), sum(rows) - rows[self.rank]

    def all(self) -> dict[str, Callable[[], Any]]:
        """All calls."""
        raise NotImplementedError


class FewTokens(Calls):
    """Calls of low latency mode."""

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import Buffer

        self.args, self.rank, self.shape = args, rank, shape_of(args)
        tokens, hidden, experts = args.num_tokens, args.hidden, args.num_experts
        size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, args.ranks, experts)
        self.buffer = Buffer(num_rdma_bytes=size, low_latency_mode=True, device="cuda", timeout=20, **ends)
        routed = Routed(self.shape, rank)
        self.x, self.ids, self.weights = routed.x, routed.ids, routed.weights
        self.rows = torch.randn(tokens * args.num_topk, hidden, device="cuda").bfloat16()
        # The driver loads what divides now, and not while a kernel waits for another rank of this process.
        self.copied = self.rows / 16
        self.made, self.handle = None, None

    def dispatch(self, **form: Any) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.ids, self.args.num_tokens, self.args.num_experts, **form)

    def combine(self, **form: Any) -> Any:
        if self.handle is None:
            made, _, self.handle, _, _ = self.dispatch(use_fp8=False)
            # Below 1, as LogFMT packs them.
            self.made = made / 16
        return self.buffer.low_latency_combine(self.made, self.ids, self.weights, self.handle, **form)

    def rows_between(self) -> Rows:
        """One for each expert of a token."""
        return rows_by_choice(self.shape)

    def all(self) -> dict[str, Callable[[], Any]]:
        return {
            "dispatch, fp8": self.dispatch,
            "dispatch, bf16": lambda: self.dispatch(use_fp8=False),
            "dispatch, nvfp4": lambda: self.dispatch(use_nvfp4=True, x_global_scale=100.0),
            "combine": self.combine,
            "combine, logfmt": lambda: self.combine(use_logfmt=True),
            "copy on this GPU, bf16": lambda: self.copied.copy_(self.rows),
        }


def reserve() -> None:
    """Has torch take memory now: the driver gives none while a kernel waits for another rank of this process."""
    kept = [torch.empty(1 << 33, dtype=torch.uint8, device="cuda")]
    kept += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(256)]
    del kept


def measure(calls: Calls, meet: Callable[[], Any]) -> Times:
    """Microseconds of each call, as they are made and in graphs."""
    times: Times = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    reserve()
    meet()
    for _ in range(3):
        for call in calls.all().values():
            call()
    torch.cuda.synchronize()
    for turn in range(calls.args.ranks):
        meet()
        graphed = [name for name in calls.all() if turn == calls.rank and name not in calls.waiting]
        for name in graphed:
            call = calls.all()[name]
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
                for _ in range(calls.repeats):
                    call()
    # Capturing has given back what torch kept.
    meet()
    reserve()
    for _ in range(calls.args.rounds):
        for name, call in calls.all().items():
            meet()
            times.setdefault(name, []).append(elapsed(call))
            if name in graphs:
                meet()
                times.setdefault(f"{name}: graph", []).append(elapsed(graphs[name].replay) / calls.repeats)
    meet()
    calls.buffer.check()
    return times


def report(args: argparse.Namespace, counts: tuple[int, int], all_times: list[Times], how: str) -> None:
    """A table: medians of the slowest rank of each round; ``counts`` are those of the first."""
    print(f"{torch.cuda.get_device_name()}, {how}; {args.num_tokens} tokens each, hidden {args.hidden}, ", end="")
    print(f"top-{args.num_topk}, {args.num_experts} experts; medians of {args.rounds} rounds")
    print(f"{counts[0]} rows of a rank, {counts[1]} of them for other ranks")
    print(f"{'':26} {'us':>8} {'graph us':>9} {'MB':>8} {'foreign':>8} {'graph GB/s':>10}")
    for name in [name for name in all_times[0] if not name.endswith(": graph")]:
        took, in_graph = (
            statistics.median(max(rank) for rank in zip(*(times.get(key, [math.nan]) for times in all_times)))
            for key in (name, f"{name}: graph")
        )
        sizes = [count * row_bytes(name.split(", ")[-1], args.hidden) / 1e6 for count in counts]
        rate = sizes[0] / in_graph * 1e3
        print(f"{name:26} {took:8.1f} {in_graph:9.1f} {sizes[0]:8.2f} {sizes[1]:8.2f} {rate:10.1f}")


def in_threads(args: argparse.Namespace, kind: type[Calls]) -> None:
    """All ranks on this GPU."""
    barrier = threading.Barrier(args.ranks, timeout=50)
    board = [b""] * args.ranks

    def run(rank: int) -> tuple[Times, tuple[int, int]]:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                calls = kind(args, rank, comm=Thread(board, barrier, rank))
                return measure(calls, barrier.wait), calls.counts()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(args.ranks) as pool:
        done = [work.result() for work in [pool.submit(run, rank) for rank in range(args.ranks)]]
    report(args, done[0][1], [times for times, _ in done], f"{args.ranks} ranks that share it, in one process")


def in_process(rank: int, args: argparse.Namespace, kind: type[Calls], folder: str) -> None:
    """A rank with a GPU of its own."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    with torch.cuda.stream(torch.cuda.Stream()):
        calls = kind(args, rank, group=dist.group.WORLD)
        others, rows = calls.all, calls.rows_between()
        exchanges = {
            f"NCCL all_to_all, {form}": exchange(rows, rank, row_bytes(form, args.hidden)) for form in ("fp8", "bf16")
        }

        def with_nccl() -> dict[str, Callable[[], Any]]:
            return {**others(), **exchanges}

        calls.all = with_nccl  # type: ignore[method-assign]
        times = measure(calls, dist.barrier)
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, times)
    if rank == 0:
        report(args, calls.counts(), everyone, f"{args.ranks} ranks, each with one")
    dist.destroy_process_group()


def run(args: argparse.Namespace, kind: type[Calls]) -> None:
    """Measures one kind of calls, on as many GPUs as there are."""
    if torch.cuda.device_count() < args.ranks:
        in_threads(args, kind)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, (args, kind, folder), nprocs=args.ranks)


if __name__ == "__main__":
    run(arguments("low latency dispatch and combine on GPUs").parse_args(), FewTokens)
