"""A process of bench/ep/beside.py: one rank of a participant, or all copies between GPUs.

It reads lines of JSON: a greeting, then `prepare`, which takes a shape, and `measure`, which times a call; it answers each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

import torch

from bench.ep.engine import calls, check_calls
from bench.ep.inputs import Routing, Shape
from bench.ep.meeting import Meeting
from bench.ep.plain import ONE_WAY, OWN_TOO, Copies, Symmetric, exchange, moved, without_own
from bench.ep.timing import times

#: Seconds that ranks wait for each other.
PATIENCE_S = 60.0
#: A process that has not answered after this many seconds prints its stack.
HUNG_S = 30.0
DOUBLE = struct.Struct("=d")


class Rank:
    """One of several processes, with the GPU of its number."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.rank, self.most = hello["rank"], Shape(**hello["most"])
        self.sms, self.with_layout = hello["sms"], hello["with_layout"]
        torch.cuda.set_device(self.rank)
        # The default stream would wait for other streams, and they for it.
        torch.cuda.set_stream(torch.cuda.Stream())
        self.meeting = Meeting(Path(hello["folder"]), self.rank, self.most.ranks, PATIENCE_S)
        self._calls: dict[str, Callable[[], Any]] = {}

    def prepare(self, shape: Shape, sms: int) -> str:
        """Checks and prepares the calls of a shape; returns facts about them."""
        # Releases the calls of the shape before: this one needs their memory.
        self._calls = {}
        self._calls, remarks = self.made(shape, sms)
        return remarks

    def made(self, shape: Shape, sms: int) -> tuple[dict[str, Callable[[], Any]], str]:
        """The calls of a shape by name, and facts about them."""
        raise NotImplementedError

    def measure(self, what: str, how: str, count: int) -> list[float]:
        return times(how, count, self._calls[what], self.meeting.barrier)

    def agree(self, taken: float) -> float:
        """The slowest rank's time, on all ranks."""
        return max(DOUBLE.unpack(each)[0] for each in self.meeting.allgather(DOUBLE.pack(taken)))


class EngineRank(Rank):
    """A rank of a library."""

    def __init__(self, hello: dict[str, Any]) -> None:
        super().__init__(hello)
        if hello["kind"] == "ours":
            from bench.ep.ours import Ours

            self.engine: Any = Ours(self.most, self.sms, comm=self.meeting)
        else:
            from bench.ep.upstream import Upstream

            self.engine = Upstream(self.most, self.sms, self.meeting)

    def made(self, shape: Shape, sms: int) -> tuple[dict[str, Callable[[], Any]], str]:
        self.engine.sms = sms
        routing = Routing(shape, self.rank)
        check_calls(self.engine, routing)
        remarks = self.engine.tune(routing, self.meeting.barrier, self.agree)
        return calls(self.engine, routing, self.with_layout), remarks

    def measure(self, what: str, how: str, count: int) -> list[float]:
        taken = super().measure(what, how, count)
        self.engine.check()
        return taken


class NcclRank(Rank):
    """A rank of NCCL's all_to_all."""

    def __init__(self, hello: dict[str, Any]) -> None:
        super().__init__(hello)
        torch.distributed.init_process_group(
            "nccl",
            init_method=f"file://{hello['folder']}/store",
            rank=self.rank,
            world_size=self.most.ranks,
            device_id=torch.device("cuda", self.rank),
        )

    def made(self, shape: Shape, sms: int) -> tuple[dict[str, Callable[[], Any]], str]:
        made = {}
        for name, rows, length in moved(shape):
            made[name] = exchange(without_own(rows), self.rank, length)
            made[name + OWN_TOO] = exchange(rows, self.rank, length)
        return made, ".".join(map(str, torch.cuda.nccl.version()))


class SymmetricRank(NcclRank):
    """A rank of PyTorch's all_to_all in symmetric memory."""

    def __init__(self, hello: dict[str, Any]) -> None:
        import torch.distributed._symmetric_memory as symmetric

        # All ranks are on one host, and the other participants use no multicast either.
        os.environ.update(NVSHMEM_REMOTE_TRANSPORT="none", NVSHMEM_DISABLE_NVLS="1")
        symmetric.set_backend("NVSHMEM")
        super().__init__(hello)

    def made(self, shape: Shape, sms: int) -> tuple[dict[str, Callable[[], Any]], str]:
        made = {
            name: Symmetric(without_own(rows), self.rank, length)
            for name, rows, length in moved(shape)
        }
        return dict(made), "all_to_all_vdev, by NVSHMEM"


class CopyingRank(Rank):
    """All copies between GPUs, in one process."""

    def made(self, shape: Shape, sms: int) -> tuple[dict[str, Callable[[], Any]], str]:
        self._copies = {}
        for name, rows, length in moved(shape):
            sizes = [[count * length for count in counts] for counts in without_own(rows)]
            self._copies[name] = Copies(sizes)
            self._copies[name + ONE_WAY] = Copies([[0, sizes[0][1]]])
        return {}, ""

    def measure(self, what: str, how: str, count: int) -> list[float]:
        return self._copies[what].times(how, count)


KINDS: dict[str, type[Rank]] = {
    "ours": EngineRank,
    "upstream": EngineRank,
    "nccl": NcclRank,
    "symm_mem": SymmetricRank,
    "copy": CopyingRank,
}


def answer(rank: Rank, asked: dict[str, Any]) -> object:
    """Executes one request."""
    faulthandler.dump_traceback_later(HUNG_S)
    try:
        if asked["do"] == "prepare":
            return rank.prepare(Shape(**asked["shape"]), asked["sms"])
        return rank.measure(asked["what"], asked["how"], asked["count"])
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    # Libraries print to stdout: it becomes stderr, and answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    hello = json.loads(sys.stdin.readline())
    # Ends the process, even when a library hangs.
    signal.alarm(hello["limit_s"])
    try:
        rank = KINDS[hello["kind"]](hello)
        print("@null", file=answers)
        for line in sys.stdin:
            print("@" + json.dumps(answer(rank, json.loads(line))), file=answers)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Libraries that were stopped in the middle crash when they are taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
