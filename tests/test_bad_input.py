"""Invalid calls: each is refused with a reason, and writes nothing."""

from __future__ import annotations

import os
import struct
from typing import Any, Callable

import pytest
from conftest import Pair
from peer import U64

SIZE = 8192
FILL_A, FILL_B = 0x11, 0x22


@pytest.fixture
def made(pair: Pair) -> Pair:
    """A pair with a region "m" on either side."""
    pair.a.call("buf", "m", SIZE, fill=FILL_A)
    pair.b.call("buf", "m", SIZE, fill=FILL_B)
    return pair


def untouched(pair: Pair) -> None:
    """Asserts that no byte was written, and that the connection still works."""
    for peer, fill in ((pair.a, FILL_A), (pair.b, FILL_B)):
        assert set(peer.call("get", "m")) == {fill}
        assert peer.call("guards", "m")
    assert pair.a.call("method", "send_notif", pair.conn_a, b"alive")[0] is True
    assert pair.b.call("notifs", 1) == [(pair.conn_b, b"alive")]


def refused(answer: tuple[Any, str | None]) -> str:
    """Asserts that a call failed; returns the reason."""
    value, why = answer
    assert value in (False, (False, 0), (False, b""), (False, [])), value
    assert why
    return why


def fails(pair: Pair, kind: str, *args: Any, **kwargs: Any) -> str:
    """Asserts that a transfer is refused, at once or at its end; returns the reason."""
    value, why = pair.a.call("op", kind, *args, **kwargs)
    if isinstance(value, tuple) and value[0]:
        state, why = pair.a.call("wait", value[1], 20)
        assert state == (False, True)
    else:
        assert value in (False, (False, 0)), value
    assert why
    return why


ONE_SIDED = ["write", "read", "write_async", "read_async"]
UNKNOWN = [0, 1, 12_345, U64 - 1, U64]


class TestUnknownIds:
    @pytest.mark.parametrize("kind", [*ONE_SIDED, "send", "recv", "send_async", "recv_async"])
    def test_connection(self, made: Pair, kind: str) -> None:
        advert = made.b.call("advert", "m") if kind.startswith(("write", "read")) else None
        for unknown in UNKNOWN:
            if unknown != made.conn_a:
                assert "connection" in refused(made.a.call("op", kind, unknown, "m", advert=advert))
        untouched(made)

    @pytest.mark.parametrize("kind", [*ONE_SIDED, "send", "recv", "send_async", "recv_async"])
    def test_region(self, made: Pair, kind: str) -> None:
        advert = made.b.call("advert", "m") if kind.startswith(("write", "read")) else None
        mr = made.a.call("mr", "m")
        for unknown in UNKNOWN:
            if unknown != mr:
                answer = made.a.call(
                    "run", "test_bad_input", "with_mr", unknown, kind, made.conn_a, advert
                )
                assert "region" in refused(answer)
        untouched(made)

    def test_everything_else(self, made: Pair) -> None:
        data = made.a.call("run", "test_bad_input", "address", "m")
        mr = made.a.call("mr", "m")
        for unknown in (12_345, U64):
            calls: list[tuple[str, list[Any], Any]] = [
                ("dereg", [unknown], False),
                ("remove_remote_endpoint", [unknown], False),
                ("advertise", [unknown, data, 8], (False, b"")),
                ("advertise", [unknown, mr, data, 8], (False, b"")),
                ("advertisev", [[unknown], [data], [8], 1], (False, [])),
                ("advertise_ipc", [unknown, data, 8], (False, b"")),
                ("advertisev_ipc", [unknown, [data], [8]], (False, [])),
                ("send_ipc", [unknown, data, 8], False),
                ("recv_ipc", [unknown, data, 8], False),
                ("send_ipc_async", [unknown, data, 8], (False, 0)),
                ("send_notif", [unknown, b"x"], False),
                ("send_notif_async", [unknown, b"x"], (False, 0)),
                ("poll_async", [unknown], (False, True)),
                ("wait", [unknown], (False, True)),
                ("cancel", [unknown], False),
                ("connection", [unknown], None),
            ]
            for name, args, expected in calls:
                value, why = made.a.call("method", name, *args)
                assert value == expected, name
                assert str(unknown) in why, name
            assert str(unknown) in made.a.call("method", "transfer_error", unknown)[0]
        untouched(made)


