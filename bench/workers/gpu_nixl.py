"""Two NIXL agents, one transfer in flight; both sides spin.

In addition to the fields of all such workers, the greeting has `backend` (UCX) and
`progress_thread` (off). A case's `cost` names the call that is timed instead of whole transfers, on
the initiator, of the whole call and for each piece: "post" makes a transfer from two lists of
descriptors and starts it, "post_prepped" does so from prepared lists, "repost" only starts it. A
case with `at_once` is so many reads at a time into memory of their own, touched before unless the case is
`fresh`; both sides look once a millisecond. With `naps` the target alone does so.
"""

import base64
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_pair
from nixl._api import nixl_agent, nixl_agent_config

#: Between two looks of a side that does not spin, in seconds.
NAP_S = 0.001
KINDS = {"gpu": "VRAM", "pinned": "DRAM", "host": "DRAM"}


def agent(name: str, hello: dict) -> nixl_agent:
    config = nixl_agent_config(enable_prog_thread=hello.get("progress_thread", False), backends=[])
    made = nixl_agent(name, config)
    # Created here, where a missing backend is an error: the configuration ignores it.
    made.create_backend(hello.get("backend", "UCX"))
    return made


def register(side: gpu_pair.Side, kind: str, memory: gpu_pair.Memory) -> None:
    device = side.gpu if kind == "gpu" else 0
    side.agent.register_memory([(memory.address, memory.array.nbytes, device, "")], KINDS[kind])


class Target(gpu_pair.Target):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.agent = agent("target", hello)

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, kind, memory)

    naps = False

    def offer(self, case: dict) -> object:
        self.naps = case.get("naps", "at_once" in case)
        # An agent's metadata names its registered memory: it changes with every kind of memory.
        address = self.memory(case["memory"]).address
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"agent": metadata, "address": address, "gpu": self.gpu}

    def progress(self) -> None:
        if self.naps:
            time.sleep(NAP_S)
        self.agent.get_new_notifs()


class Initiator(gpu_pair.Initiator):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.agent = agent("initiator", hello)
        self.known: set[str] = set()
        self.lists: list = []

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, kind, memory)

    def prepare(self, case: dict, offer: Any):
        if offer["agent"] not in self.known:
            self.name = self.agent.add_remote_agent(base64.b64decode(offer["agent"]))
            self.known.add(offer["agent"])
        memory = self.local(case)
        mine = self.descriptors(case, memory.address, memory.kind, self.gpu)
        theirs = self.descriptors(case, offer["address"], case["memory"], offer["gpu"])
        self.theirs = theirs
        self.maker = self.making(case, mine, theirs)
        self.handle = self.maker()
        return lambda: self.run(self.handle)

    def making(self, case: dict, mine, theirs) -> Callable[[], object]:
        """A call that makes a transfer of the case."""
        op = case["op"].upper()
        if case.get("cost") != "post_prepped":
            return lambda: self.agent.initialize_xfer(op, mine, theirs, self.name)
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine)
        remote = self.agent.prep_xfer_dlist(self.name, theirs)
        self.lists = [local, remote]
        every = list(range(case["iovs"]))
        return lambda: self.agent.make_prepped_xfer(op, local, every, remote, every)

    def run(self, handle) -> None:
        self.wait(handle, self.agent.transfer(handle))

    def wait(self, handle, state: str) -> None:
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    def timed(self, transfer: Callable[[], object], case: dict) -> dict:
        if "at_once" in case:
            return self.timed_at_once(case)
        cost = case.get("cost")
        if not cost:
            return super().timed(transfer, case)
        clock = time.perf_counter_ns
        took: list[int] = []
        end = clock() + case["seconds"] * 1e9
        while clock() < end or len(took) < 3:
            start = clock()
            if cost != "repost":
                self.agent.release_xfer_handle(self.handle)
                start = clock()
                self.handle = self.maker()
            state = self.agent.transfer(self.handle)
            took.append(clock() - start)
            self.wait(self.handle, state)
        median = statistics.median(took)
        return {"ns": median / case["iovs"], "us": median / 1000, "transfers": len(took)}

    def timed_at_once(self, case: dict) -> dict:
        took: list[float] = []
        end = time.perf_counter() + case["seconds"]
        fewest = 3 if case["at_once"] == 1 else 1
        while time.perf_counter() < end or len(took) < fewest:
            took.append(self.at_once(case))
        moved = case["at_once"] * case["iovs"] * case["size"]
        median = statistics.median(took)
        return {"gb_s": moved / median / 1e9, "us": median * 1e6, "transfers": len(took)}

    def at_once(self, case: dict) -> float:
        """The seconds from the first post until all reads have ended."""
        import numpy

        stride, agent = gpu_pair.stride(case), self.agent
        room, private = case["iovs"] * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        made = []
        for _ in range(case["at_once"]):
            memory = numpy.frombuffer(mmap.mmap(-1, room, flags=private), dtype=numpy.uint8)
            if not case["fresh"]:
                memory[:: mmap.PAGESIZE] = 1
            known = agent.register_memory([(memory.ctypes.data, room, 0, "")], "DRAM")
            mine = self.descriptors(case, memory.ctypes.data, "host", 0)
            handle = agent.initialize_xfer("READ", mine, self.theirs, self.name, b"request")
            made.append((memory, known, handle))
        start = time.perf_counter()
        for _, _, handle in made:
            agent.transfer(handle)
        left = [handle for _, _, handle in made]
        while left:
            states = [agent.check_xfer_state(handle) for handle in left]
            if not set(states) <= {"PROC", "DONE"}:
                raise RuntimeError(f"transfers ended as {set(states)}")
            left = [handle for handle, state in zip(left, states) if state == "PROC"]
            if left:
                time.sleep(NAP_S)
        took = time.perf_counter() - start
        # Every byte was looked at before; of these, some blocks of each transfer are.
        looked_at = slice(None, None, 50), slice(case["size"])
        wanted = self.local(case).array[:room].reshape(-1, stride)[looked_at]
        for memory, known, handle in made:
            agent.release_xfer_handle(handle)
            agent.deregister_memory(known)
            if not (memory.reshape(-1, stride)[looked_at] == wanted).all():
                raise RuntimeError("wrong bytes arrived")
        return took

    def descriptors(self, case: dict, base: int, kind: str, gpu: int):
        device = gpu if kind == "gpu" else 0
        pieces = [(address, case["size"], device) for address in gpu_pair.addresses(base, case)]
        return self.agent.get_xfer_descs(pieces, KINDS[kind])

    def finish(self, case: dict) -> None:
        self.agent.release_xfer_handle(self.handle)
        while self.lists:
            self.agent.release_dlist_handle(self.lists.pop())


gpu_pair.main(Initiator, Target)
# The wheel's own libnl-route crashes when it is unloaded at exit; all answers are out.
os._exit(0)
