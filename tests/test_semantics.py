"""Semantics of transfers over each transport: lengths, order, edges, notifications."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Pair
from peer import pattern_crc

KIB = 1 << 10
MIB = 1 << 20

# Sizes around every limit that an implementation could have: packets, pages, frames, chunks. Rails
# run only a few.
SIZES: list[Any] = [1, 64, 4095, 4096, 65_536, 65_537, MIB - 1, MIB + 1]
SIZES += [pytest.param(size, marks=pytest.mark.rails) for size in (7, 4097, 8 * MIB + 3)]


def ok(answer: tuple[Any, str | None]) -> Any:
    value, why = answer
    assert why is None, why
    return value


class TestSendRecv:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("first", ["send", "recv"])
    def test_whole(self, pair: Pair, size: int, first: str) -> None:
        """The message is the same whether the send or the receive comes first."""
        pair.a.call("buf", "src", size, seed=size)
        pair.b.call("buf", "dst", size)
        if first == "recv":
            _, recv = ok(pair.b.call("op", "recv_async", pair.conn_b, "dst"))
            _, send = ok(pair.a.call("op", "send_async", pair.conn_a, "src"))
        else:
            _, send = ok(pair.a.call("op", "send_async", pair.conn_a, "src"))
            _, recv = ok(pair.b.call("op", "recv_async", pair.conn_b, "dst"))
        assert pair.b.call("wait", recv, 30) == ((True, True), None)
        assert pair.a.call("wait", send, 30) == ((True, True), None)
        assert pair.b.call("crc", "dst") == pattern_crc(size, size)
        assert pair.b.call("method", "transfer_bytes", recv)[0] == size
        assert pair.b.call("guards", "dst")

    @pytest.mark.rails
    @pytest.mark.parametrize("size", [1, 4096, MIB + 1])
    def test_shorter_than_the_receive(self, pair: Pair, size: int) -> None:
        """A short message completes the receive, and nothing is written behind it."""
        pair.a.call("buf", "src", size, seed=1)
        pair.b.call("buf", "dst", 2 * size, fill=0x5C)
        pair.b.begin("op", "recv", pair.conn_b, "dst")
        assert ok(pair.a.call("op", "send", pair.conn_a, "src")) is True
        assert ok(pair.b.result()) is True
        assert pair.b.call("crc", "dst", 0, size) == pattern_crc(size, 1)
        assert set(pair.b.call("get", "dst", size)) == {0x5C}
        assert pair.b.call("guards", "dst")

    @pytest.mark.rails
    @pytest.mark.parametrize("size", [1, 4096, MIB + 1])
    def test_longer_than_the_receive(self, pair: Pair, size: int) -> None:
        """Both sides fail, no byte is written past the end, and the connection stays usable."""
        pair.a.call("buf", "src", size + 1, seed=1)
        pair.b.call("buf", "dst", size + 4096, fill=0x5C)
        pair.b.begin("op", "recv", pair.conn_b, "dst", 0, size)
        sent, why_sent = pair.a.call("op", "send", pair.conn_a, "src")
        received, why_received = pair.b.result()
        assert sent is False and received is False
        for why in (why_sent, why_received):
            assert str(size + 1) in why and str(size) in why
        assert set(pair.b.call("get", "dst", size)) == {0x5C}
        assert pair.b.call("guards", "dst")
        pair.b.begin("op", "recv", pair.conn_b, "dst")
        assert ok(pair.a.call("op", "send", pair.conn_a, "src")) is True
        assert ok(pair.b.result()) is True

    @pytest.mark.rails
    def test_zero_bytes(self, pair: Pair) -> None:
        """An empty message is a message: it completes a receive and writes nothing."""
        pair.a.call("buf", "src", 64, seed=1)
        pair.b.call("buf", "dst", 64, fill=0x5C)
        pair.b.begin("op", "recv", pair.conn_b, "dst")
        assert ok(pair.a.call("op", "send", pair.conn_a, "src", 0, 0)) is True
        assert ok(pair.b.result()) is True
        assert set(pair.b.call("get", "dst")) == {0x5C}
        # A receive of 0 bytes takes an empty message alone.
        pair.b.begin("op", "recv", pair.conn_b, "dst", 0, 0)
        assert ok(pair.a.call("op", "send", pair.conn_a, "src", 0, 0)) is True
        assert ok(pair.b.result()) is True
        pair.b.begin("op", "recv", pair.conn_b, "dst", 0, 0)
        assert pair.a.call("op", "send", pair.conn_a, "src", 0, 1)[0] is False
        assert pair.b.result()[0] is False
        assert set(pair.b.call("get", "dst")) == {0x5C}

    @pytest.mark.rails
    def test_a_size_past_the_region_is_cut_to_the_region(self, pair: Pair) -> None:
        """Programs of the first release receive with twice the length they registered."""
        pair.a.call("buf", "src", 4096, seed=1)
        pair.a.call("buf", "long", 4097, seed=2)
        pair.b.call("buf", "dst", 4096)
        pair.b.begin("op", "recv", pair.conn_b, "dst", 0, 8192)
        assert ok(pair.a.call("op", "send", pair.conn_a, "src")) is True
        assert ok(pair.b.result()) is True
        assert pair.b.call("crc", "dst") == pattern_crc(4096, 1)
        # A receive from the region's middle has half of its length.
        pair.b.begin("op", "recv", pair.conn_b, "dst", 2048, 8192)
        assert ok(pair.a.call("op", "send", pair.conn_a, "src", 0, 2048)) is True
        assert ok(pair.b.result()) is True
        pair.b.begin("op", "recv", pair.conn_b, "dst", 0, 8192)
        assert pair.a.call("op", "send", pair.conn_a, "long")[0] is False
        assert pair.b.result()[0] is False
        assert pair.b.call("guards", "dst")

    @pytest.mark.rails
    def test_messages_stay_in_order(self, pair: Pair) -> None:
        """The n-th receive gets the n-th send, small among large, in both directions at once."""
        sizes = [3, 3 * MIB, 1, 100 * KIB, 5, 64 * KIB + 1, 2, MIB] * 3
        for peer in (pair.a, pair.b):
            for i, size in enumerate(sizes):
                peer.call("buf", f"src{i}", size, seed=i)
                peer.call("buf", f"dst{i}", size)
        ends: dict[str, list[int]] = {"a": [], "b": []}
        for i in range(len(sizes)):
            for side, peer, conn in (("a", pair.a, pair.conn_a), ("b", pair.b, pair.conn_b)):
                ends[side].append(ok(peer.call("op", "send_async", conn, f"src{i}"))[1])
                ends[side].append(ok(peer.call("op", "recv_async", conn, f"dst{i}"))[1])
        for side, peer in (("a", pair.a), ("b", pair.b)):
            for transfer in ends[side]:
                assert peer.call("wait", transfer, 30) == ((True, True), None)
            for i, size in enumerate(sizes):
                assert peer.call("crc", f"dst{i}") == pattern_crc(size, i)
                assert peer.call("guards", f"dst{i}")

    @pytest.mark.rails
    def test_vectors(self, pair: Pair) -> None:
        """Each piece of a vector is written to the receive's piece of the same number, and may be
        shorter."""
        sent, held = [1, 5000, 0, 64, 70_000], [7, 5000, 3, 100, 80_000]
        pair.a.call("buf", "src", sum(sent), seed=3)
        pair.b.call("buf", "dst", sum(held), fill=0x5C)
        expected = b""
        pieces = pair.a.call("get", "src")
        for size, space in zip(sent, held):
            expected += pieces[:size] + b"\x5c" * (space - size)
            pieces = pieces[size:]
        pair.b.begin("run", "test_semantics", "vector", "recvv", pair.conn_b, "dst", held)
        done = pair.a.call("run", "test_semantics", "vector", "sendv", pair.conn_a, "src", sent)
        assert done == (True, None)
        assert pair.b.result() == (True, None)
        assert pair.b.call("get", "dst") == expected
        assert pair.b.call("guards", "dst")

    @pytest.mark.rails
    @pytest.mark.parametrize("held", [[100, 99], [100], [100, 100, 100]])
    def test_vectors_that_do_not_fit(self, pair: Pair, held: list[int]) -> None:
        """A piece that is too long, too few or too many pieces: both sides fail, and later messages
        match."""
        pair.a.call("buf", "src", 200, seed=3)
        pair.b.call("buf", "dst", 300, fill=0x5C)
        pair.b.begin("run", "test_semantics", "vector", "recvv", pair.conn_b, "dst", held)
        done, why = pair.a.call(
            "run", "test_semantics", "vector", "sendv", pair.conn_a, "src", [100, 100]
        )
        if held == [100, 100, 100]:
            # With fewer pieces than the receive has, the message is shorter or an error; both sides
            # agree.
            assert pair.b.result()[0] is done
        else:
            assert done is False and why
            done, why = pair.b.result()
            assert done is False and why
            assert set(pair.b.call("get", "dst")) == {0x5C}
        pair.b.begin("op", "recv", pair.conn_b, "dst")
        assert ok(pair.a.call("op", "send", pair.conn_a, "src")) is True
        assert ok(pair.b.result()) is True
        assert pair.b.call("guards", "dst")


class TestReadWrite:
    @pytest.mark.parametrize("kind", ["write", "read"])
    @pytest.mark.parametrize("size", SIZES)
    def test_whole(self, pair: Pair, kind: str, size: int) -> None:
        mine, theirs = ("src", "dst") if kind == "write" else ("dst", "src")
        pair.a.call("buf", mine, size, seed=size if mine == "src" else None)
        pair.b.call("buf", theirs, size, seed=size if theirs == "src" else None)
        advert = pair.b.call("advert", theirs)
        assert len(advert) == 64
        assert ok(pair.a.call("op", kind, pair.conn_a, mine, advert=advert)) is True
        end = pair.b if kind == "write" else pair.a
        assert end.call("crc", "dst") == pattern_crc(size, size)
        assert end.call("guards", "dst")

    @pytest.mark.rails
    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_both_ends_may_start(self, pair: Pair, kind: str) -> None:
        """A connection is bidirectional: the side that accepted it reads and writes too."""
        pair.a.call("buf", "m", 100_000, seed=1)
        pair.b.call("buf", "m", 100_000, seed=2)
        advert = pair.a.call("advert", "m")
        assert ok(pair.b.call("op", kind, pair.conn_b, "m", advert=advert)) is True
        written, seed = (pair.a, 2) if kind == "write" else (pair.b, 1)
        assert written.call("crc", "m") == pattern_crc(100_000, seed)

    @pytest.mark.rails
    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_a_part(self, pair: Pair, kind: str) -> None:
        """An advert of a part of a region reaches that part, from any part of the local one."""
        pair.a.call("buf", "m", 10_000, fill=1)
        pair.b.call("buf", "m", 10_000, fill=2)
        advert = pair.b.call("advert", "m", 1000, 500)
        assert ok(pair.a.call("op", kind, pair.conn_a, "m", 7, 500, advert)) is True
        changed, start, value = (pair.b, 1000, 1) if kind == "write" else (pair.a, 7, 2)
        data = changed.call("get", "m")
        assert set(data[start : start + 500]) == {value}
        assert set(data[:start] + data[start + 500 :]) == {3 - value}

    @pytest.mark.rails
    def test_shorter_than_the_advert(self, pair: Pair) -> None:
        pair.a.call("buf", "m", 100, fill=1)
        pair.b.call("buf", "m", 1000, fill=2)
        advert = pair.b.call("advert", "m")
        assert ok(pair.a.call("op", "write", pair.conn_a, "m", advert=advert)) is True
        assert pair.b.call("get", "m") == b"\1" * 100 + b"\2" * 900

    @pytest.mark.rails
    @pytest.mark.parametrize("kind", ["write", "read"])
    @pytest.mark.parametrize("pieces", [1, 2, 17, 1000])
    def test_vectors(self, pair: Pair, kind: str, pieces: int) -> None:
        """Each piece is written to its own advert, in any order."""
        for peer, seed in ((pair.a, 1), (pair.b, 2)):
            peer.call("buf", "m", pieces * 300, seed=seed)
        adverts = pair.b.call("run", "test_semantics", "adverts_backwards", "m", pieces)
        done = pair.a.call(
            "run", "test_semantics", "one_sided_v", kind + "v", pair.conn_a, "m", adverts
        )
        assert done is True
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        sent, got = source.call("get", "m"), target.call("get", "m")
        backwards = b"".join(sent[i * 300 : (i + 1) * 300] for i in reversed(range(pieces)))
        assert got == backwards
        assert target.call("guards", "m")

    @pytest.mark.rails
    def test_async_and_repeated_polls(self, pair: Pair) -> None:
        """Later polls of a finished transfer return the same answer."""
        pair.a.call("buf", "m", 5 * MIB, seed=1)
        pair.b.call("buf", "m", 5 * MIB)
        advert = pair.b.call("advert", "m")
        _, transfer = ok(pair.a.call("op", "write_async", pair.conn_a, "m", advert=advert))
        assert pair.a.call("poll_to_end", transfer) == ((True, True), None)
        for _ in range(3):
            assert pair.a.call("method", "poll_async", transfer)[0] == (True, True)
        assert pair.a.call("method", "transfer_bytes", transfer)[0] == 5 * MIB
        assert pair.b.call("crc", "m") == pattern_crc(5 * MIB, 1)

    @pytest.mark.rails
    def test_many_at_once(self, pair: Pair) -> None:
        """Hundreds of transfers in flight end, each with its own data."""
        count, size = 300, 10_000
        pair.a.call("buf", "m", count * size, seed=1)
        pair.b.call("buf", "m", count * size)
        adverts = pair.b.call("run", "test_semantics", "adverts", "m", count)
        assert pair.a.call("run", "test_semantics", "write_all", pair.conn_a, "m", adverts) == []
        assert pair.b.call("crc", "m") == pattern_crc(count * size, 1)

    @pytest.mark.rails
    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_shared_memory(self, pair: Pair, kind: str) -> None:
        """Memory from alloc, on one side or both."""
        for name, mine, theirs in (
            ("x", "shared", "buf"),
            ("y", "buf", "shared"),
            ("z", "shared", "shared"),
        ):
            pair.a.call(mine, name, 300_000, seed=1)
            pair.b.call(theirs, name, 300_000, seed=2)
            advert = pair.b.call("advert", name)
            assert ok(pair.a.call("op", kind, pair.conn_a, name, advert=advert)) is True
            end, seed = (pair.b, 1) if kind == "write" else (pair.a, 2)
            assert end.call("crc", name) == pattern_crc(300_000, seed)
            assert end.call("guards", name)


@pytest.mark.rails
class TestNotifications:
    @pytest.mark.timeout(120)
    def test_any_length_in_order(self, pair: Pair) -> None:
        """Notifications of 0 bytes to 64 MiB arrive whole and in order, in both directions."""
        lengths = [0, 1, 255, 256, 257, 4096, 65_536, MIB + 1, 3, 64 * MIB, 0, 5]
        for sender, conn, receiver, at in (
            (pair.a, pair.conn_a, pair.b, pair.conn_b),
            (pair.b, pair.conn_b, pair.a, pair.conn_a),
        ):
            receiver.begin("run", "test_semantics", "notif_crcs", len(lengths))
            assert sender.call("run", "test_semantics", "send_notifs", conn, lengths) == []
            expected = [(at, n, pattern_crc(n, i)) for i, n in enumerate(lengths)]
            assert receiver.result() == expected

    def test_longer_than_64_mib_is_refused(self, pair: Pair) -> None:
        refused = pair.a.call("run", "test_semantics", "send_notifs", pair.conn_a, [64 * MIB + 1])
        assert len(refused) == 1 and refused[0]
        assert pair.a.call("method", "send_notif", pair.conn_a, b"next")[0] is True
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"next")]

    @pytest.mark.parametrize("size", [1, 5000, 16 * MIB])
    def test_after_the_data(self, pair: Pair, size: int) -> None:
        """A write's notification arrives after all bytes of its data."""
        pair.a.call("buf", "m", size)
        pair.b.call("buf", "m", size)
        advert = pair.b.call("advert", "m")
        for value in range(1, 9):
            pair.a.call("fill", "m", value)
            pair.b.begin("run", "test_semantics", "values_at_notif", "m")
            pair.a.call("op", "write_async", pair.conn_a, "m", advert=advert, notif=bytes([value]))
            assert pair.b.result() == ([value], bytes([value]))

    def test_with_read_and_send(self, pair: Pair) -> None:
        pair.a.call("buf", "m", 1000, seed=1)
        pair.b.call("buf", "m", 1000, seed=2)
        advert = pair.b.call("advert", "m")
        assert ok(pair.a.call("op", "read", pair.conn_a, "m", advert=advert, notif=b"read")) is True
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"read")]
        pair.b.begin("op", "recv", pair.conn_b, "m")
        assert ok(pair.a.call("op", "send", pair.conn_a, "m", notif=b"sent")) is True
        assert ok(pair.b.result()) is True
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"sent")]

    def test_none_for_a_transfer_that_failed(self, pair: Pair) -> None:
        pair.a.call("buf", "m", 1000)
        pair.b.call("buf", "m", 1000)
        advert = pair.b.call("advert", "m")
        pair.b.call("method", "dereg", pair.b.call("mr", "m"))
        assert pair.a.call("op", "write", pair.conn_a, "m", advert=advert, notif=b"no")[0] is False
        assert pair.a.call("method", "send_notif", pair.conn_a, b"yes")[0] is True
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"yes")]


