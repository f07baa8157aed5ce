"""Two Mooncake transfer engines over TCP, synchronous calls, no metadata server (P2PHANDSHAKE)."""

import sys

import numpy
from mooncake.engine import TransferEngine
from pair import Target, answer, measure, orders, until_told_to_end

HOST = "127.0.0.1"


def engine(memory: numpy.ndarray) -> TransferEngine:
    made = TransferEngine()
    if made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("initialize failed")
    if made.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise SystemExit("register_memory failed")
    return made


def buffer(cases: list[dict]) -> numpy.ndarray:
    return numpy.ones(max(case["size"] * case["iovs"] for case in cases), dtype=numpy.uint8)


def target() -> None:
    memory = buffer(orders()["cases"])
    me = engine(memory)
    answer({"name": f"{HOST}:{me.get_rpc_port()}", "address": memory.ctypes.data})
    until_told_to_end().wait()


def initiator() -> None:
    told = orders()
    other = Target(told)
    memory = buffer(told["cases"])
    me = engine(memory)
    peer = other.hear()
    name, mine, theirs = peer["name"], memory.ctypes.data, peer["address"]
    results = []
    for case in told["cases"]:
        size, iovs = case["size"], case["iovs"]
        if iovs == 1:
            call = {"write": me.transfer_sync_write, "read": me.transfer_sync_read}[case["op"]]
            arguments = (name, mine, theirs, size)
        else:
            call = {"write": me.batch_transfer_sync_write, "read": me.batch_transfer_sync_read}[
                case["op"]
            ]
            steps = range(0, size * iovs, size)
            arguments = (
                name,
                [mine + at for at in steps],
                [theirs + at for at in steps],
                [size] * iovs,
            )

        def transfer(call=call, arguments=arguments) -> None:
            if call(*arguments) != 0:
                raise SystemExit("a transfer failed")

        results.append(measure(transfer, case, told["seconds"]))
    answer(results)
    other.end()


target() if sys.argv[1:] == ["target"] else initiator()
