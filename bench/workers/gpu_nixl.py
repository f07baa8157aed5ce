"""Two NIXL agents, one transfer in flight; both sides spin.

In addition to the fields of all such workers, the greeting has `backend` (UCX) and
`progress_thread` (off). A case's `cost` names the call that is timed instead of whole transfers, on
the initiator, of the whole call and for each piece: "post" makes a transfer from two lists of
descriptors and starts it, "post_prepped" does so from prepared lists, "repost" only starts it.
"""

import base64
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_pair
from nixl._api import nixl_agent, nixl_agent_config

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

    def offer(self, case: dict) -> object:
        # An agent's metadata names its registered memory: it changes with every kind of memory.
        address = self.memory(case["memory"]).address
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"agent": metadata, "address": address, "gpu": self.gpu}

    def progress(self) -> None:
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
