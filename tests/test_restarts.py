"""Peers that die and come back at the same address: no state that a process keeps of a peer may
outlive it.

``UCCL_TEST_ROUNDS`` is the number of restarts of each peer (200 takes minutes a test), and
``UCCL_TEST_PAUSES`` lists the seconds between its end and its restart, separated by commas.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from multiprocessing import Pipe
from typing import Any, Callable

import pytest
from conftest import Pair
from peer import Peer, Side, pattern, pattern_crc

Connect = Callable[..., Pair]
Spawn = Callable[..., Peer]

ROUNDS = int(os.environ.get("UCCL_TEST_ROUNDS", "3"))
PAUSES = [float(pause) for pause in os.environ.get("UCCL_TEST_PAUSES", "0").split(",")]
#: The number of rounds after which all resources have reached their size.
FIRST = 3
SIZE = 100_000
PR_SET_PDEATHSIG = 1
BOUND = 120 + ROUNDS * (3 + int(sum(PAUSES)))

RAILS = pytest.mark.rails(
    but_not={
        "libfabric:shm": "libfabric's shm: a process may die holding a lock in another's memory"
    }
)


@RAILS
@pytest.mark.timeout(BOUND)
@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize(
    "way", ["connect", "connect_by_gpu", "connect_local", "add_remote_endpoint"]
)
def test_a_peer_that_restarts(
    spawn: Spawn, transport: str, base_port: int, way: str, pause: float
) -> None:
    """A call reaches the peer that has come back, fails while there is none, and a lost connection
    has a reason."""
    here, there = spawn(), spawn()
    here.call(
        "open", transport=transport, port=0, bind="127.0.0.1", base_port=base_port, timeout=20
    )
    here.call("buf", "m", SIZE)
    before: dict[str, int] = {}
    conn = None
    for round in range(1, ROUNDS + 1):
        meta, advert = there.call("run", "test_restarts", "start", transport, base_port, within=30)
        (ok, conn), why = here.call("run", "test_restarts", "meet", way, meta)
        assert ok, (round, why)
        # A second call returns the remembered connection, which works.
        if way == "add_remote_endpoint":
            assert here.call("run", "test_restarts", "meet", way, meta) == ((True, conn), None)
        here.call("run", "test_restarts", "fill", "m", round)
        assert here.call("op", "write", conn, "m", advert=advert) == (True, None), round
        assert there.call("run", "test_restarts", "ask", "crc") == pattern_crc(SIZE, round)
        assert here.call("run", "test_restarts", "advertise", conn, SIZE)
        there.call("run", "test_restarts", "stop", "close" if round % 2 == 0 else "kill")
        if round % 3:
            (ok, nobody), why = here.call("run", "test_restarts", "meet", way, meta, 0.2)
            assert (ok, nobody) == (False, 0) and why, (round, why)
        if round % 4:
            answer, why = here.call("op", "write", conn, "m", advert=advert)
            assert answer is False and why, round
        time.sleep(pause)
        if round == FIRST:
            before = here.call("run", "test_restarts", "kept")
        if round > FIRST and round % 10 == 0:
            # The resources of a peer are freed when its end has been noticed.
            end = time.monotonic() + 30
            while grown := growth(before, now := here.call("run", "test_restarts", "kept")):
                assert time.monotonic() < end, (round, grown, before, now)
                time.sleep(0.05)


@pytest.mark.parametrize("end", ["theirs", "ours"])
def test_a_connection_that_was_lost_while_both_live(
    connect: Connect, transport: str, end: str
) -> None:
    pair = connect(transport=transport)
    for peer, seed in ((pair.a, 1), (pair.b, None)):
        peer.call("buf", "m", SIZE, seed=seed)
    advert = pair.b.call("advert", "m")
    before = 0
    for _ in range(5):
        pair.b.begin("accept", timeout=20)
        (ok, conn), why = pair.a.call("method", "add_remote_endpoint", pair.meta_b)
        assert ok and conn != before, why
        theirs, before = pair.b.result(), conn
        assert pair.a.call("op", "write", conn, "m", advert=advert) == (True, None)
        ender, ended = (pair.b, theirs) if end == "theirs" else (pair.a, conn)
        assert ender.call("method", "remove_remote_endpoint", ended)[0] is True
    assert pair.b.call("crc", "m") == pattern_crc(SIZE, 1)


def test_adding_an_absent_peer_keeps_nobody_waiting(connect: Connect, spawn: Spawn) -> None:
    """While one thread waits for a peer that does not answer, another connects to one that does."""
    import socket
    import struct

    pair = connect(transport="tcp", timeout=20)
    pair.b.call("method", "start_passive_accept")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        absent = bytes([127, 0, 0, 1]) + struct.pack("!H", port) + struct.pack("i", 0)
        pair.a.call("begin_thread", "absent", "method", "add_remote_endpoint", absent)
        # The call is under way once the peer has a connection to accept.
        stranger, _ = silent.accept()
        (ok, _conn), why = pair.a.call("method", "add_remote_endpoint", pair.meta_b, within=18)
        assert ok, why
        stranger.close()
    (ok, _), why = pair.a.call("join", "absent")
    assert not ok


@pytest.mark.timeout(BOUND)
def test_objects_of_an_actor_that_restarts(spawn: Spawn, transport: str, base_port: int) -> None:
    """The successor of an actor that died refuses the old descriptors and accepts its own."""
    here, there = spawn(), spawn()
    here.call("open", transport=transport, port=0, bind="127.0.0.1", timeout=5)
    old = None
    for round in range(1, min(ROUNDS, 20) + 1):
        meta, _ = there.call("run", "test_restarts", "start", transport, base_port, within=30)
        descs = there.call("run", "test_restarts", "ask", "descs")
        if old is not None:
            assert here.call("run", "test_restarts", "read_object", meta, old)
        assert here.call("run", "test_restarts", "read_object", meta, descs) is None
        there.call("run", "test_restarts", "stop", "kill")
        old = descs


@pytest.mark.timeout(BOUND)
def test_advertised_memory_goes_with_a_lost_connection(spawn: Spawn, base_port: int) -> None:
    """Memory that was advertised over a lost connection is freed."""
    here, there = spawn(), spawn()
    here.call("open", port=0, bind="127.0.0.1", timeout=5)
    for _ in range(3):
        meta, _ = there.call("run", "test_restarts", "start", "local", base_port, within=30)
        (ok, conn), why = here.call("run", "test_restarts", "meet", "add_remote_endpoint", meta)
        assert ok, why
        assert here.call("run", "test_restarts", "advertise", conn, SIZE)
        assert here.call("method", "stats")[0]["regions"] == 1
        there.call("run", "test_restarts", "stop", "kill")


def growth(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """The resources that have grown by more than one peer needs."""
    room = {"fds": 4, "connections": 1}
    return [what for what in before if now[what] > before[what] + room.get(what, 0)]


# Functions of the process that survives.


def meet(
    side: Side, way: str, meta: bytes, timeout: float | None = None
) -> tuple[tuple[bool, int], str | None]:
    ep = side.ep
    ip, port, gpu = ep.parse_metadata(meta)
    if way == "connect":
        answer = ep.connect(ip, gpu, port, timeout=timeout)
    elif way == "connect_by_gpu":
        answer = ep.connect(ip, gpu, timeout=timeout)
    elif way == "connect_local":
        answer = ep.connect_local(gpu, timeout=timeout)
    else:
        answer = ep.add_remote_endpoint(meta)
    return answer, None if answer[0] else ep.last_error()


def fill(side: Side, name: str, seed: int) -> None:
    data = side.data(name)
    data[:] = pattern(len(data), seed)


def advertise(side: Side, conn: int, size: int) -> bool:
    """Advertises an object of a type without weak references."""
    ok, _ = side.ep.advertise_ipc(conn, bytearray(size))
    return ok or "host" in (side.ep.last_error() or "")


def kept(side: Side) -> dict[str, int]:
    """Resources that must not grow from restart to restart."""
    stats, usage = side.ep.stats(), side.usage()
    return {name: stats[name] for name in ("regions", "connections")} | {
        name: usage[name] for name in ("fds", "threads")
    }


def read_object(side: Side, meta: bytes, descs: bytes) -> str | None:
    """Reads an object; returns the reason of a failure, or None."""
    import numpy as np

    ep = side.ep
    into = np.zeros(SIZE, np.uint8)
    mine = ep.register_memory([into])
    try:
        ok, conn = ep.add_remote_endpoint(meta)
        assert ok, ep.last_error()
        ok, transfer = ep.transfer(conn, "read", mine, ep.deserialize_descs(descs))
        if not ok:
            return ep.last_error() or "no reason"
        ok, done = ep.wait(transfer, 30)
        assert done
        if not ok:
            return ep.transfer_error(transfer) or "no reason"
        assert (into == 7).all()
        return None
    finally:
        ep.deregister_memory(mine)


# Functions of the side that restarts: a forked child of a process with all modules loaded, with an
# endpoint of its own.


def start(side: Side, transport: str, port: int) -> tuple[bytes, bytes]:
    """Starts a peer at the port; returns its metadata and the advert of its memory."""
    import uccl.p2p  # noqa: F401

    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            ours.close()
            live(theirs, transport, port)
        finally:
            os._exit(0)
    theirs.close()
    side.names.update(child=pid, pipe=ours)
    return ours.recv()


def live(pipe: Any, transport: str, port: int) -> None:
    import numpy as np

    me = Side()
    meta = me.open(transport, port=port, bind="127.0.0.1", base_port=port, timeout=20)
    me.ep.start_passive_accept()
    me.buf("m", SIZE)
    pipe.send((meta, me.advert("m")))
    kept = []
    while (what := pipe.recv()) != "close":
        if what == "crc":
            pipe.send(me.crc("m"))
        else:
            kept.append(np.full(SIZE, 7, np.uint8))
            pipe.send(me.ep.get_serialized_descs(me.ep.register_memory(kept[-1:])))
    me.close()


def ask(side: Side, what: str) -> Any:
    side.names["pipe"].send(what)
    return side.names["pipe"].recv()


def stop(side: Side, how: str) -> None:
    """Ends the peer and waits for its end."""
    if how == "kill":
        os.kill(side.names["child"], signal.SIGKILL)
    else:
        side.names["pipe"].send("close")
    os.waitpid(side.names["child"], 0)
    side.names.pop("pipe").close()
