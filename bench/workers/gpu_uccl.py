"""This project from Python: two endpoints, blocking calls. For a "send" the target receives all the
time."""

import base64
from collections.abc import Callable
from typing import Any

import gpu_pair
from uccl import p2p

#: How long the target waits for a send before it looks whether there is something else to do, in seconds.
TURN_S = 0.2


class Target(gpu_pair.Target):
    def introduce(self) -> object:
        self.regions: dict[str, int] = {}
        self.endpoint = p2p.Endpoint(self.gpu, port=0, bind="127.0.0.1")
        return base64.b64encode(self.endpoint.get_metadata()).decode()

    def do_accept(self, told: dict) -> None:
        ok, _, _, self.conn = self.endpoint.accept(timeout=30)
        if not ok:
            raise RuntimeError(p2p.last_error())

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        self.regions[kind] = registered(self.endpoint, memory)

    def offer(self, case: dict) -> object:
        kind, count = case["memory"], case["iovs"]
        self.progress = self.receiving(case) if case["op"] == "send" else None
        places = gpu_pair.addresses(self.memory(kind).address, case)
        ok, adverts = self.endpoint.advertisev(
            [self.regions[kind]] * count, places, [case["size"]] * count
        )
        if not ok:
            raise RuntimeError(p2p.last_error())
        return [base64.b64encode(advert).decode() for advert in adverts]

    def receiving(self, case: dict) -> Callable[[], object]:
        """A call that receives one send of the case, if it arrives within `TURN_S`."""
        kind = case["memory"]
        place = (self.conn, self.regions[kind], self.memory(kind).address, case["size"])
        return lambda: self.endpoint.recv(*place, timeout=TURN_S)


def registered(endpoint: p2p.Endpoint, memory: gpu_pair.Memory) -> int:
    ok, mr = endpoint.reg(memory.address, memory.array.nbytes)
    if not ok:
        raise RuntimeError(p2p.last_error())
    return mr


class Initiator(gpu_pair.Initiator):
    def connect(self, introduction: Any) -> None:
        self.regions: dict[str, int] = {}
        self.endpoint = p2p.Endpoint(self.gpu, port=0, bind="127.0.0.1")
        ip, port, gpu = self.endpoint.parse_metadata(base64.b64decode(introduction))
        self.other.say({"do": "accept"})
        ok, self.conn = self.endpoint.connect(ip, gpu, port)
        self.heard()
        if not ok:
            raise RuntimeError(p2p.last_error())

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        self.regions[kind] = registered(self.endpoint, memory)

    def prepare(self, case: dict, offer: Any):
        memory, size, count = self.local(case), case["size"], case["iovs"]
        adverts = [base64.b64decode(advert) for advert in offer]
        region = self.regions[memory.kind]
        call: Callable[..., bool]
        arguments: tuple[Any, ...]
        if case["op"] == "send":
            call, arguments = self.endpoint.send, (self.conn, region, memory.address, size)
        elif count == 1:
            call = self.endpoint.write if case["op"] == "write" else self.endpoint.read
            arguments = (self.conn, region, memory.address, size, adverts[0])
        else:
            call = self.endpoint.writev if case["op"] == "write" else self.endpoint.readv
            places = gpu_pair.addresses(memory.address, case)
            arguments = (self.conn, [region] * count, places, [size] * count, adverts, count)

        def transfer() -> None:
            if not call(*arguments):
                raise RuntimeError(p2p.last_error())

        return transfer


gpu_pair.main(Initiator, Target)
