"""Two NIXL agents, UCX backend, DRAM, one transfer in flight; the progress thread is off, both sides spin."""

import base64
import os
import sys

import numpy
from nixl_cu13._api import nixl_agent, nixl_agent_config
from pair import Target, answer, measure, orders, until_told_to_end


def agent(name: str) -> nixl_agent:
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def buffer(cases: list[dict]) -> numpy.ndarray:
    return numpy.ones(max(case["size"] * case["iovs"] for case in cases), dtype=numpy.uint8)


def target() -> None:
    told = orders()
    me = agent("target")
    memory = buffer(told["cases"])
    me.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    answer(
        {"agent": base64.b64encode(me.get_agent_metadata()).decode(), "address": memory.ctypes.data}
    )
    ended = until_told_to_end()
    while not ended.is_set():
        me.get_new_notifs()


def pieces(address: int, case: dict) -> list[tuple[int, int, int]]:
    return [(address + i * case["size"], case["size"], 0) for i in range(case["iovs"])]


def initiator() -> None:
    told = orders()
    other = Target(told)
    me = agent("initiator")
    memory = buffer(told["cases"])
    mine = me.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = other.hear()
    name = me.add_remote_agent(base64.b64decode(peer["agent"]))
    results = []
    for case in told["cases"]:
        handle = me.initialize_xfer(
            case["op"].upper(),
            me.get_xfer_descs(pieces(memory.ctypes.data, case), "DRAM"),
            me.get_xfer_descs(pieces(peer["address"], case), "DRAM"),
            name,
        )

        def transfer(handle=handle) -> None:
            state = me.transfer(handle)
            while state == "PROC":
                state = me.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"a transfer ended as {state}")

        results.append(measure(transfer, case, told["seconds"]))
        me.release_xfer_handle(handle)
    me.remove_remote_agent(name)
    me.deregister_memory(mine)
    answer(results)
    other.end()


target() if sys.argv[1:] == ["target"] else initiator()
# The wheel's own libnl-route crashes when it is unloaded at exit; the answer is out and the agents
# are gone.
os._exit(0)
