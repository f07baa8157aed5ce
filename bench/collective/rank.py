"""A rank of ``bench/collective/run.py``: times collectives that copy over the backend ``uccl`` and over gloo, in turns,
and prints a line of JSON for each case."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
import uccl.distributed  # noqa: F401

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
BACKENDS = ["uccl", "gloo"]
#: The most calls of one measurement.
MOST = 2000


def collectives(length: int) -> dict[str, Callable[[Any], object]]:
    """Each collective, with so many bytes for each pair of ranks."""
    mine = torch.zeros(length, dtype=torch.uint8)
    whole = torch.zeros(length * RANKS, dtype=torch.uint8)
    other = torch.zeros(length * RANKS, dtype=torch.uint8)
    return {
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, mine, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda group: dist.broadcast(mine, src=0, group=group),
    }


def measure(call: Callable[[], object], least_s: float) -> float:
    """Seconds of a call."""
    call()
    dist.barrier()
    start = time.perf_counter()
    call()
    once = torch.tensor([time.perf_counter() - start])
    # All ranks make as many calls as the slowest one suggests.
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    calls = int(min(MOST, max(3, least_s / once.item())))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor([(time.perf_counter() - start) / calls])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True, help="bytes, with commas between them")
    parser.add_argument("--ops", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--store", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    store = f"file://{options.store}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=RANKS, timeout=limit)
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in BACKENDS}
    for length in map(int, options.sizes.split(",")):
        for name, call in collectives(length).items():
            if name not in options.ops.split(","):
                continue
            times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            for turn in range(options.rounds):
                for backend in BACKENDS[:: 1 if turn % 2 else -1]:
                    took = measure(lambda: call(groups[backend]), options.seconds)
                    times[backend].append(took)
            if RANK == 0:
                row = {"op": name, "bytes": length, "ranks": RANKS, "seconds": times}
                print("row", json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