class TestRanges:
    """Ranges that are off by one, in each direction, on each side."""

    @pytest.mark.parametrize("kind", [*ONE_SIDED, "send", "send_async"])
    @pytest.mark.parametrize(
        ("start", "size"),
        [(-1, 8), (0, SIZE + 1), (SIZE, 1), (SIZE - 7, 8), (1, SIZE), (-SIZE, SIZE)],
    )
    def test_local(self, made: Pair, kind: str, start: int, size: int) -> None:
        advert = made.b.call("advert", "m") if kind.startswith(("write", "read")) else None
        assert refused(made.a.call("op", kind, made.conn_a, "m", start, size, advert))
        untouched(made)

    @pytest.mark.parametrize("start", [-1, SIZE + 1, 1 << 40])
    def test_receive(self, made: Pair, start: int) -> None:
        """The length of a receive may exceed its region, but its start must lie within."""
        assert refused(made.a.call("op", "recv", made.conn_a, "m", start, 8))
        untouched(made)

    @pytest.mark.rails
    @pytest.mark.parametrize("kind", ONE_SIDED)
    def test_longer_than_the_advert(self, made: Pair, kind: str) -> None:
        advert = made.b.call("advert", "m", 100, 50)
        assert "51" in fails(made, kind, made.conn_a, "m", 0, 51, advert)
        untouched(made)

    @pytest.mark.parametrize(("start", "size"), [(-1, 8), (0, SIZE + 1), (SIZE, 1), (0, U64)])
    def test_advert(self, made: Pair, start: int, size: int) -> None:
        data = made.a.call("run", "test_bad_input", "address", "m")
        mr = made.a.call("mr", "m")
        assert refused(made.a.call("method", "advertise", mr, data + start, size))
        assert refused(
            made.a.call("method", "advertisev", [mr, mr], [data, data + start], [8, size], 2)
        )
        untouched(made)

    @pytest.mark.parametrize(("ptr", "size"), [(U64, 8), (U64 - 7, 16), (4096, U64)])
    def test_registration(self, made: Pair, ptr: int, size: int) -> None:
        assert refused(made.a.call("method", "reg", ptr, size))
        assert refused(made.a.call("method", "regv", [ptr], [size]))

    def test_regv_is_all_or_nothing(self, made: Pair) -> None:
        data = made.a.call("run", "test_bad_input", "address", "m")
        before = made.a.call("method", "stats")[0]["regions"]
        assert refused(made.a.call("method", "regv", [data, U64], [8, 8]))
        assert made.a.call("method", "stats")[0]["regions"] == before

    @pytest.mark.rails
    def test_one_bad_piece_spoils_the_vector(self, made: Pair) -> None:
        """The call is refused before a byte moves."""
        for bad in ("mr", "range", "advert", "long"):
            for kind in ("writev", "readv", "writev_async", "readv_async"):
                advert = made.b.call("advert", "m", 0, 64)
                answer = made.a.call(
                    "run", "test_bad_input", "bad_vector", kind, bad, made.conn_a, advert
                )
                assert refused(answer), (bad, kind)
        untouched(made)


