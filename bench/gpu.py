#!/usr/bin/env python3
"""GPU memory between two processes of this host, from Python, beside torch's own copy in one process.

Needs two GPUs, torch and the installed wheel: ``python3 bench/gpu.py [--rounds N]``. Times are medians of
blocking calls, the rounds interleaved; GB/s is 1e9 bytes a second. Nothing is verified here:
``tests/test_gpu.py`` does that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
#: Pieces and their length; each has a gap of its own length behind it.
VECTORS = [(64, 4 * KIB), (64, 64 * KIB), (1024, 4 * KIB), (4096, 4 * KIB), (298, 1_179_648)]
HOST = 256 * MIB
DEVICE = max(HOST, *(2 * count * length for count, length in VECTORS))


def own(pipe: Connection) -> None:
    """The process whose memory the other one reads and writes."""
    import torch
    from uccl import p2p

    with p2p.Endpoint(port=0, bind="127.0.0.1") as endpoint:
        pipe.send(endpoint.get_metadata())
        endpoint.accept(timeout=60)
        shared = endpoint.alloc(HOST)
        memory = {
            "cuda": torch.zeros(DEVICE, dtype=torch.uint8, device="cuda:1"),
            "alloc": torch.frombuffer(shared, dtype=torch.uint8),
            "pinned": torch.zeros(HOST, dtype=torch.uint8).pin_memory(),
        }
        torch.cuda.synchronize(1)
        regions = {name: endpoint.reg(tensor)[1] for name, tensor in memory.items()}
        while (asked := pipe.recv()) is not None:
            name, offsets, lengths = asked
            pointers = [memory[name].data_ptr() + offset for offset in offsets]
            ok, adverts = endpoint.advertisev([regions[name]] * len(offsets), pointers, lengths)
            pipe.send(adverts if ok else endpoint.last_error())


def median_s(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """The median of each call's time, the calls in turn in every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            for _ in range(repeats):
                start = time.perf_counter()
                if call() is False:
                    raise RuntimeError(f"{name} failed")
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def show(what: str, size: int, taken: dict[str, float]) -> None:
    for name, seconds in taken.items():
        print(f"{what:<18} {name:<14} {seconds * 1e6:>10.1f} us {size / seconds / 1e9:>8.1f} GB/s", flush=True)


class Initiator:
    """The process that measures."""

    def __init__(self, pipe: Connection) -> None:
        import torch
        from uccl import p2p

        self.torch, self.pipe = torch, pipe
        self.endpoint = p2p.Endpoint(port=0, bind="127.0.0.1")
        ip, port, gpu = self.endpoint.parse_metadata(pipe.recv())
        ok, self.conn = self.endpoint.connect(ip, gpu, port)
        if not ok:
            raise RuntimeError(self.endpoint.last_error())
        self.memory = torch.zeros(DEVICE, dtype=torch.uint8, device="cuda:0")
        self.other = torch.zeros(HOST, dtype=torch.uint8, device="cuda:1")
        self.pinned = torch.zeros(HOST, dtype=torch.uint8).pin_memory()
        for device in (0, 1):
            torch.cuda.synchronize(device)
        self.mr = self.endpoint.reg(self.memory)[1]
        self.base = self.memory.data_ptr()

    def adverts(self, name: str, offsets: list[int], lengths: list[int]) -> list[bytes]:
        self.pipe.send((name, offsets, lengths))
        return self.pipe.recv()

    def torch_copy(self, to: Any, size: int) -> Callable[[], None]:
        stream = self.torch.cuda.current_stream(0)

        def copy() -> None:
            to[:size].copy_(self.memory[:size], non_blocking=True)
            stream.synchronize()

        return copy

    def one_piece(self, size: int, rounds: int) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "torch to GPU": self.torch_copy(self.other, size),
            "torch to host": self.torch_copy(self.pinned, size),
        }
        for name in ("cuda", "alloc", "pinned"):
            advert = self.adverts(name, [0], [size])[0]
            for kind in ("write", "read"):
                move = getattr(self.endpoint, kind)
                calls[f"{kind} {name}"] = lambda move=move, advert=advert: move(
                    self.conn, self.mr, self.base, size, advert
                )
        show(f"{size} B", size, median_s(calls, rounds, 20 if size > 4 * MIB else 100))

    def vector(self, count: int, length: int, rounds: int) -> None:
        order = random.Random(1)
        here, there = ([2 * i * length for i in range(count)] for _ in range(2))
        order.shuffle(here)
        order.shuffle(there)
        lengths, regions = [length] * count, [self.mr] * count
        pointers = [self.base + offset for offset in here]
        adverts = self.adverts("cuda", there, lengths)
        calls: dict[str, Callable[[], Any]] = {}
        for kind in ("writev", "readv"):
            move = getattr(self.endpoint, kind)
            calls[kind] = lambda move=move: move(
                self.conn, regions, pointers, lengths, adverts, count
            )
        show(f"{count} x {length} B", count * length, median_s(calls, rounds, 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    initiator = Initiator(pipe)
    for size in SIZES:
        initiator.one_piece(size, rounds)
    for count, length in VECTORS:
        initiator.vector(count, length, rounds)
    initiator.endpoint.close()
    pipe.send(None)
    owner.join(30)


if __name__ == "__main__":
    main()
