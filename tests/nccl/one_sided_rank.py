"""A rank that puts with NCCL's one-sided calls and checks every byte: ``one_sided_rank.py [--seconds N]``.

NCCL is the library that the process finds first (``LD_PRELOAD`` of NCCL 2.30.7 or later beside an older torch).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
SIZES = [8, 1000, 4096, 65_536, 1_000_001, 16 << 20]
LONGEST = max(SIZES)
#: ``ncclInt8``, ``NCCL_WIN_COLL_SYMMETRIC``.
INT8, SYMMETRIC = 0, 1


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Wait(ctypes.Structure):
    """So many signals of a peer."""

    _fields_ = [(name, ctypes.c_int) for name in ("count", "peer", "signal", "context")]


class View:
    """Memory of the GPU, for torch."""

    def __init__(self, at: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (at, False),
            "version": 3,
        }


class Nccl:
    """NCCL's own calls on one communicator."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        print(f"NCCL {version.value}", flush=True)
        own = UniqueId()
        if RANK == 0:
            self.call("ncclGetUniqueId", ctypes.byref(own))
        shared = torch.frombuffer(bytearray(bytes(own)), dtype=torch.uint8)
        dist.broadcast(shared, 0)
        ctypes.memmove(ctypes.byref(own), bytes(shared.tolist()), 128)
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(self.comm), RANKS, own, RANK)
        self.stream = torch.cuda.Stream()
        self.queue = ctypes.c_void_p(self.stream.cuda_stream)

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self.library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def window(self, length: int) -> tuple[torch.Tensor, ctypes.c_void_p, int]:
        """Memory that all ranks have, as a tensor, a window and an address."""
        at, window = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(at), ctypes.c_size_t(length))
        register = (self.comm, at, ctypes.c_size_t(length), ctypes.byref(window), SYMMETRIC)
        self.call("ncclCommWindowRegister", *register)
        address = at.value or 0
        return torch.as_tensor(View(address, length), device="cuda"), window, address

    def put(self, at: int, length: int, peer: int, window: ctypes.c_void_p, offset: int) -> None:
        length_, offset_ = ctypes.c_size_t(length), ctypes.c_size_t(offset)
        target = (peer, window, offset_, 0, 0, 0, self.comm, self.queue)
        self.call("ncclPutSignal", ctypes.c_void_p(at), length_, INT8, *target)

    def signal(self, peer: int) -> None:
        self.call("ncclSignal", peer, 0, 0, 0, self.comm, self.queue)

    def wait(self, count: int, peer: int) -> None:
        one = Wait(count, peer, 0, 0)
        self.call("ncclWaitSignal", 1, ctypes.byref(one), self.comm, self.queue)


def pattern(length: int, seed: int) -> torch.Tensor:
    at = torch.arange(length, device="cuda", dtype=torch.int64)
    return ((at * 7 + seed * 13 + at // 251) % 251).to(torch.uint8)


def exchange(nccl: Nccl, windows: list, length: int, seed: int, extra: int) -> None:
    """Puts to all other ranks and to this one, with some signals more, and checks their bytes."""
    (source, _, at), (target, window, _) = windows
    with torch.cuda.stream(nccl.stream):
        source[:length] = pattern(length, seed + RANK)
        for peer in range(RANKS):
            nccl.put(at, length, peer, window, RANK * LONGEST)
            for _ in range(extra):
                nccl.signal(peer)
        for peer in range(RANKS):
            nccl.wait(1 + extra, peer)
        for peer in range(RANKS):
            found = target[peer * LONGEST :][:length]
            if not torch.equal(found, pattern(length, seed + peer)):
                raise AssertionError(f"rank {RANK}: wrong bytes of rank {peer}, {length} bytes")
    nccl.stream.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.cuda.current_stream().synchronize()
    dist.init_process_group("gloo")
    nccl = Nccl()
    windows = [nccl.window(LONGEST), nccl.window(LONGEST * RANKS)]
    for number, length in enumerate(SIZES):
        exchange(nccl, windows, length, number, number)
    chosen, end, rounds = random.Random(1), time.monotonic() + arguments.seconds, 0
    while True:
        # The ranks go on alike.
        goes_on = torch.tensor([int(time.monotonic() < end)])
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        exchange(nccl, windows, chosen.randint(1, LONGEST), rounds, chosen.randint(0, 5))
        rounds += 1
    print(f"all right: {len(SIZES)} sizes, {rounds} at random", flush=True)
    nccl.call("ncclCommDestroy", nccl.comm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
