"""Transfers that are checked once and posted often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from uccl import p2p

PIECES, LEN, STRIDE = 300, 24, 32


class Ends:
    """Two endpoints of this process, and memory of both in pieces with gaps between them."""

    def __init__(self, a: p2p.Endpoint, b: p2p.Endpoint) -> None:
        self.a, self.b = a, b
        ok, self.conn = a.add_remote_endpoint(b.get_metadata())
        assert ok, p2p.last_error()
        self.mine, self.theirs = (np.zeros(PIECES * STRIDE, np.uint8) for _ in range(2))
        (_, self.mr), (_, self.to) = a.reg(self.mine), b.reg(self.theirs)
        self.adverts = np.zeros((PIECES, 64), np.uint8)
        assert b.advertisev(*pieces(self.to, self.theirs), out_buf_list=self.adverts), (
            p2p.last_error()
        )

    def prepare(self, op: Any) -> tuple[bool, p2p.PreparedTransfer | None]:
        return self.a.prepare(op, *pieces(self.mr, self.mine), self.adverts)

    def prepared(self, op: Any) -> p2p.PreparedTransfer:
        ok, prepared = self.prepare(op)
        assert ok and prepared is not None, p2p.last_error()
        return prepared

    def post(self, prepared: p2p.PreparedTransfer, **kwargs: Any) -> tuple[bool, bool]:
        ok, transfer = prepared.post(self.conn, **kwargs)
        assert ok, p2p.last_error()
        return self.a.wait(transfer, 30)


def pieces(mr: int, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.arange(0, PIECES * STRIDE, STRIDE, np.uint64)
    return (
        np.full(PIECES, mr, np.uint64),
        memory.ctypes.data + offsets,
        np.full(PIECES, LEN, np.uint64),
    )


@pytest.fixture(params=["local", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    settings = {"port": 0, "bind": "127.0.0.1", "transport": request.param}
    with p2p.Endpoint(**settings) as a, p2p.Endpoint(**settings) as b:
        b.start_passive_accept()
        yield Ends(a, b)


def test_each_post_moves_the_bytes_of_its_time(ends: Ends) -> None:
    write, read = ends.prepared("write"), ends.prepared("read")
    assert write.nbytes == PIECES * LEN
    for value in range(1, 5):
        ends.mine[:] = value
        notif = {"notif": bytes([value])} if value % 2 else {}
        assert ends.post(write, **notif) == (True, True)
        rows = ends.theirs.reshape(PIECES, STRIDE)
        assert (rows[:, :LEN] == value).all() and not rows[:, LEN:].any()
        ends.mine[:] = 0
        assert ends.post(read) == (True, True)
        assert (ends.mine == ends.theirs).all()
    heard = [bytes(notif[-1]) for notif in ends.b.get_notifs()]
    assert heard == [b"\x01", b"\x03"]


def test_a_region_that_has_ended_is_refused(ends: Ends) -> None:
    write = ends.prepared("write")
    assert ends.post(write) == (True, True)
    ends.b.dereg(ends.to)
    ends.mine[:] = 7
    ok, transfer = write.post(ends.conn)
    assert not ok or ends.a.wait(transfer, 30) == (False, True)
    assert not ends.theirs.any()
    assert ends.a.dereg(ends.mr), "a prepared transfer keeps no region"
    assert write.post(ends.conn) == (False, 0)
    assert "deregistered" in (p2p.last_error() or ""), p2p.last_error()


def test_mistakes_are_refused_when_it_is_prepared(ends: Ends) -> None:
    with pytest.raises(RuntimeError, match="op_name"):
        ends.prepare("send")
    mrs, ptrs, sizes = pieces(ends.mr, ends.mine)
    assert ends.a.prepare("write", mrs, ptrs, sizes + 1, ends.adverts) == (False, None)
    assert "do not fit" in (p2p.last_error() or ""), p2p.last_error()
    with pytest.raises(RuntimeError):
        ends.a.prepare("write", mrs, ptrs[1:], sizes, ends.adverts)
    assert ends.a.prepare("write", [], [], [], []) == (False, None)


def test_a_read_into_memory_of_a_read_only_object_is_refused(ends: Ends) -> None:
    _, mr = ends.a.reg(bytes(LEN))
    _, advert = ends.b.advertise(ends.to, ends.theirs[:LEN])
    assert ends.a.prepare("read", [mr], [0], [LEN], [advert]) == (False, None)
    assert "read-only" in (p2p.last_error() or "")
