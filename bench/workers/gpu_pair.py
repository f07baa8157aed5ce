"""The common part of the workers with GPU memory: two processes, their memory, and one measurement
after the other.

The initiator reads lines of JSON from stdin: first `gpus`, `room` and `host_room` (bytes of device and of host
memory to take), then one measurement a line (`op`, `size`, `iovs`, `memory`, `seconds`), and answers each. It
starts the target, which is this same script. Before anything is timed, one transfer is looked at byte by byte.
"""

import json
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pair

#: Space between the pieces of a vector, so that they are never adjacent, in bytes.
GAP = 64
POISON = 0xA5
#: Bytes that are filled or compared at once.
CHUNK = 64 << 20


class Memory:
    """A GPU's memory, pinned or plain host memory."""

    def __init__(self, kind: str, size: int, gpu: int):
        self.kind = kind
        if kind == "host":
            import numpy

            self.array = numpy.zeros(size, dtype=numpy.uint8)
            self.address = self.array.ctypes.data
            return
        import torch

        torch.cuda.set_device(gpu)
        self.device = f"cuda:{gpu}"
        if kind == "gpu":
            self.array = torch.zeros(size, dtype=torch.uint8, device=self.device)
        else:
            self.array = torch.zeros(size, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        self.address = self.array.data_ptr()

    def write(self, case: dict, seed: int | None) -> None:
        """Fills the pieces of a case with a seed's pattern, and the gaps with poison; without a
        seed all of it with poison."""
        for start, end in _chunks(case):
            self.array[start:end] = self._wanted(case, start, end, seed)
        self._wait()

    def wrong(self, case: dict, seed: int) -> str | None:
        """The first difference from the bytes of `write` on the other side, if there is one."""
        self._wait()
        for start, end in _chunks(case):
            differs = self.array[start:end] != self._wanted(case, start, end, seed)
            if bool(differs.any()):
                return f"wrong bytes arrived, the first between {start} and {end}"
        return None

    def _wanted(self, case: dict, start: int, end: int, seed: int | None):
        """The expected bytes from `start` to `end`, in memory of the same kind."""
        if self.kind == "host":
            import numpy as xp

            at, byte = xp.arange(start, end, dtype=xp.int64), xp.uint8
            data = _pattern(at, seed)
            return xp.where(at % stride(case) < case["size"], data, POISON).astype(byte)
        import torch as xp

        # The GPU computes the pattern, also for pinned memory.
        at = xp.arange(start, end, dtype=xp.int64, device=self.device)
        wanted = xp.where(at % stride(case) < case["size"], _pattern(at, seed), POISON).to(xp.uint8)
        return wanted if self.kind == "gpu" else wanted.cpu()

    def _wait(self) -> None:
        if self.kind != "host":
            import torch

            torch.cuda.synchronize()


def _pattern(at, seed: int | None):
    """A byte for every offset, different ones for every seed."""
    return POISON if seed is None else ((at * 2_654_435_761 + seed * 40_503) >> 11) & 0xFF


def _chunks(case: dict) -> list[tuple[int, int]]:
    extent = case["iovs"] * stride(case)
    return [(start, min(start + CHUNK, extent)) for start in range(0, extent, CHUNK)]


def stride(case: dict) -> int:
    """From the beginning of a piece to that of the next, in bytes."""
    return case["size"] + (GAP if case["iovs"] > 1 else 0)


def addresses(base: int, case: dict) -> list[int]:
    """Where the pieces of a case begin."""
    return [base + i * stride(case) for i in range(case["iovs"])]


class Side:
    """One of the two processes."""

    def __init__(self, hello: dict, rank: int):
        self.gpu = hello["gpus"][rank]
        self._hello = hello
        self._memory: dict[str, Memory] = {}

    def memory(self, kind: str) -> Memory:
        """Memory of a kind, taken once and then kept."""
        if kind not in self._memory:
            room = self._hello["room"] if kind == "gpu" else self._hello["host_room"]
            self._memory[kind] = Memory(kind, room, self.gpu)
            self.made(kind, self._memory[kind])
        return self._memory[kind]

    def made(self, kind: str, memory: Memory) -> None:
        """Registers memory, if the library needs that."""


class Target(Side):
    """The passive side: the initiator writes and reads its memory. Methods `do_...` answer
    requests."""

    def __init__(self, hello: dict):
        super().__init__(hello, 1)
        #: Whether a measurement is under way, in which `progress` is called all the time.
        self.busy = False

    def introduce(self) -> object:
        """The address and other data for `Initiator.connect`."""

    def offer(self, case: dict) -> object:
        """The description of a case's memory for `Initiator.prepare`."""

    progress: Callable[[], None] | None = None

    def do_begin(self, told: dict) -> object:
        case = told["case"]
        self.memory(case["memory"]).write(case, told["seed"] if case["op"] == "read" else None)
        self.busy = True
        return self.offer(case)

    def do_check(self, told: dict) -> object:
        case = told["case"]
        return (
            self.memory(case["memory"]).wrong(case, told["seed"]) if case["op"] != "read" else None
        )

    def do_end(self, told: dict) -> None:
        self.busy = False

    def serve(self) -> None:
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in sys.stdin:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while line := self._next(lines):
            told = json.loads(line)
            pair.answer(attempt(partial(getattr(self, "do_" + told["do"]), told)))

    def _next(self, lines: "queue.Queue[str]") -> str:
        while self.busy and self.progress is not None:
            try:
                return lines.get_nowait()
            except queue.Empty:
                self.progress()
        return lines.get()


def attempt(work: Callable[[], object]) -> dict:
    """The result of a call, or its error."""
    try:
        return {"value": work()}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}


