"""Memory that a peer publishes, named by its address alone, between two processes."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from addresses import start
from peer import Peer


@pytest.fixture
def processes() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**settings: Any) -> Peer:
        made.append(start(**settings))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


class Ends:
    """A process that asks, and one that publishes."""

    def __init__(self, processes: Callable[..., Peer], port: int = 0, **kwargs: Any) -> None:
        """``port`` is that of the publisher."""
        self.a, self.b = processes(), processes()
        for end, at in ((self.a, 0), (self.b, port)):
            meta = end.call("open", port=at, bind="127.0.0.1", publish=True, **kwargs)
        from uccl import p2p

        self.address = "{}:{}".format(*p2p.Endpoint.parse_metadata(meta)[:2])
        self.b.call("ask", "start_passive_accept")
        (ok, self.conn), why = self.a.call("ask", "reach", self.address)
        assert ok, why

    def write(self, *args: Any, **kwargs: Any) -> Any:
        return self.a.call("ask", "write_by_address", self.conn, *args, **kwargs)


@pytest.fixture
def ends(processes: Callable[..., Peer], transport: str) -> Ends:
    return Ends(processes, transport=transport)


@pytest.mark.rails
def test_published_memory_is_written_and_read(ends: Ends) -> None:
    size = 1 << 20
    local, remote = ends.a.call("memory", "m", size, 7), ends.b.call("memory", "m", size)
    ends.a.call("reg_at", local, size)
    ends.b.call("reg_at", remote, size, publish=True)
    assert ends.write([local], [remote], [size]) == (True, None)
    assert ends.b.call("bytes_of", "m") == b"\x07" * size
    halves = array.array("Q", [size // 2] * 2)
    ends.b.call("fill", "m", 9)
    locals_ = array.array("Q", [local, local + size // 2])
    remotes = array.array("Q", [remote, remote + size // 2])
    assert ends.a.call("ask", "read_by_address", ends.conn, locals_, remotes, halves) == (
        True,
        None,
    )
    assert ends.a.call("bytes_of", "m") == b"\x09" * size
    ends.a.call("fill", "m", 3)
    states = ends.a.call("finish", "write_by_address_async", ends.conn, [local], [remote], [size])
    assert states == (True, True)
    assert ends.b.call("bytes_of", "m") == b"\x03" * size
    (ok, adverts), _ = ends.a.call("ask", "look_up", ends.conn, remote + 8, 16)
    assert ok and [len(advert) for advert in adverts] == [64]


@pytest.mark.rails
def test_memory_that_is_not_published_is_refused(ends: Ends) -> None:
    local, remote = ends.a.call("memory", "m", 64, 7), ends.b.call("memory", "m", 64)
    ends.a.call("reg_at", local, 64)
    mr = ends.b.call("reg_at", remote, 64)
    ok, why = ends.write([local], [remote], [64])
    assert not ok and "not published" in why
    (ok, found), why = ends.a.call("ask", "look_up", ends.conn, remote, 64)
    assert (ok, found) == (False, []) and "not published" in why
    assert ends.b.call("ask", "publish", mr) == (True, None)
    assert ends.write([local], [remote], [64]) == (True, None)
    # It ends, and another region without a name takes its place.
    ends.b.call("ask", "dereg", mr)
    ends.b.call("fill", "m", 1)
    ends.b.call("reg_at", remote, 64)
    ok, why = ends.write([local], [remote], [64])
    assert not ok and "not published" in why
    failed = ends.a.call("finish", "write_by_address_async", ends.conn, [local], [remote], [64])
    assert failed == (False, True)
    assert ends.b.call("bytes_of", "m") == b"\x01" * 64


def test_bad_arguments_are_told(ends: Ends) -> None:
    local = ends.a.call("memory", "m", 64, 7)
    ends.a.call("reg_at", local, 64)
    with pytest.raises(AssertionError, match="num_iovs"):
        ends.write([local], [], [64])
    with pytest.raises(AssertionError, match="negative"):
        ends.write([local], [-1], [64])
    with pytest.raises(AssertionError, match="unexpected keyword"):
        ends.write([local], [0], [64], notif=b"")
    ok, why = ends.write([0x1000], [0x1000], [64])
    assert not ok and "not in memory that is registered here" in why
    (ok, _), why = ends.a.call("ask", "reach", "nowhere")
    assert not ok and "not an endpoint's address" in why
    assert ends.write([], [], []) == (True, None)


def test_a_peer_that_died_is_reached_anew(processes: Callable[..., Peer], base_port: int) -> None:
    ends = Ends(processes, base_port, transport="tcp")
    ends.b.kill()
    ends.b.process.wait()
    (ok, _), why = ends.a.call("ask", "reach", ends.address)
    assert not ok and "cannot connect" in why
    again = processes()
    again.call("open", port=base_port, bind="127.0.0.1", publish=True, transport="tcp")
    again.call("ask", "start_passive_accept")
    (ok, conn), why = ends.a.call("ask", "reach", ends.address)
    assert ok and conn != ends.conn, why
    local, remote = ends.a.call("memory", "m", 64, 7), again.call("memory", "m", 64)
    ends.a.call("reg_at", local, 64)
    again.call("reg_at", remote, 64, publish=True)
    assert ends.a.call("ask", "write_by_address", conn, [local], [remote], [64]) == (True, None)
    assert again.call("bytes_of", "m") == b"\x07" * 64


def test_a_read_only_buffer_is_not_published() -> None:
    from uccl import p2p

    with p2p.Endpoint(port=0, bind="127.0.0.1", publish=True) as ep:
        ok, mr = ep.reg(b"0123456789abcdef")
        assert ok
        assert not ep.publish(mr)
        assert "read-only" in ep.last_error()
    with p2p.Endpoint(port=0, bind="127.0.0.1") as ep:
        ok, mr = ep.reg(bytearray(16))
        assert ok and not ep.publish(mr)
        assert "UCCL_P2P_PUBLISH" in ep.last_error()
