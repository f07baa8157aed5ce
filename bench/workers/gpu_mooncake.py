"""Two Mooncake transfer engines with its NVLink path within a host, synchronous calls, no metadata server."""

from typing import Any

import gpu_pair
import torch  # noqa: F401  (brings CUDA's runtime, which the engine is linked to)
from mooncake.engine import TransferEngine

HOST = "127.0.0.1"


def engine(gpu: int) -> TransferEngine:
    torch.cuda.set_device(gpu)
    made = TransferEngine()
    if made.initialize(HOST, "P2PHANDSHAKE", "nvlink_intra", "") != 0:
        raise RuntimeError("initialize with nvlink_intra failed")
    return made


def register(side: gpu_pair.Side, memory: gpu_pair.Memory) -> None:
    if side.engine.register_memory(memory.address, memory.array.nbytes) != 0:
        raise RuntimeError("register_memory failed")


class Target(gpu_pair.Target):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.engine = engine(self.gpu)

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, memory)

    def introduce(self) -> object:
        # The initiator reads a segment's buffers once: they must be registered before.
        self.memory("gpu")
        return f"{HOST}:{self.engine.get_rpc_port()}"

    def offer(self, case: dict) -> object:
        return self.memory(case["memory"]).address


class Initiator(gpu_pair.Initiator):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.engine = engine(self.gpu)

    def connect(self, introduction: Any) -> None:
        self.name = introduction

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        register(self, memory)

    def prepare(self, case: dict, offer: Any):
        memory, size, count = self.local(case), case["size"], case["iovs"]
        me = self.engine
        if count == 1:
            call = {"write": me.transfer_sync_write, "read": me.transfer_sync_read}[case["op"]]
            arguments = (self.name, memory.address, offer, size)
        else:
            call = {"write": me.batch_transfer_sync_write, "read": me.batch_transfer_sync_read}[
                case["op"]
            ]
            mine, theirs = (gpu_pair.addresses(base, case) for base in (memory.address, offer))
            arguments = (self.name, mine, theirs, [size] * count)

        def transfer() -> None:
            status = call(*arguments)
            if status != 0:
                raise RuntimeError(f"a transfer ended with {status}")

        return transfer


gpu_pair.main(Initiator, Target)