class Initiator(Side):
    """The side that reads and writes, and measures."""

    def __init__(self, hello: dict):
        super().__init__(hello, 0)
        self.other = pair.Target(hello)
        self._seed = 0

    def connect(self, introduction: Any) -> None:
        """Meets the target."""

    def prepare(self, case: dict, offer: Any) -> Callable[[], object]:
        """One transfer of a case, as a call that returns when it is done and raises when it failed."""
        raise NotImplementedError

    def finish(self, case: dict) -> None:
        """Releases the resources that `prepare` made."""

    def timed(self, transfer: Callable[[], object], case: dict) -> dict:
        return pair.measure(transfer, case, case["seconds"])

    def ask(self, do: str, **told: object) -> Any:
        """The target's answer to a request."""
        self.other.say({"do": do, **told})
        return self.heard()

    def heard(self) -> Any:
        said = self.other.hear()
        if "error" in said:
            raise RuntimeError(f"the target: {said['error']}")
        return said["value"]

    def local(self, case: dict) -> Memory:
        """This side's memory of a case: a GPU's, unless both sides' is the host's."""
        return self.memory("host" if case["memory"] == "host" else "gpu")

    def measure(self, case: dict) -> dict:
        self._seed += 1
        seed = self._seed
        offer = self.ask("begin", case=case, seed=seed)
        self.local(case).write(case, seed if case["op"] != "read" else None)
        transfer = self.prepare(case, offer)
        try:
            transfer()
            wrong = self.ask("check", case=case, seed=seed)
            if case["op"] == "read":
                wrong = self.local(case).wrong(case, seed)
            if wrong:
                raise RuntimeError(wrong)
            return {**self.timed(transfer, case), "verified": "yes"}
        finally:
            self.finish(case)
            self.ask("end")

    def serve(self) -> None:
        pair.answer(attempt(lambda: self.connect(self.heard())))
        for line in sys.stdin:
            case = json.loads(line)
            answer = attempt(partial(self.measure, case))
            pair.answer(answer.get("value") or answer)


def main(initiator: type[Initiator], target: type[Target]) -> None:
    """Runs the side that the command line asks for."""
    hello = pair.orders()
    if sys.argv[1:] == ["target"]:
        made = attempt(lambda: target(hello))
        side = made.get("value")
        pair.answer(attempt(side.introduce) if side else made)
        if side:
            side.serve()
    else:
        initiator(hello).serve()