@pytest.mark.rails
class TestAdverts:
    @pytest.mark.parametrize("kind", ONE_SIDED)
    def test_forged(self, made: Pair, kind: str) -> None:
        """Each changed bit that has a meaning is noticed; no change makes a write land
        elsewhere."""
        advert = made.b.call("advert", "m", 0, 64)
        for offset in (12, 20, 24, 32, 36, 39, 48, 52, 55):
            forged = bytearray(advert)
            forged[offset] ^= 1
            value, why = made.a.call("op", kind, made.conn_a, "m", 0, 64, bytes(forged))
            if isinstance(value, tuple) and value[0]:
                value, why = made.a.call("wait", value[1], 20)
            if offset in (12, 24) and value in (True, (True, True)):
                # Bytes that only fill the layout may have any value.
                made.a.call("fill", "m", FILL_A)
                made.b.call("fill", "m", FILL_B)
                continue
            assert value in (False, (False, 0), (False, True)), offset
            assert why
        untouched(made)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_range_outside_the_region(self, made: Pair, kind: str) -> None:
        """The owner checks bounds, also if the advert was changed after it was made."""
        advert = made.b.call("advert", "m")
        address = struct.unpack_from("<Q", advert)[0]
        for moved in (address - 1, address + 1, address + SIZE, 0, 4096, U64 - SIZE):
            forged = struct.pack("<Q", moved) + advert[8:]
            assert fails(made, kind, made.conn_a, "m", 0, SIZE, forged)
        untouched(made)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_made_up(self, made: Pair, kind: str) -> None:
        for blob in (bytes(64), b"\xff" * 64, os.urandom(64)):
            assert fails(made, kind, made.conn_a, "m", 0, 8, blob)
        untouched(made)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_revoked(self, made: Pair, transport: str, kind: str) -> None:
        """Deregistration revokes an advert, and registering the same memory once more does not
        restore it."""
        advert = made.b.call("advert", "m")
        assert made.b.call("method", "dereg", made.b.call("mr", "m"))[0] is True
        assert fails(made, kind, made.conn_a, "m", advert=advert)
        assert made.b.call("run", "test_bad_input", "register_again", "m")
        assert fails(made, kind, made.conn_a, "m", advert=advert)
        untouched(made)
        if transport == "tcp":
            # Over TCP the owner refuses and counts; on one host the accessor itself notices.
            assert made.b.call("method", "stats")[0]["refused_accesses"] >= 2

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_of_another_endpoint(
        self, made: Pair, spawn: Callable[..., Any], transport: str, kind: str
    ) -> None:
        """An advert is valid only on connections to the endpoint that made it."""
        other = spawn()
        other.call("open", port=0, bind="127.0.0.1", transport=transport)
        other.call("buf", "m", SIZE, fill=0x33)
        assert fails(made, kind, made.conn_a, "m", advert=other.call("advert", "m"))
        assert fails(made, kind, made.conn_a, "m", advert=made.a.call("advert", "m"))
        assert set(other.call("get", "m")) == {0x33}
        untouched(made)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_replayed_to_a_restarted_owner(
        self, made: Pair, spawn: Callable[..., Any], transport: str, kind: str
    ) -> None:
        advert = made.b.call("advert", "m")
        again = spawn()
        metadata = again.call("open", port=0, bind="127.0.0.1", transport=transport)
        again.call("buf", "m", SIZE, fill=0x33)
        again.begin("accept", timeout=20)
        conn = made.a.call("connect", metadata)
        again.result()
        assert fails(made, kind, conn, "m", advert=advert)
        assert set(again.call("get", "m")) == {0x33}
        untouched(made)


class TestLengths:
    @pytest.mark.parametrize("length", [0, 1, 63, 65, 104, 128])
    def test_adverts(self, made: Pair, length: int) -> None:
        for kind in ONE_SIDED:
            with pytest.raises(AssertionError, match="RuntimeError.*64"):
                made.a.call("op", kind, made.conn_a, "m", 0, 8, bytes(length))
        untouched(made)

    def test_lists(self, made: Pair) -> None:
        assert made.a.call("run", "test_bad_input", "unequal_lists", made.conn_a) == []
        untouched(made)

    @pytest.mark.parametrize("length", [0, 64, 103, 105, 128])
    def test_ipc_infos(self, made: Pair, length: int) -> None:
        data = made.a.call("run", "test_bad_input", "address", "m")
        for name in ("write_ipc", "read_ipc", "write_ipc_async", "read_ipc_async"):
            with pytest.raises(AssertionError, match="RuntimeError.*104"):
                made.a.call("method", name, made.conn_a, data, 8, bytes(length))
        untouched(made)

    def test_no_pieces(self, made: Pair) -> None:
        """An empty vector succeeds or fails with a reason, and moves nothing."""
        metas: list[tuple[str, list[Any]]] = [("sendv", []), ("writev", [[]]), ("readv", [[]])]
        for name, args in metas:
            value, why = made.a.call("method", name, made.conn_a, [], [], [], *args, 0)
            assert value in (True, False) and (value or why)
            if value and name == "sendv":
                assert made.b.call("op", "recv", made.conn_b, "m", 0, 8)[0] is True
        untouched(made)


