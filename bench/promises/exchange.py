"""Rates of writes from every GPU to all others at once, beside one pair's and NCCL's all_to_all.

One process a GPU. In interleaved rounds: one pair alone (GPU 0 to GPU 1), then all to all with the peers in order of their number
(the worst: all begin with the same one), rotated, and in a random order, then `torch.distributed.all_to_all_single` of the same
bytes. Rates are GB/s (1e9 bytes a second) that one GPU sends. The wheel must be installed, and PyTorch with CUDA:

    python -m bench.promises.exchange [--gpus N] [--mib 16,128] [--before FOLDER]

With --before, ranks that import the package from that folder (`pip install --target FOLDER WHEEL`) are measured beside, in the same
rounds.

Without GPUs (--device cpu) it moves host memory, and there is no NCCL to compare with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_S = 120
ORDERS = ("same", "rotated", "random")
#: The bars: shares of one pair's rate, and of NCCL's.
OF_A_PAIR, OF_NCCL = 0.85, 1.0


class Rank:
    """One process, its memory, and its connections."""

    def __init__(self, rank: int, count: int, size: int, device: str) -> None:
        from uccl import p2p

        self.rank, self.count, self.size = rank, count, size
        if device == "cpu":
            import numpy as np

            self.source, self.target = (np.full(count * size, rank + 1, np.uint8) for _ in range(2))
            addresses = [array.ctypes.data for array in (self.source, self.target)]
        else:
            import torch

            torch.cuda.set_device(rank)
            make = torch.full
            self.source, self.target = (
                make((count * size,), rank + 1, dtype=torch.uint8, device="cuda") for _ in range(2)
            )
            torch.cuda.synchronize()
            addresses = [tensor.data_ptr() for tensor in (self.source, self.target)]
        self.ep = p2p.Endpoint(rank if device != "cpu" else 0, bind="127.0.0.1", port=0)
        self.base = addresses[0]
        self.source_mr, self.target_mr = (
            self.good(self.ep.reg(at, count * size)) for at in addresses
        )
        # Adverts of the parts that the peers write to.
        self.adverts = [
            self.good(self.ep.advertise(self.target_mr, addresses[1] + peer * size, size))
            for peer in range(count)
        ]
        self.conns: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}

    def good(self, returned: tuple[bool, Any]) -> Any:
        if not returned[0]:
            raise RuntimeError(self.ep.last_error())
        return returned[1]

    def meet(self, all_of_them: list[tuple[Any, list[Any]]]) -> None:
        for peer in range(self.count):
            if peer == self.rank:
                continue
            metadata, adverts = all_of_them[peer]
            self.theirs[peer] = adverts[self.rank]
            ip, port, gpu = self.ep.parse_metadata(metadata)
            self.conns[peer] = self.good(self.ep.connect(ip, gpu, port))

    def write_to(self, peers: list[int]) -> None:
        under_way = []
        for peer in peers:
            at = self.base + peer * self.size
            under_way.append(
                self.good(
                    self.ep.write_async(
                        self.conns[peer], self.source_mr, at, self.size, self.theirs[peer]
                    )
                )
            )
        until = time.perf_counter() + PATIENCE_S
        while under_way:
            under_way = [
                transfer for transfer in under_way if not self.good(self.ep.poll_async(transfer))
            ]
            if time.perf_counter() > until:
                raise RuntimeError("an exchange does not end")

    def peers(self, order: str, seed: int) -> list[int]:
        others = [(self.rank + step) % self.count for step in range(1, self.count)]
        if order == "same":
            others.sort()
        elif order == "random":
            random.Random(seed * self.count + self.rank).shuffle(others)
        return others

    def is_right(self) -> bool:
        """Whether all peers' bytes are here."""
        parts = self.target.reshape(self.count, self.size)
        return all(bool((parts[peer] == peer + 1).all()) for peer in range(self.count))


def run(rank: int, args: Any, size: int, port: int, folder: str | None, pipe: Connection) -> None:
    """One rank: executes the steps that the pipe brings, together with the others."""
    if folder:
        sys.path.insert(0, folder)
    me = Rank(rank, args.gpus, size, args.device)
    pipe.send((me.ep.get_metadata(), me.adverts))
    me.meet(pipe.recv())
    group = nccl(rank, args.gpus, port) if args.device != "cpu" and not folder else None
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        what, count, seed = told
        # Orders are drawn before the clock starts.
        orders = [me.peers(what, seed + turn) for turn in range(count)]
        began = time.perf_counter()
        for order in orders:
            if what == "pair":
                if rank == 0:
                    me.write_to([1])
            elif what == "nccl":
                group(me)
            else:
                me.write_to(order)
        pipe.send(time.perf_counter() - began)
    pipe.send(me.is_right())
    me.ep.close()


