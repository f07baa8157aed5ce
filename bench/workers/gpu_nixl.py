"""Two NIXL agents, UCX backend, one transfer in flight; the progress thread is off, both sides spin."""

import base64
import os

import gpu_pair
from nixl_cu13._api import nixl_agent, nixl_agent_config

KINDS = {"gpu": "VRAM", "pinned": "DRAM", "host": "DRAM"}


def agent(name: str) -> nixl_agent:
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def register(side: gpu_pair.Side, kind: str, memory: gpu_pair.Memory) -> None:
    device = side.gpu if kind == "gpu" else 0
    side.agent.register_memory([(memory.address, memory.array.nbytes, device, "")], KINDS[kind])


class Target(gpu_pair.Target):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.agent = agent("target")

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, kind, memory)

    def offer(self, case: dict) -> object:
        # An agent's metadata names what is registered: it is new with every kind of memory.
        address = self.memory(case["memory"]).address
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"agent": metadata, "address": address, "gpu": self.gpu}

    def progress(self) -> None:
        self.agent.get_new_notifs()


class Initiator(gpu_pair.Initiator):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.agent = agent("initiator")
        self.known: set[str] = set()

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, kind, memory)

    def prepare(self, case: dict, offer: object):
        if offer["agent"] not in self.known:
            self.name = self.agent.add_remote_agent(base64.b64decode(offer["agent"]))
            self.known.add(offer["agent"])
        memory = self.local(case)
        mine = self.descriptors(case, memory.address, memory.kind, self.gpu)
        theirs = self.descriptors(case, offer["address"], case["memory"], offer["gpu"])
        handle = self.agent.initialize_xfer(case["op"].upper(), mine, theirs, self.name)
        self.handle = handle

        def transfer() -> None:
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"a transfer ended as {state}")

        return transfer

    def descriptors(self, case: dict, base: int, kind: str, gpu: int):
        device = gpu if kind == "gpu" else 0
        pieces = [(address, case["size"], device) for address in gpu_pair.addresses(base, case)]
        return self.agent.get_xfer_descs(pieces, KINDS[kind])

    def finish(self, case: dict) -> None:
        self.agent.release_xfer_handle(self.handle)


gpu_pair.main(Initiator, Target)
# The wheel carries its own libnl-route, whose unloading crashes on exit; all answers are out.
os._exit(0)
