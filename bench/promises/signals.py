"""How soon a kernel that polls a word on its GPU sees a signal, after the data that the signal stands for.

Two processes of one host: this one owns memory on a GPU and has a kernel poll it, the other writes eight bytes there, from its
own GPU memory, with a signal. The kernel notes its clock when it sees the data and when it sees the word. Processes that share a
GPU take turns of milliseconds there; where there is one GPU, `--threads` has both ends in one process. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from uccl import p2p

KERNEL = r"""
extern "C" __global__ void watch(volatile unsigned long long* data, volatile unsigned long long* word,
                                 unsigned long long value, long long* seen) {
  long long data_at = 0;
  while (*word != value) {
    if (!data_at && *data == value) data_at = clock64();
  }
  long long word_at = clock64();
  seen[0] = data_at ? word_at - data_at : 0;
  seen[1] = *data == value;
}
"""
# Seconds after which a write counts as lost.
PATIENCE_S = 30


def write(pipe: Connection, gpu: int, change: str) -> None:
    """The other process: writes each number that the pipe brings, and answers with the time of the
    write."""
    import torch

    source = torch.zeros(1, dtype=torch.int64, device=f"cuda:{gpu}")
    stream = torch.cuda.Stream(gpu)
    with p2p.Endpoint(gpu, bind="127.0.0.1") as endpoint:
        metadata, data, word = pipe.recv()
        ok, conn = endpoint.add_remote_endpoint(metadata)
        ok, mr = endpoint.reg(source)
        while (value := pipe.recv()) is not None:
            with torch.cuda.stream(stream):
                source.fill_(value)
            stream.synchronize()
            signal = (word, value if change == "set" else 1, change)
            begun = time.perf_counter()
            if not endpoint.write(conn, mr, source, None, data, signal=signal):
                raise SystemExit(p2p.last_error())
            pipe.send(time.perf_counter() - begun)


def measure(
    rounds: int, gpus: tuple[int, int], change: str, threads: bool
) -> list[tuple[float, float]]:
    """For each round: microseconds from the data to the word as the kernel sees them, and for the whole write."""
    import torch

    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    make: Any = threading.Thread if threads else context.Process
    writer = make(target=write, args=(theirs, gpus[1], change))
    writer.start()
    torch.cuda.set_device(gpus[0])
    memory = torch.zeros(64, dtype=torch.int64, device="cuda")
    seen = torch.zeros(2, dtype=torch.int64, device="cuda")
    watch = torch.cuda._compile_kernel(KERNEL, "watch")
    clock_khz = torch.cuda.get_device_properties(gpus[0]).clock_rate
    found = []
    with p2p.Endpoint(gpus[0], bind="127.0.0.1") as endpoint:
        ok, mr = endpoint.reg(memory)
        data, word = (endpoint.advertise(mr, memory[at : at + 1])[1] for at in (0, 32))
        pipe.send((endpoint.get_metadata(), data, word))
        for value in range(1, rounds + 1):
            arguments: list[Any] = [memory[0:1], memory[32:33], value, seen]
            watch(grid=(1, 1, 1), block=(1, 1, 1), args=arguments)
            time.sleep(0.002)
            pipe.send(value)
            if not pipe.poll(PATIENCE_S):
                raise SystemExit("the write does not end")
            took = pipe.recv()
            torch.cuda.synchronize()
            clocks, whole = seen.tolist()
            if not whole:
                raise SystemExit(f"round {value}: the word changed before its data")
            found.append((clocks / clock_khz * 1e3, took * 1e6))
        pipe.send(None)
    writer.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 0), metavar=("OWNER", "WRITER"))
    parser.add_argument("--threads", action="store_true", help="both ends in one process")
    options = parser.parse_args()
    for change in ("set", "add"):
        # The first rounds open memory and compile kernels.
        found = measure(options.rounds + 20, tuple(options.gpus), change, options.threads)[20:]
        columns = zip(("word_after_data_us", "whole_write_us"), zip(*found))
        times = {name: statistics.quantiles(column, n=100) for name, column in columns}
        told = {
            name: {"p50": round(all[49], 2), "p99": round(all[98], 2)}
            for name, all in times.items()
        }
        print(json.dumps({"change": change, **told}), flush=True)


if __name__ == "__main__":
    main()