@pytest.mark.rails
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_more_than_4_gib(pair: Pair, kind: str) -> None:
    """Lengths may exceed 32 bits."""
    size = (4 << 30) + 12_345
    source, target = (pair.b, pair.a) if kind == "read" else (pair.a, pair.b)
    source.call("buf", "m", size, seed=9, within=300)
    target.call("buf", "m", size, within=300)
    if kind == "send":
        pair.b.begin("op", "recv", pair.conn_b, "m")
        assert ok(pair.a.call("op", "send", pair.conn_a, "m", within=300)) is True
        assert ok(pair.b.result(300)) is True
    else:
        advert = pair.b.call("advert", "m")
        assert ok(pair.a.call("op", kind, pair.conn_a, "m", advert=advert, within=300)) is True
    crc = source.call("crc", "m", within=300)
    assert target.call("crc", "m", within=300) == crc
    assert target.call("guards", "m")


@pytest.mark.rails
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["writev", "readv"])
def test_more_than_4_gib_of_regions(pair: Pair, kind: str) -> None:
    """Transfers of more than 4 GiB in regions that devices take: soft-RoCE takes less than 1 GiB in
    one region, and streams carry larger ones."""
    source, target = (pair.b, pair.a) if kind == "readv" else (pair.a, pair.b)
    names = [f"m{i}" for i in range(9)]
    for i, name in enumerate(names):
        source.call("buf", name, (1 << 29) + 1000 * i, seed=i, within=100)
        target.call("buf", name, (1 << 29) + 1000 * i, within=100)
    blobs = [pair.b.call("advert", name) for name in names]
    args = ("test_semantics", "regions_v", kind, pair.conn_a, names, blobs)
    assert pair.a.call("run", *args, within=300) is True
    for name in names:
        assert target.call("crc", name) == source.call("crc", name)
        assert target.call("guards", name)