def nccl(rank: int, count: int, port: int) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(
        "nccl", rank=rank, world_size=count, device_id=torch.device("cuda", rank)
    )

    def exchange(me: Rank) -> None:
        dist.all_to_all_single(me.target, me.source)
        torch.cuda.synchronize()

    return exchange


def step(pipes: list[Connection], what: str, count: int, seed: int) -> float:
    """Seconds of the slowest rank for one exchange."""
    for pipe in pipes:
        pipe.send((what, count, seed))
    return max(receive(pipe) for pipe in pipes) / count


def receive(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise RuntimeError("a rank does not answer")
    return pipe.recv()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def gather(args: Any, size: int, folder: str | None) -> tuple[list[Any], list[Connection]]:
    """Starts and connects ranks, which then wait for steps from their pipes."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    ends = [context.Pipe() for _ in range(args.gpus)]
    ranks: list[Any] = []
    for rank, (_, there) in enumerate(ends):
        rank_args = (rank, args, size, port, folder, there)
        ranks.append(context.Process(target=run, args=rank_args, daemon=True))
        ranks[-1].start()
    pipes = [here for here, _ in ends]
    known = [receive(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(known)
    for pipe in pipes:
        receive(pipe)
    return ranks, pipes


def measure(args: Any, mib: int) -> list[dict[str, Any]]:
    size = mib << 20
    sets = {"now": gather(args, size, None)}
    if args.before:
        sets["before"] = gather(args, size, args.before)
    # Pairs of a set of ranks and a step.
    whats = [(ranks, what) for ranks in sets for what in ("pair", *ORDERS)]
    whats += [("now", "nccl")] if args.device != "cpu" else []
    took: dict[tuple[str, str], list[float]] = {what: [] for what in whats}
    right = True
    try:
        for ranks, what in whats:
            step(sets[ranks][1], what, 3, 0)
        for turn in range(args.rounds):
            for ranks, what in random.Random(turn).sample(whats, len(whats)):
                took[ranks, what].append(step(sets[ranks][1], what, args.repeat, turn * 1000))
        for _, pipes in sets.values():
            for pipe in pipes:
                pipe.send(None)
            right &= all(receive(pipe) for pipe in pipes)
    finally:
        for processes, _ in sets.values():
            for process in processes:
                process.join(10)
                process.kill()

    def rate(what: str, times: list[float]) -> float:
        return (1 if what == "pair" else args.gpus - 1) * size / statistics.median(times) / 1e9

    rates = {key: rate(key[1], times) for key, times in took.items()}
    best, nccl = rates["now", "pair"], rates.get(("now", "nccl"))
    found = []
    for (ranks, order), reached in rates.items():
        if order not in ORDERS:
            continue
        pair = rates[ranks, "pair"]
        said = {"gpus": args.gpus, "mib_each": mib, "ranks": ranks, "order": order}
        said |= {"gb_per_s": round(reached, 1), "right": right, "pair_gb_per_s": round(pair, 1)}
        said |= {"of_a_pair": round(reached / max(pair, best), 3)}
        met = reached >= OF_A_PAIR * max(pair, best)
        if nccl:
            said |= {"nccl_gb_per_s": round(nccl, 1), "of_nccl": round(reached / nccl, 3)}
            met &= reached >= OF_NCCL * nccl
        found.append({**said, "met": met and right})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="how many; all, if not said")
    parser.add_argument(
        "--mib", default="16,128", help="MiB to each peer, with commas between them"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the median counts")
    parser.add_argument("--repeat", type=int, default=10, help="exchanges in a round")
    parser.add_argument("--before", help="a folder with the package to measure beside")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="whose memory")
    args = parser.parse_args()
    if args.device == "cuda" and not args.gpus:
        import torch

        args.gpus = torch.cuda.device_count()
    args.gpus = args.gpus or 2
    for mib in args.mib.split(","):
        for found in measure(args, int(mib)):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
