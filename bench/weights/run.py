"""Weights from two trainers to two inference ranks with another sharding, by several ways.

    python3 -m bench.weights.run --bytes 1e9                            # host memory
    python3 -m bench.weights.run --ways uccl,nccl --devices cuda:0,cuda:1,cuda:2,cuda:3

Each rank is a process. A round changes all weights, then moves them; its time is that of the slowest rank, from a common
start. The bytes of the last round are compared with what they have to be. It prints a line of JSON for each way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from typing import Any


def rank_process(pipe: Any, role: str, rank: int, args: argparse.Namespace, device: str) -> None:
    from bench.weights.model import Arrays, parts
    from bench.weights.ways import WAYS

    arrays = Arrays(device)
    ranks = args.trainers if role == "trainer" else args.servers
    own = list(parts(role, rank, ranks, args.bytes))
    memory = {part.name: arrays.empty(part.sizes) for part in own}
    way = WAYS[args.way](role, rank, arrays, memory, own)

    def fill(version: int) -> None:
        way.begin()
        for part in own:
            memory[part.name][:] = arrays.expected(part, version)
        arrays.synchronize()
        way.publish(version)

    def check(version: int) -> bool:
        return all(
            arrays.is_equal(memory[part.name], arrays.expected(part, version)) for part in own
        )

    def run(version: int, start: float) -> tuple[float, int]:
        time.sleep(max(start - time.time(), 0))
        moved = way.run(version)
        return time.time() - start, moved

    calls: dict[str, Any] = {
        "describe": way.describe,
        "join": way.join,
        "fill": fill,
        "check": check,
        "run": run,
    }
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return
        pipe.send(calls[name](*arguments))


class Ranks:
    """All processes of one way."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        roles = [("trainer", i) for i in range(args.trainers)]
        roles += [("server", i) for i in range(args.servers)]
        devices = args.devices.split(",")
        self.pipes, self.processes = [], []
        for number, (role, rank) in enumerate(roles):
            pipe, other = context.Pipe()
            device = devices[number % len(devices)]
            process = context.Process(target=rank_process, args=(other, role, rank, args, device))
            process.start()
            other.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        self.trainers, self.servers = self.pipes[: args.trainers], self.pipes[args.trainers :]

    def call(self, pipes: list[Any], name: str, *arguments: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((name, arguments))
        return [pipe.recv() for pipe in pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(("end", ()))
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ranks = Ranks(args)
    try:
        described = [ranks.call(ranks.trainers, "describe"), ranks.call(ranks.servers, "describe")]
        begun = time.time()
        ranks.call(ranks.pipes, "join", *described)
        joined = time.time() - begun
        seconds, moved = [], 0
        # The first round connects, and is not counted.
        for version in range(1, args.rounds + 2):
            ranks.call(ranks.trainers, "fill", version)
            ended = ranks.call(ranks.pipes, "run", version, time.time() + 0.1)
            moved = sum(count for _, count in ended)
            if version > 1:
                seconds.append(max(took for took, _ in ended))
        assert all(ranks.call(ranks.servers, "check", args.rounds + 1)), "other bytes have come"
    finally:
        ranks.close()
    median = statistics.median(seconds)
    return {
        "way": args.way,
        "devices": args.devices,
        "bytes": moved,
        "plan_s": round(joined, 4),
        "seconds": [round(one, 4) for one in seconds],
        "gb_per_s": round(moved / median / 1e9, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default="uccl,nixl")
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=8_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--devices", default="cpu", help="of the ranks in turn, trainers first")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        args.port = probe.getsockname()[1]
    import os

    os.environ["WEIGHTS_RENDEZVOUS"] = f"tcp://127.0.0.1:{args.port}"
    for way in args.ways.split(","):
        args.way = way
        print(json.dumps(measure(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