# Functions of the helper processes.


def vector(side: Any, kind: str, conn: int, name: str, sizes: list[int]) -> tuple[Any, str | None]:
    data, ptrs = side.data(name).ctypes.data, []
    for size in sizes:
        ptrs.append(data)
        data += size
    done = getattr(side.ep, kind)(conn, [side.mrs[name]] * len(sizes), ptrs, sizes, len(sizes))
    return done, None if done else side.ep.last_error()


def adverts(side: Any, name: str, count: int) -> list[bytes]:
    data = side.data(name)
    size, start = len(data) // count, data.ctypes.data
    ptrs = [start + i * size for i in range(count)]
    done, blobs = side.ep.advertisev([side.mrs[name]] * count, ptrs, [size] * count, count)
    assert done, side.ep.last_error()
    return blobs


def adverts_backwards(side: Any, name: str, count: int) -> list[bytes]:
    return adverts(side, name, count)[::-1]


def one_sided_v(side: Any, kind: str, conn: int, name: str, blobs: list[bytes]) -> Any:
    data, count = side.data(name), len(blobs)
    size = len(data) // count
    ptrs = [data.ctypes.data + i * size for i in range(count)]
    args = (conn, [side.mrs[name]] * count, ptrs, [size] * count, blobs, count)
    done = getattr(side.ep, kind)(*args)
    return done or side.ep.last_error()


