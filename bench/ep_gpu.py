#!/usr/bin/env python3
"""Low latency dispatch and combine on GPUs: from entry to usable output, and in a CUDA graph.

    python3 bench/ep_gpu.py --ranks 2 --num-tokens 128 --hidden 7168 --num-topk 8 --num-experts 288

Ranks are processes, one for each GPU, or threads of one process that share the only one. Times are of CUDA events on each rank's stream,
the slowest rank's, medians of all rounds: once as a program calls it, with what the host takes, and once as a call of a graph that
repeats it, which is what the kernels take with the waits among them. ``--kernels`` adds what each kernel of such a graph takes. Rows count once for each expert of a token, also those that stay
with their rank; the second figure of bytes is of rows for other ranks. Beside them: a copy of as many bytes on this GPU, or, between
GPUs, NCCL's all_to_all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep import arguments

#: Calls in a graph.
REPEATS = 20
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
    """A rank's calls."""

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import Buffer

        self.args, self.rank = args, rank
        tokens, hidden, experts = args.num_tokens, args.hidden, args.num_experts
        size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, args.ranks, experts)
        self.buffer = Buffer(num_rdma_bytes=size, low_latency_mode=True, device="cuda", timeout=20, **ends)
        torch.manual_seed(rank)
        self.x = torch.randn(tokens, hidden).bfloat16().cuda()
        self.ids = torch.rand(tokens, experts).topk(args.num_topk).indices.cuda()
        self.weights = torch.rand(tokens, args.num_topk).cuda()
        self.rows = torch.randn(tokens * args.num_topk, hidden, device="cuda").bfloat16()
        self.copied = torch.empty_like(self.rows)
        self.made, self.handle = None, None

    def dispatch(self, fp8: bool) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x, self.ids, self.args.num_tokens, self.args.num_experts, use_fp8=fp8
        )

    def combine(self) -> Any:
        if self.handle is None:
            self.made, _, self.handle, _, _ = self.dispatch(False)
        return self.buffer.low_latency_combine(self.made, self.ids, self.weights, self.handle)

    def all(self) -> dict[str, Callable[[], Any]]:
        return {
            "dispatch, fp8": lambda: self.dispatch(True),
            "dispatch, bf16": lambda: self.dispatch(False),
            "combine": self.combine,
            "copy on this GPU, bf16": lambda: self.copied.copy_(self.rows),
        }


def elapsed(work: Callable[[], Any]) -> float:
    """Microseconds of a stream's work, from the call on."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3


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
        for name, call in calls.all().items() if turn == calls.rank else ():
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
                for _ in range(REPEATS):
                    call()
    # Capturing has given back what torch kept.
    meet()
    reserve()
    for _ in range(calls.args.rounds):
        for name, call in calls.all().items():
            meet()
            times.setdefault(name, []).append(elapsed(call))
            meet()
            times.setdefault(f"{name}: graph", []).append(elapsed(graphs[name].replay) / REPEATS)
    meet()
    calls.buffer.check()
    return times


def kernels_of(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel in a stream's work, by name, of one of its repetitions."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / repeats for event in profile.key_averages()}


def report(args: argparse.Namespace, ids: torch.Tensor, all_times: list[Times], how: str) -> None:
    """A table: medians of the slowest rank of each round."""
    owners = ids.cpu() // (args.num_experts // args.ranks)
    counts = ids.numel(), int((owners != 0).sum())
    print(f"{torch.cuda.get_device_name()}, {how}; {args.num_tokens} tokens each, hidden {args.hidden}, ", end="")
    print(f"top-{args.num_topk}, {args.num_experts} experts; medians of {args.rounds} rounds")
    print(f"{counts[0]} rows of a rank, {counts[1]} of them for other ranks")
    print(f"{'':26} {'us':>8} {'graph us':>9} {'MB':>8} {'foreign':>8} {'graph GB/s':>10}")
    for name in [name for name in all_times[0] if not name.endswith(": graph")]:
        took, in_graph = (
            statistics.median(max(rank) for rank in zip(*(times[key] for times in all_times)))
            for key in (name, f"{name}: graph")
        )
        row = args.hidden + args.hidden // 32 if "fp8" in name else 2 * args.hidden
        sizes = [count * row / 1e6 for count in counts]
        print(f"{name:26} {took:8.1f} {in_graph:9.1f} {sizes[0]:8.2f} {sizes[1]:8.2f} {sizes[0] / in_graph * 1e3:10.1f}")


def in_threads(args: argparse.Namespace) -> None:
    """All ranks on this GPU."""
    barrier = threading.Barrier(args.ranks, timeout=50)
    board = [b""] * args.ranks

    def run(rank: int) -> tuple[Times, torch.Tensor]:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                calls = Calls(args, rank, comm=Thread(board, barrier, rank))
                return measure(calls, barrier.wait), calls.ids
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(args.ranks) as pool:
        done = [work.result() for work in [pool.submit(run, rank) for rank in range(args.ranks)]]
    report(args, done[0][1], [times for times, _ in done], f"{args.ranks} ranks that share it, in one process")


def in_process(rank: int, args: argparse.Namespace, folder: str) -> None:
    """A rank with a GPU of its own."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    with torch.cuda.stream(torch.cuda.Stream()):
        calls = Calls(args, rank, group=dist.group.WORLD)
        others = calls.all

        def with_nccl() -> dict[str, Callable[[], Any]]:
            even = len(calls.rows) // args.ranks * args.ranks
            rows, copied = calls.rows[:even], calls.copied[:even]
            return {**others(), "NCCL all_to_all, bf16": lambda: dist.all_to_all_single(copied, rows)}

        calls.all = with_nccl  # type: ignore[method-assign]
        times = measure(calls, dist.barrier)
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, times)
    if rank == 0:
        report(args, calls.ids, everyone, f"{args.ranks} ranks, each with one")
    dist.destroy_process_group()


def main() -> None:
    args = arguments("low latency dispatch and combine on GPUs")
    if torch.cuda.device_count() < args.ranks:
        in_threads(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
