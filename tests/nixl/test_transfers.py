"""Data and notifications between two agents."""

from __future__ import annotations

from typing import Callable

import pytest
from agents import Pair
from peer import pattern

SIZES = [1, 4097, 1 << 20, (64 << 20) + 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_every_byte_arrives(any_pair: Pair, op: str, size: int) -> None:
    seeds = {"seed_a": 1} if op == "WRITE" else {"seed_b": 1}
    mine, theirs = any_pair.bufs(size, **seeds)
    assert any_pair.a.transfer(op, mine, theirs) == "DONE"
    assert (theirs if op == "WRITE" else mine).get() == pattern(size, 1).tobytes()
    assert mine.guarded() and theirs.guarded()


@pytest.mark.parametrize("prepare", ["prepare", "prepare_prepped"])
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_many_pieces(any_pair: Pair, op: str, prepare: str) -> None:
    """Pieces land in their places, and no byte between them changes."""
    count, size, stride = 298, 4096, 4096 + 64
    mine, theirs = any_pair.bufs(count * stride, seed_a=1, seed_b=2)
    # One side has its pieces in reverse order.
    there = theirs.pieces(count, size)
    there.descs.reverse()
    a = any_pair.a
    key = getattr(a, prepare)(op, mine.pieces(count, size), there)
    # A transfer that has ended can be posted once more.
    assert [a.run(key), a.run(key)] == ["DONE", "DONE"]
    a.release(key)
    source, target = pattern(count * stride, 1), pattern(count * stride, 2)
    if op == "READ":
        source, target = target, source
    wanted = target.copy()
    for i in range(count):
        at, to = i * stride, (count - 1 - i) * stride
        wanted[to : to + size] = source[at : at + size]
    assert (theirs if op == "WRITE" else mine).get() == wanted.tobytes()


def test_either_side_begins(pair: Pair) -> None:
    mine, theirs = pair.bufs(1 << 16, seed_a=1)
    assert pair.b.read(theirs, mine) == "DONE"
    assert theirs.get() == pattern(1 << 16, 1).tobytes()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_notification_follows_its_data(any_pair: Pair, op: str) -> None:
    mine, theirs = any_pair.bufs(1 << 20, seed_a=1, seed_b=2)
    assert any_pair.a.transfer(op, mine, theirs, notif=b"it is \0 there") == "DONE"
    assert any_pair.b.notifs() == {"a": [b"it is \0 there"]}
    assert theirs.get() == pattern(1 << 20, 1 if op == "WRITE" else 2).tobytes()


def test_a_transfer_without_a_notification_sends_none(any_pair: Pair) -> None:
    mine, theirs = any_pair.bufs(4096, seed_a=1)
    assert any_pair.a.write(mine, theirs) == "DONE"
    any_pair.a.notify(any_pair.b, b"the only one")
    assert any_pair.b.notifs() == {"a": [b"the only one"]}


@pytest.mark.parametrize("size", [0, 1, 234, 100_000])
def test_notifications_of_any_length(any_pair: Pair, size: int) -> None:
    any_pair.bufs(64)
    messages = [bytes([i]) * size for i in range(3)]
    for message in messages:
        any_pair.a.notify(any_pair.b, message)
        any_pair.b.notify(any_pair.a, message)
    assert any_pair.b.notifs(3) == {"a": messages}
    assert any_pair.a.notifs(3) == {"b": messages}


def test_without_a_progress_thread(connect: Callable[..., Pair], link: str) -> None:
    pair = connect(link=link, progress_thread=False)
    mine, theirs = pair.bufs(1 << 20, seed_a=1)
    assert pair.a.write(mine, theirs, notif=b"done") == "DONE"
    assert pair.b.notifs() == {"a": [b"done"]}
    assert theirs.get() == pattern(1 << 20, 1).tobytes()


def test_the_backend_is_the_one_asked_for(pair: Pair) -> None:
    assert pair.a.call("backends") == [pair.a.backend]
