"""Two ranks of torch.distributed with gloo over loopback: a send that the receiver acknowledges with one byte."""

import os
import sys

import torch
import torch.distributed as dist
from pair import Target, answer, measure, orders


def join(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def target() -> None:
    told = orders()
    join(1, told["port"])
    receipt, go_on = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for case in told["cases"]:
        data = torch.empty(case["size"], dtype=torch.uint8)
        while True:
            dist.recv(go_on, 0)
            if go_on.item() == 0:
                break
            dist.recv(data, 0)
            dist.send(receipt, 0)


def initiator() -> None:
    told = orders()
    other = Target(told)
    join(0, told["port"])
    receipt = torch.zeros(1, dtype=torch.uint8)
    more, stop = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    results = []
    for case in told["cases"]:
        data = torch.ones(case["size"], dtype=torch.uint8)

        def transfer(data: torch.Tensor = data) -> None:
            dist.send(more, 1)
            dist.send(data, 1)
            dist.recv(receipt, 1)

        results.append(measure(transfer, case, told["seconds"]))
        dist.send(stop, 1)
    answer(results)
    other.end()


target() if sys.argv[1:] == ["target"] else initiator()
