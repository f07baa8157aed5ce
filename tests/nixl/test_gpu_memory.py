"""Agents and memory of GPUs."""

from __future__ import annotations

import time
from typing import Any, Callable

import pytest
from agents import BACKEND, Agent, Desc, Pair, gpus
from peer import pattern

pytestmark = [
    # Only one test at a time uses the GPUs.
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(gpus() == 0, reason="lacks torch and a GPU"),
    pytest.mark.skipif(BACKEND != "UCCL", reason="lacks the backend that promises this: UCCL"),
]

#: The places of memory: a GPU, or host memory of either kind.
PLACES = ["cuda:0", f"cuda:{max(gpus() - 1, 0)}", "pinned", "host"]
COUNT, SIZE = 298, 4096
STRIDE = SIZE + 64
ALL = COUNT * STRIDE


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", PLACES[:2])
def test_every_byte_arrives(
    connect: Callable[..., Pair], link: str, op: str, here: str, there: str
) -> None:
    pair = connect(link=link)
    mine, theirs = make(pair.a, "mine", [here], 1), make(pair.b, "theirs", [there], 2)
    pair.meet()
    state = run(pair.a, op, mine, theirs, pair.b, b"it is there")
    assert state == "DONE"
    assert pair.b.notifs() == {"a": [b"it is there"]}
    source, target = pattern(ALL, 1), pattern(ALL, 2)
    if op == "READ":
        source, target = target, source
    wanted = target.reshape(COUNT, STRIDE).copy()
    wanted[:, :SIZE] = source.reshape(COUNT, STRIDE)[:, :SIZE]
    reader = (pair.b, "theirs") if op == "WRITE" else (pair.a, "mine")
    assert content(*reader, 0) == wanted.tobytes()


@pytest.mark.skipif(gpus() < 2, reason="lacks a second GPU")
def test_several_kinds_in_one_list(connect: Callable[..., Pair], link: str) -> None:
    """Pieces of two GPUs, and of pinned and pageable host memory, in the caller's order."""
    pair = connect(link=link)
    vram = make(pair.a, "vram", ["cuda:0", "cuda:1"], 1)
    dram = make(pair.b, "dram", ["pinned", "host"], 2)
    pair.meet()
    assert run(pair.a, "WRITE", vram, dram, pair.b, b"") == "DONE"
    for index in range(2):
        wanted = pattern(ALL, 2 + index).reshape(COUNT, STRIDE).copy()
        wanted[:, :SIZE] = pattern(ALL, 1 + index).reshape(COUNT, STRIDE)[:, :SIZE]
        assert content(pair.b, "dram", index) == wanted.tobytes()


def test_killed_under_a_gpus_transfer(connect: Callable[..., Pair], link: str) -> None:
    pair = connect(link=link, timeout_ms="2000")
    mine, theirs = make(pair.a, "mine", ["cuda:0"], 1), make(pair.b, "theirs", ["cuda:0"], 2)
    pair.meet()
    assert run(pair.a, "WRITE", mine, theirs, pair.b, b"") == "DONE"
    pair.b.kill()
    # A GPU can write to memory that it has opened for some time after the owner's end.
    deadline = time.monotonic() + 30
    while (state := run(pair.a, "WRITE", mine, theirs, pair.b, b"")) == "DONE":
        assert time.monotonic() < deadline
    assert "RemoteDisconnect" in state


def make(agent: Agent, name: str, places: list[str], seed: int) -> tuple[str, list[Desc]]:
    """Registers memory at each place, in pieces that are not adjacent; returns its kind and its
    descriptors."""
    return agent.peer.call("run", "test_gpu_memory", "make_there", agent.name, name, places, seed)


def run(agent: Agent, op: str, mine: Any, theirs: Any, owner: Agent, notif: bytes) -> str:
    arguments = (agent.name, op, mine, theirs, owner.name, notif)
    return agent.peer.call("run", "test_gpu_memory", "run_there", *arguments)


def content(agent: Agent, name: str, index: int) -> bytes:
    return agent.peer.call("run", "test_gpu_memory", "content_there", name, index)


# Functions of the helper processes.


def make_there(
    side: Any, agent: str, name: str, places: list[str], seed: int
) -> tuple[str, list[Desc]]:
    import torch

    kind = "VRAM" if places[0].startswith("cuda") else "DRAM"
    arrays, descs = [], []
    for index, place in enumerate(places):
        array = torch.from_numpy(pattern(ALL, seed + index))
        if place == "pinned":
            array = array.pin_memory()
        elif place != "host":
            array = array.to(place)
            torch.cuda.synchronize(place)
        device = array.device.index or 0
        arrays.append(array)
        side.agents[agent].register_memory([(array.data_ptr(), ALL, device, "")], kind)
        descs += [(array.data_ptr() + i * STRIDE, SIZE, device) for i in range(COUNT)]
    side.arrays[name] = arrays
    return kind, descs


def run_there(
    side: Any, agent: str, op: str, mine: Any, theirs: Any, owner: str, notif: bytes
) -> str:
    nixl = side.agents[agent]
    try:
        lists = [nixl.get_xfer_descs(descs, kind) for kind, descs in (mine, theirs)]
        handle = nixl.initialize_xfer(op, *lists, owner, notif)
        state = nixl.transfer(handle)
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
        nixl.release_xfer_handle(handle)
        return state
    except Exception as error:
        return type(error).__name__


def content_there(side: Any, name: str, index: int) -> bytes:
    return side.arrays[name][index].cpu().numpy().tobytes()
