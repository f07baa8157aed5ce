"""A rank that checks every byte of NCCL's collectives: ``nccl_rank.py CASE [--max-bytes N] [--seconds N]``.

With ``--cpu`` it uses gloo and no GPU, which tries this program and no plugin.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from typing import Callable

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
#: Sums of these are exact in both types.
VALUES = 5
DTYPES = (torch.bfloat16, torch.int64)


class Device:
    """Where tensors are."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        if not on_cpu:
            torch.cuda.set_device(RANK % torch.cuda.device_count())
        self.name = "cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}"

    def begin(self) -> None:
        if self.on_cpu:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("nccl", device_id=torch.device(self.name))

    def values(self, count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Small whole numbers, the same wherever they are made."""
        at = torch.arange(count, device=self.name, dtype=torch.int64)
        return ((at * 7 + seed * 13 + at // 11) % VALUES).to(dtype)


def equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found, wanted):
        wrong = (found != wanted).nonzero().flatten()
        raise AssertionError(
            f"rank {RANK}, {what}: {len(wrong)} of {len(found)} values are wrong, the first at {wrong[0]}"
        )


def all_reduce(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    mine = on.values(count, seed + RANK, dtype)
    dist.all_reduce(mine, group=group)
    wanted = sum(
        (on.values(count, seed + rank, dtype) for rank in range(1, RANKS)),
        on.values(count, seed, dtype),
    )
    equal(mine, wanted, f"all_reduce of {count} {dtype}")


def all_gather(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    all_of = torch.empty(count * RANKS, dtype=dtype, device=on.name)
    dist.all_gather_into_tensor(all_of, on.values(count, seed + RANK, dtype), group=group)
    for rank, part in enumerate(all_of.chunk(RANKS)):
        equal(part, on.values(count, seed + rank, dtype), f"all_gather of {count} {dtype}")


def reduce_scatter(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    mine = torch.empty(count, dtype=dtype, device=on.name)
    if on.on_cpu:
        return
    dist.reduce_scatter_tensor(mine, on.values(count * RANKS, seed + RANK, dtype), group=group)
    parts = [
        on.values(count * RANKS, seed + rank, dtype).chunk(RANKS)[RANK] for rank in range(RANKS)
    ]
    equal(mine, sum(parts[1:], parts[0]), f"reduce_scatter of {count} {dtype}")


def all_to_all(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    into = torch.empty(count * RANKS, dtype=dtype, device=on.name)
    dist.all_to_all_single(into, on.values(count * RANKS, seed + RANK, dtype), group=group)
    for rank, part in enumerate(into.chunk(RANKS)):
        theirs = on.values(count * RANKS, seed + rank, dtype).chunk(RANKS)[RANK]
        equal(part, theirs, f"all_to_all of {count} {dtype}")


def send_recv(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    into = torch.empty(count, dtype=dtype, device=on.name)
    after, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    mine = on.values(count, seed + RANK, dtype)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, after, group=group),
            dist.P2POp(dist.irecv, into, before, group=group),
        ]
    )
    for work in works:
        work.wait()
    equal(into, on.values(count, seed + before, dtype), f"send and recv of {count} {dtype}")


def broadcast(on: Device, count: int, seed: int, dtype: torch.dtype, group: object) -> None:
    mine = on.values(count, seed + RANK, dtype)
    dist.broadcast(mine, 0, group=group)
    equal(mine, on.values(count, seed, dtype), f"broadcast of {count} {dtype}")


OPERATIONS: tuple[Callable[[Device, int, int, torch.dtype, object], None], ...] = (
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    send_recv,
    broadcast,
)


def sweep(on: Device, options: argparse.Namespace) -> None:
    """Every operation, both types, sizes from one value on."""
    on.begin()
    length, seed = 1, 0
    while length <= options.max_bytes:
        for dtype in DTYPES:
            for extra in (0, 1):
                count = max(1, length // dtype.itemsize) + extra
                for operation in OPERATIONS:
                    operation(on, count, seed, dtype, None)
                    seed += 1
        length *= 4
    dist.destroy_process_group()


def randomly(on: Device, options: argparse.Namespace) -> None:
    """Operations and sizes at random, the same on all ranks, for some seconds."""
    on.begin()
    rng = random.Random(options.seed)
    end, calls = time.monotonic() + options.seconds, 0
    go_on = torch.ones(1, device=on.name)
    while go_on.item() > 0:
        for _ in range(20):
            count = 1 << rng.randrange(options.max_bytes.bit_length() - 3)
            count += rng.randrange(count)
            operation = rng.choice(OPERATIONS)
            operation(on, count, calls, rng.choice(DTYPES), None)
            calls += 1
        # The first rank's clock is that of all.
        go_on.fill_(float(time.monotonic() < end))
        dist.broadcast(go_on, 0)
    print(f"{calls} calls")
    dist.destroy_process_group()


def together(on: Device, _options: argparse.Namespace) -> None:
    """Two communicators at once, each used by a thread and a stream of its own."""
    on.begin()
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            if not on.on_cpu:
                torch.cuda.set_device(on.name)
            stream = None if on.on_cpu else torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for call in range(20):
                    for operation in (all_reduce, all_to_all):
                        operation(
                            on, 1000 << (call % 8), call + number, DTYPES[number], groups[number]
                        )
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    # One after the other first: communicators are made in the same order on all ranks.
    for group in groups:
        all_reduce(on, 10, 0, torch.int64, group)
        all_to_all(on, 10, 0, torch.int64, group)
    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    dist.destroy_process_group()


def remade(on: Device, options: argparse.Namespace) -> None:
    """Made and destroyed again and again; descriptors and threads do not grow."""
    counts = []
    port = int(os.environ["MASTER_PORT"])
    for time_made in range(options.times):
        # Not the port before, which a rank that is late may still use.
        os.environ["MASTER_PORT"] = str(port + time_made % 50)
        on.begin()
        all_reduce(on, 5000, time_made, torch.int64, None)
        dist.destroy_process_group()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    print(f"descriptors and threads: {counts[:3]} .. {counts[-3:]}")
    early, late = counts[min(5, len(counts) - 1)], counts[-1]
    if late[0] > early[0] + 8 or late[1] > early[1] + 4:
        raise AssertionError(f"descriptors and threads grow: {early}, then {late}")


def graphs(on: Device, _options: argparse.Namespace) -> None:
    """An all_reduce in a CUDA graph, replayed."""
    on.begin()
    mine = on.values(100_000, RANK, torch.int64)
    dist.all_reduce(mine)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(mine)
    for seed in range(5):
        mine.copy_(on.values(100_000, seed + RANK, torch.int64))
        graph.replay()
        torch.cuda.synchronize()
        parts = [on.values(100_000, seed + rank, torch.int64) for rank in range(RANKS)]
        equal(mine, sum(parts[1:], parts[0]), "all_reduce in a graph")
    del graph
    dist.destroy_process_group()


def split(on: Device, _options: argparse.Namespace) -> None:
    """Groups of ranks that are made of the whole one."""
    on.begin()
    all_reduce(on, 100, 0, torch.int64, None)
    whole = list(range(RANKS))
    group = dist.new_group(whole, use_local_synchronization=False)
    all_reduce(on, 30_000, 1, torch.int64, group)
    dist.destroy_process_group(group)
    all_reduce(on, 30_000, 2, torch.int64, None)
    dist.destroy_process_group()


def dies(on: Device, _options: argparse.Namespace) -> None:
    """The last rank ends itself in the middle; the others wait for the error."""
    on.begin()
    for call in range(10_000):
        if RANK == RANKS - 1 and call == 20:
            print("dying", flush=True)
            os._exit(0)
        all_reduce(on, 1 << 20, call, torch.int64, None)
    raise AssertionError("the peer is dead, and nothing failed")


CASES = {
    "sweep": sweep,
    "random": randomly,
    "together": together,
    "remade": remade,
    "graphs": graphs,
    "split": split,
    "dies": dies,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--max-bytes", type=int, default=4 << 20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    CASES[options.case](Device(options.cpu), options)
    print(f"{options.case}: every byte is right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