def regions_v(side: Any, kind: str, conn: int, names: list[str], blobs: list[bytes]) -> Any:
    mrs, data = [side.mrs[name] for name in names], [side.data(name) for name in names]
    ptrs, sizes = [each.ctypes.data for each in data], [len(each) for each in data]
    done = getattr(side.ep, kind)(conn, mrs, ptrs, sizes, blobs, len(names))
    return done or side.ep.last_error()


def write_all(side: Any, conn: int, name: str, blobs: list[bytes]) -> list[str]:
    size = len(side.data(name)) // len(blobs)
    posted = []
    for i, blob in enumerate(blobs):
        (done, transfer), why = side.op("write_async", conn, name, i * size, size, blob)
        assert done, why
        posted.append(transfer)
    ends = [side.poll_to_end(transfer) for transfer in posted]
    return [str(end) for end in ends if end != ((True, True), None)]


def send_notifs(side: Any, conn: int, lengths: list[int]) -> list[str]:
    from peer import pattern

    failures = []
    for i, length in enumerate(lengths):
        if not side.ep.send_notif(conn, pattern(length, i).tobytes()):
            failures.append(side.ep.last_error())
    return failures


def notif_crcs(side: Any, count: int) -> list[tuple[int, int, int]]:
    import zlib

    return [(conn, len(body), zlib.crc32(body)) for conn, body in side.notifs(count)]


def values_at_notif(side: Any, name: str) -> tuple[list[int], bytes]:
    import numpy as np

    [(_, body)] = side.notifs(1)
    return np.unique(side.data(name)).tolist(), body
