"""A rank of ``bench/nccl/run.py``: times NCCL's collectives, and prints a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from typing import Callable

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
#: The least time of one measurement, and the most calls of it.
LEAST_S, MOST = 0.3, 2000


def collectives(length: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Each collective over so many bytes, with nccl-tests' factor from bytes to those of the bus."""
    device = f"cuda:{torch.cuda.current_device()}"
    count = max(1, length // 4)
    part = max(1, count // RANKS)
    whole = torch.zeros(part * RANKS, device=device)
    other = torch.zeros(part * RANKS, device=device)
    mine = torch.zeros(part, device=device)
    reduced = torch.zeros(count, device=device)
    into = torch.zeros(count, device=device)

    def around() -> None:
        operations = [
            dist.P2POp(dist.isend, reduced, (RANK + 1) % RANKS),
            dist.P2POp(dist.irecv, into, (RANK - 1) % RANKS),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    ring = (RANKS - 1) / RANKS
    return {
        "all_reduce": (lambda: dist.all_reduce(reduced), 2 * ring),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, mine), ring),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(mine, whole), ring),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole), ring),
        "send_recv": (around, 1.0),
    }


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and the cores that this process used meanwhile."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = torch.tensor([time.perf_counter() - start], device="cuda")
    # All ranks make as many calls as the slowest one suggests.
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    calls = int(min(MOST, max(5, LEAST_S / once.item())))
    dist.barrier()
    torch.cuda.synchronize()
    cpu, start = cpu_s(), time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    return took / calls, (cpu_s() - cpu) / took


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True, help="bytes, with commas between them")
    parser.add_argument("--ops", default="all_reduce,all_to_all")
    parser.add_argument(
        "--no-idle", action="store_true", help="do not look at the time between them"
    )
    options = parser.parse_args()
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    for length in map(int, options.sizes.split(",")):
        for name in options.ops.split(","):
            call, factor = collectives(length)[name]
            seconds, cores = measure(call)
            if RANK == 0:
                row = {
                    "op": name,
                    "bytes": length,
                    "us": seconds * 1e6,
                    "bus_gb_per_s": length * factor / seconds / 1e9,
                    "cores": cores,
                }
                print("row " + json.dumps(row), flush=True)
    if not options.no_idle:
        # Between collectives: nothing is asked for.
        time.sleep(0.5)
        cpu, start = cpu_s(), time.perf_counter()
        time.sleep(2)
        if RANK == 0:
            idle = (cpu_s() - cpu) / (time.perf_counter() - start)
            print("row " + json.dumps({"op": "idle", "bytes": 0, "cores": idle}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
