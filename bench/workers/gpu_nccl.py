"""Two ranks of torch.distributed with NCCL: sends on one GPU that receives on the other meet."""

import os
import time
from typing import Any

import gpu_pair
import torch
import torch.distributed as dist
from pair import measure

#: How many receives are enqueued at once.
AHEAD = 64


def join(gpu: int, rank: int, port: int) -> None:
    torch.cuda.set_device(gpu)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", gpu)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, device_id=device
    )


def pieces(memory: gpu_pair.Memory, case: dict) -> list[torch.Tensor]:
    starts = gpu_pair.addresses(0, case)
    return [memory.array[start : start + case["size"]] for start in starts]


def post(act, other: int, parts: list[torch.Tensor]) -> None:
    """Enqueues all pieces to or from the other rank as one group."""
    if len(parts) == 1:
        {dist.isend: dist.send, dist.irecv: dist.recv}[act](parts[0], other)
    else:
        for work in dist.batch_isend_irecv([dist.P2POp(act, part, other) for part in parts]):
            work.wait()


def wait() -> None:
    torch.cuda.current_stream().synchronize()


class Target(gpu_pair.Target):
    def do_join(self, told: dict) -> None:
        join(self.gpu, 1, told["port"])

    def do_receive(self, told: dict) -> None:
        parts = pieces(self.memory("gpu"), told["case"])
        # Receives are there before the sends: the sender never waits for this process's calls.
        for number in range(told["count"]):
            post(dist.irecv, 0, parts)
            if number % AHEAD == AHEAD - 1:
                wait()
        wait()


class Initiator(gpu_pair.Initiator):
    def connect(self, introduction: Any) -> None:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.other.say({"do": "join", "port": port})
        join(self.gpu, 0, port)
        self.heard()

    def prepare(self, case: dict, offer: Any):
        self.parts = pieces(self.local(case), case)

        def transfer() -> None:
            self.run(case, 1)

        return transfer

    def timed(self, transfer, case: dict) -> dict:
        # The other rank must know beforehand how many will come.
        self.run(case, 5)
        start = time.perf_counter()
        self.run(case, 5)
        count = max(5, int(5 * case["seconds"] / (time.perf_counter() - start)))
        self.other.say({"do": "receive", "case": case, "count": count})
        took = measure(self.send, case, case["seconds"], exactly=count - 1)
        self.heard()
        return took

    def run(self, case: dict, count: int) -> None:
        self.other.say({"do": "receive", "case": case, "count": count})
        for _ in range(count):
            self.send()
        self.heard()

    def send(self) -> None:
        post(dist.isend, 1, self.parts)
        wait()


gpu_pair.main(Initiator, Target)
