"""This project from Python: two endpoints, blocking calls."""

import base64

import gpu_pair
from uccl import p2p


class Target(gpu_pair.Target):
    def introduce(self) -> object:
        self.regions: dict[str, int] = {}
        self.endpoint = p2p.Endpoint(self.gpu, port=0, bind="127.0.0.1")
        return base64.b64encode(self.endpoint.get_metadata()).decode()

    def do_accept(self, told: dict) -> None:
        if not self.endpoint.accept(timeout=30)[0]:
            raise RuntimeError(p2p.last_error())

    def made(self, kind: str, memory: gpu_pair.Memory) -> None:
        self.regions[kind] = registered(self.endpoint, memory)

    def offer(self, case: dict) -> object:
        kind, count = case["memory"], case["iovs"]
        places = gpu_pair.addresses(self.memory(kind).address, case)
        ok, adverts = self.endpoint.advertisev([self.regions[kind]] * count, places, [case["size"]] * count)
        if not ok:
            raise RuntimeError(p2p.last_error())
        return [base64.b64encode(advert).decode() for advert in adverts]


def registered(endpoint: p2p.Endpoint, memory: gpu_pair.Memory) -> int:
    ok, mr = endpoint.reg(memory.address, memory.array.nbytes)
    if not ok:
        raise RuntimeError(p2p.last_error())
    return mr


class Initiator(gpu_pair.Initiator):
    def connect(self, introduction: object) -> None:
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

    def prepare(self, case: dict, offer: object):
        memory, size, count = self.local(case), case["size"], case["iovs"]
        adverts = [base64.b64decode(advert) for advert in offer]
        region = self.regions[memory.kind]
        if count == 1:
            call = {"write": self.endpoint.write, "read": self.endpoint.read}[case["op"]]
            arguments = (self.conn, region, memory.address, size, adverts[0])
        else:
            call = {"write": self.endpoint.writev, "read": self.endpoint.readv}[case["op"]]
            places = gpu_pair.addresses(memory.address, case)
            arguments = (self.conn, [region] * count, places, [size] * count, adverts, count)

        def transfer() -> None:
            if not call(*arguments):
                raise RuntimeError(p2p.last_error())

        return transfer


gpu_pair.main(Initiator, Target)
