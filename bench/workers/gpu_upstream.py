"""UCCL's own wheel: its calls between two processes of one host, blocking, one GPU a process."""

import base64
from collections.abc import Callable
from typing import Any

import gpu_pair
import torch
from uccl import p2p


def endpoint(gpu: int) -> p2p.Endpoint:
    torch.cuda.set_device(gpu)
    try:
        return p2p.Endpoint(gpu)
    except TypeError:
        return p2p.Endpoint(gpu, 4)


class Target(gpu_pair.Target):
    def __init__(self, hello: dict):
        super().__init__(hello)
        self.endpoint = endpoint(self.gpu)

    def introduce(self) -> object:
        # The first registration starts the engine, and with it the listener for connections.
        memory = self.memory("gpu")
        self.endpoint.reg(memory.address, memory.array.nbytes)
        return base64.b64encode(self.endpoint.get_metadata()).decode()

    def do_accept(self, told: dict) -> None:
        ok, _, self.conn = self.endpoint.accept_local()
        if not ok:
            raise RuntimeError("accept_local failed")

    def offer(self, case: dict) -> object:
        size, count = case["size"], case["iovs"]
        places = gpu_pair.addresses(self.memory("gpu").address, case)
        if count == 1:
            ok, info = self.endpoint.advertise_ipc(self.conn, places[0], size)
            infos = [info]
        else:
            ok, infos = self.endpoint.advertisev_ipc(self.conn, places, [size] * count)
        if not ok:
            raise RuntimeError("advertise_ipc failed")
        return [base64.b64encode(bytes(info)).decode() for info in infos]


class Initiator(gpu_pair.Initiator):
    def connect(self, introduction: Any) -> None:
        self.endpoint = endpoint(self.gpu)
        memory = self.memory("gpu")
        self.endpoint.reg(memory.address, memory.array.nbytes)
        _, _, other = p2p.Endpoint.parse_metadata(base64.b64decode(introduction))
        self.other.say({"do": "accept"})
        ok, self.conn = self.endpoint.connect_local(other)
        self.heard()
        if not ok:
            raise RuntimeError("connect_local failed")

    def prepare(self, case: dict, offer: Any):
        size, count = case["size"], case["iovs"]
        infos = [base64.b64decode(info) for info in offer]
        places = gpu_pair.addresses(self.memory("gpu").address, case)
        call: Callable[..., bool]
        arguments: tuple[Any, ...]
        if count == 1:
            call = {"write": self.endpoint.write_ipc, "read": self.endpoint.read_ipc}[case["op"]]
            arguments = (self.conn, places[0], size, infos[0])
        else:
            call = {"write": self.endpoint.writev_ipc, "read": self.endpoint.readv_ipc}[case["op"]]
            arguments = (self.conn, places, [size] * count, infos)

        def transfer() -> None:
            if not call(*arguments):
                raise RuntimeError("a transfer failed")

        return transfer


gpu_pair.main(Initiator, Target)