class TestConnecting:
    @pytest.mark.parametrize("metadata", [b"", b"\0", b"\0" * 10, b"\xff" * 31, b"x" * 5000])
    def test_metadata(self, made: Pair, metadata: bytes) -> None:
        assert refused(made.a.call("method", "add_remote_endpoint", metadata))
        untouched(made)

    @pytest.mark.parametrize(
        "where",
        [("", 0, 1), ("300.1.1.1", 0, 1), ("not a host", 0, 1), ("::1::", 0, 1)]
        + [("127.0.0.1", 0, port) for port in (0, 65_536, -2, 1 << 40)]
        + [("127.0.0.1", gpu) for gpu in (-1, 60_000, 1 << 40)],
    )
    def test_addresses(self, made: Pair, where: tuple[Any, ...]) -> None:
        assert refused(made.a.call("method", "connect", *where))
        untouched(made)


# Functions of the helper processes.


def address(side: Any, name: str) -> int:
    return side.data(name).ctypes.data


def with_mr(
    side: Any, mr: int, kind: str, conn: int, advert: bytes | None
) -> tuple[Any, str | None]:
    args = [conn, mr, address(side, "m"), 8]
    value = getattr(side.ep, kind)(*args, *([] if advert is None else [advert]))
    return value, side.ep.last_error()


def register_again(side: Any, name: str) -> bool:
    ok, side.mrs[name] = side.ep.reg(address(side, name), len(side.data(name)))
    return ok


def bad_vector(side: Any, kind: str, bad: str, conn: int, advert: bytes) -> tuple[Any, str | None]:
    mrs, ptrs = [side.mrs["m"]] * 3, [address(side, "m") + 64 * i for i in range(3)]
    sizes, metas = [64] * 3, [advert] * 3
    if bad == "mr":
        mrs[2] = U64
    elif bad == "range":
        ptrs[2] = address(side, "m") + SIZE - 63
    elif bad == "advert":
        metas[2] = bytes(64)
    else:
        sizes[2] = 65
    return getattr(side.ep, kind)(conn, mrs, ptrs, sizes, metas, 3), side.ep.last_error()


def unequal_lists(side: Any, conn: int) -> list[str]:
    """The calls that did not raise RuntimeError."""
    lists: dict[Any, list[Any]] = {
        "mrs": [side.mrs["m"]],
        "ptrs": [address(side, "m")],
        "sizes": [8],
        "metas": [side.advert("m", 0, 8)],
        "infos": [side.ep.advertise_ipc(conn, address(side, "m"), 8)[1]],
    }
    calls = {
        "sendv": ("mrs", "ptrs", "sizes", 1),
        "recvv": ("mrs", "ptrs", "sizes", 1),
        "sendv_async": ("mrs", "ptrs", "sizes", 1),
        "recvv_async": ("mrs", "ptrs", "sizes", 1),
        "writev": ("mrs", "ptrs", "sizes", "metas", 1),
        "readv": ("mrs", "ptrs", "sizes", "metas", 1),
        "writev_async": ("mrs", "ptrs", "sizes", "metas", 1),
        "readv_async": ("mrs", "ptrs", "sizes", "metas", 1),
        "advertisev": ("mrs", "ptrs", "sizes", 1),
        "writev_ipc": ("ptrs", "sizes", "infos"),
        "readv_ipc": ("ptrs", "sizes", "infos"),
        "writev_ipc_async": ("ptrs", "sizes", "infos"),
        "readv_ipc_async": ("ptrs", "sizes", "infos"),
        "advertisev_ipc": ("ptrs", "sizes"),
    }
    wrong = []
    for name, parameters in calls.items():
        for spoilt in range(len(parameters)):
            args: list[Any] = [lists.get(p, p) for p in parameters]
            args[spoilt] = 2 if args[spoilt] == 1 else args[spoilt] * 2
            try:
                getattr(side.ep, name)(conn, *args)
                wrong.append(f"{name} with {parameters[spoilt]} too long")
            except RuntimeError:
                pass
    try:
        side.ep.regv(lists["ptrs"], [8, 8])
        wrong.append("regv")
    except RuntimeError:
        pass
    return wrong
