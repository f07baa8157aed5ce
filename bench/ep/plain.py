"""Baselines of expert parallelism: the same bytes by NCCL, and by the driver's copies from GPU to
GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Callable

import torch
import torch.distributed as dist

from bench.ep.inputs import Shape, row_bytes, rows_between
from bench.ep.timing import QUEUED

#: Rows from each rank to each.
Rows = list[list[int]]
#: Suffixes of names: with the rows that stay with their rank, and with only rank 0's rows for rank
#: 1.
OWN_TOO, ONE_WAY = ", own too", ", one way"


def moved(shape: Shape) -> list[tuple[str, Rows, int]]:
    """The baselines: their names, the rows that they move, and the bytes of a row."""
    rows, hidden = rows_between(shape), shape.hidden
    return [
        ("dispatch fp8", rows, row_bytes("fp8", hidden)),
        ("dispatch bf16", rows, row_bytes("bf16", hidden)),
        ("combine bf16", sent_back(rows), row_bytes("bf16", hidden)),
    ]


def without_own(rows: Rows) -> Rows:
    """Rows that cross a link."""
    return [
        [0 if to == rank else count for to, count in enumerate(counts)]
        for rank, counts in enumerate(rows)
    ]


def sent_back(rows: Rows) -> Rows:
    """Rows of a combine, which sends them back."""
    return [list(counts) for counts in zip(*rows)]


def exchange(rows: Rows, rank: int, length: int) -> Callable[[], Any]:
    """NCCL's all_to_all of rows of ``length`` bytes, with sizes that all ranks know."""
    sends, comes = rows[rank], [counts[rank] for counts in rows]
    source = torch.ones((sum(sends), length), dtype=torch.uint8, device="cuda")
    target = torch.empty((sum(comes), length), dtype=torch.uint8, device="cuda")
    return lambda: dist.all_to_all_single(target, source, comes, sends)


class Symmetric:
    """PyTorch's all_to_all in its symmetric memory, by NVSHMEM: rows of ``length`` bytes, with
    counts that only the GPU knows. Its constructor is collective."""

    def __init__(self, rows: Rows, rank: int, length: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._group = dist.distributed_c10d._get_default_group().group_name
        sends, comes = rows[rank], [counts[rank] for counts in rows]
        # Symmetric tensors have the same size on all ranks.
        most, here = max(map(sum, [*rows, *sent_back(rows), [1]])), torch.device("cuda", rank)
        self._source, self._target = (
            symmetric.empty(most, length, dtype=torch.uint8, device=here) for _ in range(2)
        )
        self._sends = symmetric.empty(len(rows), dtype=torch.int64, device=here).copy_(
            torch.tensor(sends)
        )
        self._comes = symmetric.empty(2, len(rows), dtype=torch.int64, device=here)
        for tensor in (self._source, self._target, self._sends, self._comes):
            symmetric.rendezvous(tensor, group=self._group)
        self._source.fill_(rank + 1)
        torch.cuda.synchronize()
        dist.barrier()
        self()
        received = self._target[: sum(comes)]
        wanted = torch.repeat_interleave(torch.arange(1, len(rows) + 1), torch.tensor(comes)).to(
            here
        )
        if not bool(received.eq(wanted[:, None]).all()):
            raise RuntimeError("symmetric memory's all_to_all brings other rows")

    def __call__(self) -> None:
        torch.ops.symm_mem.all_to_all_vdev(
            self._source, self._target, self._sends, self._comes, self._group
        )


class Copies:
    """A process's copies between its GPUs, all at once, by the driver: each GPU sends every other
    its part."""

    def __init__(self, bytes_between: Rows) -> None:
        self._pairs = [
            Pair(source, target, count)
            for source, counts in enumerate(bytes_between)
            for target, count in enumerate(counts)
            if count
        ]
        self._devices = sorted({pair.source for pair in self._pairs})

    def times(self, how: str, count: int) -> list[float]:
        """Microseconds until the slowest GPU's copies are there. A first round is not counted."""
        each = 1 if how == "called" else QUEUED
        return [self._once(each) for _ in range(count + 1)][1:]

    def _once(self, each: int) -> float:
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        events = {
            device: [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for device in self._devices
        }
        for device, (began, _) in events.items():
            began.record(torch.cuda.current_stream(device))
        for pair in self._pairs:
            pair.begin()
        for _ in range(each):
            for pair in self._pairs:
                pair.copy()
        for pair in self._pairs:
            pair.end()
        for device, (_, ended) in events.items():
            ended.record(torch.cuda.current_stream(device))
        for _, ended in events.values():
            ended.synchronize()
        return max(began.elapsed_time(ended) for began, ended in events.values()) / each * 1e3


class Pair:
    """A copy of bytes from one GPU to another."""

    def __init__(self, source: int, target: int, count: int) -> None:
        self.source = source
        sent = torch.ones(count, dtype=torch.uint8, device=f"cuda:{source}")
        taken = torch.empty(count, dtype=torch.uint8, device=f"cuda:{target}")
        self._tensors, self._stream = (taken, sent), torch.cuda.Stream(source)
        # With this copy torch lets the GPUs reach each other.
        taken[:1].copy_(sent[:1])
        self._arguments = (taken.data_ptr(), target, sent.data_ptr(), source, count)
        taken.zero_()
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        self.copy()
        self._stream.synchronize()
        if not bool(taken.eq(1).all()):
            raise RuntimeError(f"a copy from GPU {source} to GPU {target} brings other bytes")

    def begin(self) -> None:
        """Makes the copies wait for the source's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.source))

    def copy(self) -> None:
        """Copies by the runtime: torch would make both GPUs' streams wait for each other before and
        after."""
        taken, target, sent, source, count = self._arguments
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        status = runtime().cudaMemcpyPeerAsync(
            ctypes.c_void_p(taken),
            target,
            ctypes.c_void_p(sent),
            source,
            ctypes.c_size_t(count),
            stream,
        )
        if status:
            raise RuntimeError(
                f"cudaMemcpyPeerAsync from GPU {source} to GPU {target}: error {status}"
            )

    def end(self) -> None:
        """Makes the source's current stream wait for the copies."""
        torch.cuda.current_stream(self.source).wait_stream(self._stream)


@cache
def runtime() -> ctypes.CDLL:
    """CUDA's runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
