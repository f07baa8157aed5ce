"""Times of short writes to one peer while long writes go to another.

One process is connected to two peers. It times blocking writes of 64 bytes to the first, alone and then while a thread of it
writes 1 GiB after 1 GiB to the second, and prints percentiles of both. The wheel must be installed, and for GPUs PyTorch:

    python -m bench.promises.fair --link tcp,local [--memory heap,alloc,cuda]

With cuda this process's memory is GPU 0's, and the peers' that of the last one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from uccl import p2p

PATIENCE_S = 60


def endpoint(link: Any) -> p2p.Endpoint:
    return p2p.Endpoint(transport=link, bind="127.0.0.1", port=0)


class Memory:
    """Registered memory with all its pages present."""

    def __init__(self, ep: p2p.Endpoint, size: int, kind: str, gpu: int = 0) -> None:
        if kind == "cuda":
            import torch

            device = f"cuda:{gpu % torch.cuda.device_count()}"
            self.bytes = torch.ones(size, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            self.address = self.bytes.data_ptr()
        else:
            self.bytes = (
                np.frombuffer(ep.alloc(size), np.uint8)
                if kind == "alloc"
                else np.empty(size, np.uint8)
            )
            self.bytes[:] = 1
            self.address = self.bytes.ctypes.data
        self.size = size
        ok, self.mr = ep.reg(self.address, size)
        if not ok:
            raise RuntimeError(ep.last_error())


def serve(pipe: Connection, link: str, kind: str, size: int) -> None:
    """A peer: registers memory, and is passive."""
    ep = endpoint(link)
    memory = Memory(ep, size, kind, -1)
    ok, advert = ep.advertise(memory.mr, memory.address, size)
    pipe.send((ep.get_metadata(), advert))
    if not ok or not ep.accept(timeout=PATIENCE_S)[0]:
        raise RuntimeError(ep.last_error())
    try:
        pipe.recv()
    except EOFError:
        pass


class Target:
    """A peer, with a connection and memory for writes to it."""

    def __init__(self, ep: p2p.Endpoint, link: str, kind: str, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, link, kind, size), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(PATIENCE_S):
            raise RuntimeError("the peer does not start")
        metadata, self.advert = self.pipe.recv()
        ip, port, gpu = ep.parse_metadata(metadata)
        ok, self.conn = ep.connect(ip, gpu, port)
        if not ok:
            raise RuntimeError(ep.last_error())
        self.ep, self.memory = ep, Memory(ep, size, kind)

    def write(self) -> None:
        memory = self.memory
        if not self.ep.write(self.conn, memory.mr, memory.address, memory.size, self.advert):
            raise RuntimeError(self.ep.last_error())

    def close(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE_S)


def times_us(target: Target, seconds: float) -> np.ndarray:
    """Microseconds of each write."""
    took = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        target.write()
        took.append(time.perf_counter() - began)
    return np.array(took) * 1e6


class Stream:
    """Writes to a peer until the `with` block ends."""

    def __init__(self, target: Target) -> None:
        self.target, self.stopping, self.written = target, threading.Event(), 0
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.stopping.is_set():
            self.target.write()
            self.written += self.target.memory.size

    def __enter__(self) -> Stream:
        self.began = time.perf_counter()
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stopping.set()
        self.thread.join()
        self.gb_per_s = self.written / (time.perf_counter() - self.began) / 1e9


def percentiles(took: np.ndarray) -> dict[str, float]:
    at = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}
    return {name: round(float(np.percentile(took, q)), 1) for name, q in at.items()}


#: The bar for the 99th percentile beside other writes: `TIMES` times that of writes alone, plus the
#: time of `SLICE` bytes.
TIMES, SLICE = 3, {"cuda": 32 << 20, "heap": 1 << 20, "alloc": 1 << 20}


def measure(link: str, kind: str, short: int, long: int, seconds: float) -> dict[str, Any]:
    ep = endpoint(link)
    near, far = Target(ep, link, kind, short), Target(ep, link, kind, long)
    try:
        times_us(near, seconds / 4)
        far.write()
        alone = times_us(near, seconds)
        with Stream(far) as stream:
            time.sleep(seconds / 10)
            beside = times_us(near, seconds)
        slice_us = SLICE[kind] / stream.gb_per_s / 1e3
        bar_us = TIMES * float(np.percentile(alone, 99)) + slice_us
        return {
            "p99_at_most_us": round(bar_us, 1),
            "met": bool(np.percentile(beside, 99) <= bar_us),
            "link": link,
            "memory": kind,
            "alone_us": percentiles(alone),
            "beside_us": percentiles(beside),
            "beside_gb_per_s": round(stream.gb_per_s, 2),
        }
    finally:
        near.close()
        far.close()
        ep.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="tcp,local", help="links, with commas between them")
    parser.add_argument(
        "--memory", default="heap", help="whose memory: heap, alloc, cuda, with commas between them"
    )
    parser.add_argument("--short", type=int, default=64, help="bytes of a write that is timed")
    parser.add_argument(
        "--long", type=int, default=1 << 30, help="bytes of one that goes on beside"
    )
    parser.add_argument("--seconds", type=float, default=3, help="time for each measurement")
    args = parser.parse_args()
    for link in args.link.split(","):
        for kind in args.memory.split(","):
            found = measure(link, kind, args.short, args.long, args.seconds)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
