"""Faults: a peer dies, stops, is no endpoint, or gives up."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import Pair, lacking
from peer import Peer, pattern_crc

MIB = 1 << 20
# Long enough that a fault hits a transfer in the middle, on any machine.
LONG = 256 * MIB
ROUNDS = int(os.environ.get("UCCL_TEST_LEAK_ROUNDS", "20"))
# libfabric before 1.18 crashed about one time in four if a connection ended during reads.
ENDINGS = int(os.environ.get("UCCL_TEST_ENDINGS", "4"))

Connect = Callable[..., Pair]
Spawn = Callable[..., Peer]


# The result of `ending` for an endpoint that has closed.
EXPECTED = {"close": "True", "with": "closed", "with an exception": "the block's"}


def ending(side: Any, way: str) -> str:
    """Closes an endpoint of a helper process; returns the result or the error."""
    if way == "close":
        closed = side.ep.close()
        return "True" if closed is True else side.ep.last_error()
    try:
        with side.ep:
            if way == "with an exception":
                raise KeyError("the block's")
    except RuntimeError as error:
        return str(error)
    except KeyError as error:
        # The exception of the block is raised, and `last_error` has the one of close.
        last = side.ep.last_error() or ""
        return last if "still" in last else error.args[0]
    return "closed"


def failed(answer: tuple[Any, str | None]) -> str:
    """Asserts that a transfer has failed in some call; returns the reason."""
    value, why = answer
    assert value in (False, (False, 0), (False, True)), value
    assert why
    return why


def waits(peer: Peer, kind: str, *args: Any, **kwargs: Any) -> int:
    """Posts a transfer that does not end soon."""
    (ok, transfer), why = peer.call("op", kind, *args, **kwargs)
    assert ok, why
    return transfer


def short(transport: str) -> int:
    """A short timeout in seconds, in which the devices of rails open on a busy machine too."""
    return 1 if transport in ("tcp", "local") else 3


# Marked tests run over rails too; of those with several kinds of transfer, a few do.
RAILS = pytest.mark.rails
OVER_RAILS = [pytest.param("write", marks=RAILS), pytest.param("read", marks=RAILS)]
# Tests that kill or stop the peer while it works.
LOSING = pytest.mark.rails(
    but_not={
        "libfabric:shm": "libfabric's shm: a process may die holding a lock in another's memory"
    }
)
LOSING_RAILS = [pytest.param("write", marks=LOSING), pytest.param("read", marks=LOSING)]


TWOFOLD = """
from uccl import p2p
with p2p.Endpoint(port=0, bind="127.0.0.1") as there, p2p.Endpoint(port=0, bind="127.0.0.1") as here:
    ip, port, gpu = there.parse_metadata(there.get_metadata())
    ok, _ = here.connect("twofold", gpu, port, timeout=10)
    assert ok, p2p.last_error()
"""


class TestPeerLost:
    @pytest.mark.parametrize("kind", [*LOSING_RAILS, pytest.param("send", marks=LOSING), "recv"])
    def test_killed_in_the_middle(self, connect: Connect, transport: str, kind: str) -> None:
        """The transfers of a killed peer fail and name it; everything else works."""
        pair = connect(transport=transport)
        pair.a.call("buf", "m", LONG, fill=1)
        pair.b.call("buf", "m", LONG, fill=2)
        advert = pair.b.call("advert", "m") if kind in ("write", "read") else None
        if kind == "send":
            pair.b.begin("op", "recv", pair.conn_b, "m")
        elif kind == "recv":
            pair.b.begin("op", "send_async", pair.conn_b, "m")
        posted = [waits(pair.a, kind + "_async", pair.conn_a, "m", advert=advert) for _ in range(8)]
        pair.b.kill()
        pair.b.process.wait()
        ends = [pair.a.call("wait", transfer, 30) for transfer in posted]
        # Each has ended. Transfers that this side carries out alone may all have ended before the
        # kill, if that was delayed; those that need the peer cannot have.
        assert all(value in ((True, True), (False, True)) for value, _ in ends), ends
        if not (transport == "local" and advert):
            assert failed(ends[-1])
        for transfer, end in zip(posted, ends):
            assert pair.a.call("method", "poll_async", transfer)[0] == end[0]
        assert failed(pair.a.call("op", "send", pair.conn_a, "m"))
        assert pair.a.call("method", "remove_remote_endpoint", pair.conn_a)[0] in (True, False)
        pair.a.call("close")

    def test_files_of_a_killed_process_do_not_hinder_a_connection(self, spawn: Spawn) -> None:
        """Files of a killed process do not keep a new process of the same id from connecting over
        libfabric's `shm`."""
        if lack := lacking("libfabric:shm"):
            pytest.skip(f"lacks {lack}")
        fresh = [spawn(netns=None) for _ in range(2)]
        for peer in fresh:
            for number in range(8):
                Path(f"/dev/shm/{peer.pid}:{os.getuid()}:{number}").write_bytes(bytes(4096))
        pair = Pair(*fresh, transport="libfabric:shm", bind="127.0.0.1")
        for peer in fresh:
            peer.call("buf", "m", 8)
        advert = pair.b.call("advert", "m")
        assert pair.a.call("op", "write", pair.conn_a, "m", advert=advert) == (True, None)

    @LOSING
    def test_killed_while_idle(self, connect: Connect, transport: str) -> None:
        """The next transfer fails and does not wait."""
        pair = connect(transport=transport)
        pair.a.call("buf", "m", 100)
        pair.b.call("buf", "m", 100)
        advert = pair.b.call("advert", "m")
        pair.b.kill()
        pair.b.process.wait()
        assert failed(pair.a.call("op", "write", pair.conn_a, "m", advert=advert))

    @LOSING
    def test_killed_while_notifications_are_awaited(self, connect: Connect, transport: str) -> None:
        """A wait that names the connection ends with it, and takes what came before."""
        pair = connect(transport=transport)
        assert pair.b.call("method", "send_notif", pair.conn_b, b"the last")[0]
        pair.a.begin("method", "wait_notifs", conn_id=pair.conn_a)
        assert pair.a.result(30)[0] == [(pair.conn_a, b"the last")]
        pair.a.begin("method", "wait_notifs", conn_id=pair.conn_a)
        pair.b.kill()
        notifs, why = pair.a.result(30)
        assert notifs == [] and "lost" in (why or ""), why

    @LOSING
    def test_another_takes_its_place(self, connect: Connect, spawn: Spawn, transport: str) -> None:
        """The successor of a dead peer on the same port is a new peer."""
        pair = connect(transport=transport)
        ip, port, _ = pair.a.call("run", "test_faults", "parse", pair.meta_b)
        pair.a.call("buf", "m", 1000, seed=1)
        pair.b.call("buf", "m", 1000)
        old = pair.b.call("advert", "m")
        pair.b.kill()
        pair.b.process.wait()
        assert failed(pair.a.call("op", "write", pair.conn_a, "m", advert=old))
        again = spawn()
        metadata = again.call("open", port=port, bind=ip, transport=transport)
        again.begin("accept", timeout=20)
        conn = pair.a.call("connect", metadata)
        again.result()
        again.call("buf", "m", 1000)
        new = again.call("advert", "m")
        assert failed(pair.a.call("op", "write", conn, "m", advert=old))
        assert pair.a.call("op", "write", conn, "m", advert=new) == (True, None)
        assert again.call("crc", "m") == pattern_crc(1000, 1)

    @pytest.mark.parametrize("kind", [LOSING_RAILS[0], "read", "send", "recv"])
    def test_stopped(self, connect: Connect, transport: str, kind: str) -> None:
        """The connection to a peer that neither runs nor closes is lost after its timeout."""
        pair = connect(transport=transport, timeout=short(transport))
        pair.a.call("buf", "m", LONG, fill=1)
        pair.b.call("buf", "m", LONG, fill=2)
        advert = pair.b.call("advert", "m") if kind in ("write", "read") else None
        pair.b.kill(signal.SIGSTOP)
        answer = pair.a.call("op", kind, pair.conn_a, "m", advert=advert, timeout=20)
        if transport == "local" and kind in ("write", "read") and answer == (True, None):
            # One side alone may have moved the bytes; then the next message fails.
            answer = pair.a.call("method", "send_notif", pair.conn_a, b"there?", timeout=20)
        assert failed(answer)
        # The peer runs once more: its connection is lost, and no byte lands in memory of transfers
        # that have ended.
        before = pair.a.call("crc", "m")
        pair.b.kill(signal.SIGCONT)
        time.sleep(0.5)
        assert pair.a.call("crc", "m") == before
        assert failed(pair.b.call("op", "send", pair.conn_b, "m", 0, 8, timeout=20))

    @pytest.mark.parametrize("way", ["close", "with", "with an exception"])
    def test_close_tells_of_memory_that_a_peer_may_still_touch(
        self, connect: Connect, way: str
    ) -> None:
        """Each close reports the error, and a program may close once more."""
        for _ in range(20):
            pair = connect(transport="local", timeout=1)
            pair.a.call("buf", "m", LONG)
            pair.b.call("buf", "m", LONG, fill=2)
            advert = pair.a.call("advert", "m")
            for _ in range(4):
                waits(pair.b, "write_async", pair.conn_b, "m", advert=advert)
            pair.b.kill(signal.SIGSTOP)
            try:
                told = [pair.a.call("run", "test_faults", "ending", way) for _ in range(2)]
            finally:
                pair.b.kill(signal.SIGCONT)
            if all("still" in said for said in told):
                break
            assert told == [EXPECTED[way], EXPECTED[way]], "the peer was stopped between two copies"
        else:
            pytest.fail("the peer was never stopped in the middle of a copy")
        # The peer runs once more, notices that the connection is lost, and releases the memory.
        end = time.monotonic() + 30
        while (said := pair.a.call("run", "test_faults", "ending", "close")) != EXPECTED["close"]:
            assert time.monotonic() < end, said

    def test_stopped_for_a_moment(self, connect: Connect, transport: str) -> None:
        """A connection survives a pause shorter than its timeout."""
        pair = connect(transport=transport, timeout=20)
        pair.a.call("buf", "m", MIB, seed=1)
        pair.b.call("buf", "m", MIB)
        pair.b.begin("op", "recv", pair.conn_b, "m")
        pair.b.kill(signal.SIGSTOP)
        sent = waits(pair.a, "send_async", pair.conn_a, "m")
        time.sleep(0.5)
        pair.b.kill(signal.SIGCONT)
        assert pair.a.call("wait", sent, 20) == ((True, True), None)
        assert pair.b.result() == (True, None)
        assert pair.b.call("crc", "m") == pattern_crc(MIB, 1)

    def test_flooded_while_stopped(self, connect: Connect, transport: str) -> None:
        """Messages that a peer does not take are refused before they fill the memory."""
        pair = connect(transport=transport, timeout=60)
        pair.a.call("buf", "m", 60_000)
        pair.b.kill(signal.SIGSTOP)
        posted, why = pair.a.call("run", "test_faults", "flood", pair.conn_a)
        pair.b.kill(signal.SIGCONT)
        assert 8 < posted < 4000 and "queue of messages" in why, (posted, why)
        pair.a.call("close")

    @RAILS
    def test_closed(self, connect: Connect, transport: str) -> None:
        """Closing an endpoint fails the pending transfers of its peers and of its own threads."""
        pair = connect(transport=transport)
        for peer in (pair.a, pair.b):
            peer.call("buf", "m", 100)
        recv = waits(pair.a, "recv_async", pair.conn_a, "m")
        pair.b.call("begin_thread", "accept", "method", "accept")
        pair.b.call("begin_thread", "recv", "op", "recv", pair.conn_b, "m")
        time.sleep(0.2)
        pair.b.call("close")
        assert failed(pair.a.call("wait", recv, 20))
        assert pair.b.call("join", "accept")[0] == (False, "", -1, 0)
        assert failed(pair.b.call("join", "recv"))

    @RAILS
    def test_removed_connection(self, connect: Connect, transport: str) -> None:
        pair = connect(transport=transport)
        for peer in (pair.a, pair.b):
            peer.call("buf", "m", 100)
        mine = waits(pair.a, "recv_async", pair.conn_a, "m")
        theirs = waits(pair.b, "recv_async", pair.conn_b, "m")
        assert pair.a.call("method", "remove_remote_endpoint", pair.conn_a)[0] is True
        assert failed(pair.a.call("wait", mine, 20))
        assert failed(pair.b.call("wait", theirs, 20))

    @pytest.mark.timeout(300 + ENDINGS * 30)
    @pytest.mark.parametrize("kind", LOSING_RAILS)
    @pytest.mark.parametrize(
        "ending", ["remove", "close", "peer removes", "peer closes", "peer stops", "peer is killed"]
    )
    def test_ended_in_the_middle(
        self, connect: Connect, transport: str, ending: str, kind: str
    ) -> None:
        """After any end of a connection, the remaining processes work, and each transfer has an
        answer."""
        timeout = 5 if ending == "peer stops" else 20
        for _ in range(ENDINGS if kind == "read" and transport.startswith("libfabric") else 1):
            pair = connect(transport=transport, timeout=timeout)
            pair.a.call("buf", "m", 64 * MIB, fill=1)
            pair.b.call("buf", "m", 64 * MIB, fill=2)
            advert = pair.b.call("advert", "m")
            posted = [
                waits(pair.a, kind + "_async", pair.conn_a, "m", advert=advert) for _ in range(8)
            ]
            if ending == "remove":
                pair.a.call("method", "remove_remote_endpoint", pair.conn_a)
            elif ending == "close":
                pair.a.call("close")
            elif ending == "peer removes":
                pair.b.call("method", "remove_remote_endpoint", pair.conn_b)
            elif ending == "peer closes":
                pair.b.call("close")
            elif ending == "peer stops":
                pair.b.kill(signal.SIGSTOP)
            else:
                pair.b.kill()
            if ending != "close":
                ends = [pair.a.call("wait", transfer, 30) for transfer in posted]
                assert all(value in ((True, True), (False, True)) for value, _ in ends), ends
            pair.a.call("close")
            if ending == "peer stops":
                pair.b.kill(signal.SIGCONT)
            if ending == "peer is killed":
                pair.b.process.wait()
            else:
                pair.b.call("close")
            # Both still answer after the background work of the end.
            time.sleep(0.05)
            for peer in (pair.a, pair.b) if ending != "peer is killed" else (pair.a,):
                assert peer.call("usage")["threads"] > 0
                # Processes of all endings at a time would need more memory than there is.
                peer.pipe.close()
                assert peer.process.wait(60) == 0


class TestObjectsThatGo:
    def test_in_the_middle_of_a_peers_write(self, connect: Connect) -> None:
        """The deallocation of an advertised object waits for a stopped peer: no byte lands in the
        freed memory."""
        for _ in range(5):
            pair = connect(transport="local", timeout=1)
            info = pair.b.call("run", "test_faults", "advertise_object", pair.conn_b, LONG)
            pair.a.call("run", "test_faults", "write_object", pair.conn_a, info, LONG)
            pair.a.kill(signal.SIGSTOP)
            pair.b.call("begin_thread", "gone", "run", "test_faults", "let_object_go")
            # Longer than the connection's timeout, after which the connection is lost.
            time.sleep(3)
            was_held_up = not pair.b.call("run", "test_faults", "has_gone")
            pair.a.kill(signal.SIGCONT)
            assert pair.b.call("join", "gone") == []
            if was_held_up:
                return
        pytest.skip("lacks a stop in the middle of a copy, five times")


class TestConnecting:
    def test_nobody_there(self, spawn: Spawn) -> None:
        """Connecting ends even if no peer ever answers."""
        peer = spawn()
        peer.call("open", port=0, bind="127.0.0.1", timeout=1)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        (ok, _), why = peer.call("method", "connect", "127.0.0.1", 0, port)
        assert not ok and str(port) in why

    def test_connecting_tries_all_addresses_of_a_name(self, tmp_path: Path) -> None:
        """Connecting tries all addresses of a name: localhost may be ::1 first."""
        hosts = tmp_path / "hosts"
        hosts.write_text("::1 twofold\n127.0.0.1 twofold\n")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        own_hosts = ["unshare", "--mount", "sh", "-c", mount, str(hosts)]
        try:
            subprocess.run([*own_hosts, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as e:
            pytest.skip(f"lacks the right to have its own /etc/hosts ({e})")
        done = subprocess.run(
            [*own_hosts, sys.executable, "-c", TWOFOLD], capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stderr

    def test_silent_listener(self, spawn: Spawn) -> None:
        """A server accepts connections and sends nothing."""
        peer = spawn()
        peer.call("open", port=0, bind="127.0.0.1", timeout=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            (ok, _), why = peer.call("method", "connect", "127.0.0.1", 0, port)
            assert not ok and why

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 4096, b"\xff" * 4096]
    )
    def test_foreign_server(self, spawn: Spawn, answer: bytes) -> None:
        peer = spawn()
        peer.call("open", port=0, bind="127.0.0.1", timeout=3)
        with socket.create_server(("127.0.0.1", 0)) as server:
            peer.begin("method", "connect", "127.0.0.1", 0, server.getsockname()[1])
            client, _ = server.accept()
            with client:
                client.sendall(answer)
                (ok, _), why = peer.result()
                assert not ok and why

    def test_foreign_client(self, spawn: Spawn, transport: str) -> None:
        """Garbage at the port disturbs no connection, and accept does not return it."""
        a, b = spawn(), spawn()
        meta = b.call("open", port=0, bind="127.0.0.1", transport=transport)
        a.call("open", port=0, bind="127.0.0.1", transport=transport)
        ip, port, _ = a.call("run", "test_faults", "parse", meta)
        b.begin("accept", timeout=30)
        client = http.client.HTTPConnection(ip, port, timeout=5)
        with pytest.raises((http.client.HTTPException, OSError)):
            client.request("GET", "/")
            client.getresponse()
        with socket.create_connection((ip, port)) as garbage, socket.create_connection((ip, port)):
            try:
                garbage.sendall(os.urandom(100_000))
            except OSError:
                pass  # The endpoint refused before all was sent.
            conn = a.call("connect", meta)
            accepted = b.result()
        assert a.call("method", "send_notif", conn, b"hello")[0] is True
        assert b.call("notifs", 1) == [(accepted, b"hello")]
        assert b.call("method", "stats")[0]["refused_handshakes"] >= 2

    @pytest.mark.parametrize(
        ("psk_a", "psk_b"), [("right", "wrong"), ("right", None), (None, "right")]
    )
    def test_wrong_secret(self, spawn: Spawn, psk_a: str | None, psk_b: str | None) -> None:
        """A peer without the secret is refused on both sides; a peer with it connects."""
        a, b, friend = spawn(), spawn(), spawn()
        settings: dict[str, Any] = {"port": 0, "bind": "127.0.0.1", "timeout": 5}
        a.call("open", psk=psk_a, **settings)
        meta = b.call("open", psk=psk_b, **settings)
        friend.call("open", psk=psk_b, **settings)
        b.begin("accept", timeout=30)
        ok, why = a.call("try_connect", meta)
        assert not ok and why
        friend.call("connect", meta)
        b.result()
        stats = b.call("method", "stats")[0]
        assert stats["connections"] == 1 and stats["refused_handshakes"] >= 1

    def test_a_connection_nobody_accepts(self, spawn: Spawn, transport: str) -> None:
        """The process continues, and ends in time."""
        a, b = spawn(), spawn()
        settings = {"port": 0, "bind": "127.0.0.1", "transport": transport, "timeout": 2}
        meta = b.call("open", **settings)
        a.call("open", **settings)
        a.call("try_connect", meta)
        b.call("close")
        a.call("close")


class TestFences:
    """After a cancel or a deadline no byte lands, on either side."""

    @pytest.mark.parametrize("kind", OVER_RAILS)
    @pytest.mark.parametrize("by", ["cancel", "deadline"])
    def test_one_sided(self, connect: Connect, transport: str, kind: str, by: str) -> None:
        pair = connect(transport=transport)
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        source.call("buf", "m", LONG, fill=1)
        target.call("buf", "m", LONG, fill=2)
        advert = pair.b.call("advert", "m")
        ends = pair.a.call(
            "run", "test_faults", "start_and_stop", kind, by, pair.conn_a, advert, within=120
        )
        assert target.call("run", "test_faults", "stays", "m") is True
        assert target.call("guards", "m")
        stopped = [end for end in ends if end[0] == (False, True)]
        # On one host a transfer may end before its post returns; then all bytes must be there.
        assert stopped or (transport == "local" and set(target.call("get", "m", 0, MIB)) == {1})
        word = "cancel" if by == "cancel" else "deadline"
        assert all(word in why for _, why in stopped)
        # The connection stays usable.
        target.call("fill", "m", 2)
        assert pair.a.call("op", kind, pair.conn_a, "m", 0, MIB, advert) == (True, None)
        assert target.call("get", "m", 0, MIB) == b"\1" * MIB

    @pytest.mark.parametrize("by", ["cancel", "deadline"])
    @pytest.mark.parametrize("who", ["sender", "receiver"])
    def test_two_sided(self, connect: Connect, transport: str, by: str, who: str) -> None:
        """A send or receive without a counterpart is withdrawn; the next ones match."""
        pair = connect(transport=transport)
        pair.a.call("buf", "old", 8 * MIB, fill=1)
        pair.a.call("buf", "new", 8 * MIB, fill=3)
        pair.b.call("buf", "old", 8 * MIB, fill=2)
        pair.b.call("buf", "new", 8 * MIB, fill=4)
        peer, conn, kind = (
            (pair.a, pair.conn_a, "send_async")
            if who == "sender"
            else (pair.b, pair.conn_b, "recv_async")
        )
        deadline = {"timeout": 0.3} if by == "deadline" else {}
        transfer = waits(peer, kind, conn, "old", **deadline)
        if by == "cancel":
            assert peer.call("method", "poll_async", transfer)[0] == (True, False)
            assert peer.call("method", "cancel", transfer)[0] is True
        assert failed(peer.call("wait", transfer, 20))
        pair.b.begin("op", "recv", pair.conn_b, "new", timeout=20)
        assert pair.a.call("op", "send", pair.conn_a, "new", timeout=20) == (True, None)
        assert pair.b.result() == (True, None)
        assert set(pair.b.call("get", "new")) == {3}
        assert pair.b.call("run", "test_faults", "stays", "old") is True
        assert set(pair.b.call("get", "old")) == {2}

    @RAILS
    def test_finished_is_not_cancelled(self, pair: Pair) -> None:
        pair.a.call("buf", "m", 100)
        pair.b.call("buf", "m", 100)
        advert = pair.b.call("advert", "m")
        transfer = waits(pair.a, "write_async", pair.conn_a, "m", advert=advert)
        assert pair.a.call("wait", transfer, 20) == ((True, True), None)
        assert pair.a.call("method", "cancel", transfer)[0] is True
        assert pair.a.call("wait", transfer, 20) == ((True, True), None)

    @pytest.mark.parametrize("kind", OVER_RAILS)
    def test_deregistration_under_the_peers_transfers(self, pair: Pair, kind: str) -> None:
        """After dereg has returned, no access of a peer lands in the memory, of any number in
        flight."""
        pair.a.call("buf", "m", 64 * MIB, fill=1)
        pair.b.call("buf", "m", 64 * MIB, fill=2)
        advert = pair.b.call("advert", "m")
        posted = [waits(pair.a, kind + "_async", pair.conn_a, "m", advert=advert) for _ in range(8)]
        assert pair.b.call("method", "dereg", pair.b.call("mr", "m"))[0] is True
        assert pair.b.call("run", "test_faults", "stays", "m") is True
        for transfer in posted:
            state, _ = pair.a.call("wait", transfer, 20)
            assert state in ((True, True), (False, True))

    @pytest.mark.parametrize("kind", [OVER_RAILS[0], "read", "recv"])
    def test_deregistration_under_own_transfers(self, pair: Pair, kind: str) -> None:
        """A region stays registered while own transfers use it; dereg reports that."""
        pair.a.call("buf", "m", 64 * MIB, fill=1)
        pair.b.call("buf", "m", 64 * MIB, fill=2)
        advert = pair.b.call("advert", "m") if kind != "recv" else None
        posted = [waits(pair.a, kind + "_async", pair.conn_a, "m", advert=advert) for _ in range(8)]
        done, why = pair.a.call("method", "dereg", pair.a.call("mr", "m"))
        if not done:
            assert "unfinished" in why
            for transfer in posted:
                assert pair.a.call("method", "cancel", transfer)[0] is True
            assert pair.a.call("method", "dereg", pair.a.call("mr", "m"))[0] is True
        assert pair.a.call("run", "test_faults", "stays", "m") is True


class TestInterrupts:
    """Ctrl-C ends each waiting call, and the endpoint stays usable."""

    @pytest.mark.parametrize(
        "call",
        [
            "accept",
            "accept_local",
            "connect",
            "send",
            "recv",
            "sendv",
            "recvv",
            "send_ipc",
            "recv_ipc",
            pytest.param("wait", marks=RAILS),
            "wait_notifs",
            "add_remote_endpoint",
        ],
    )
    def test_waiting(self, pair: Pair, call: str) -> None:
        for peer in (pair.a, pair.b):
            peer.call("buf", "m", 64 * MIB, fill=1)
        pair.a.call("run", "test_faults", "is_ready")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            pair.a.begin(
                "run", "test_faults", "interrupted", call, pair.conn_a, silent.getsockname()[1]
            )
            time.sleep(0.7)
            pair.a.kill(signal.SIGINT)
            assert pair.a.result(20) == "KeyboardInterrupt"
        assert pair.a.call("method", "send_notif", pair.conn_a, b"on")[0] is True
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"on")]
        # The interrupted call is withdrawn: the next send matches the next receive.
        pair.b.begin("op", "recv", pair.conn_b, "m", 0, 100, timeout=20)
        assert pair.a.call("op", "send", pair.conn_a, "m", 0, 100, timeout=20) == (True, None)
        assert pair.b.result() == (True, None)

    @pytest.mark.parametrize("call", ["write", "read", "writev", "readv", "send_notif"])
    def test_peer_that_stands_still(self, connect: Connect, call: str) -> None:
        """Calls that wait only while the peer is stopped."""
        pair = connect(transport="tcp", timeout=5)
        pair.a.call("buf", "m", 64 * MIB, fill=1)
        pair.b.call("buf", "m", 64 * MIB, fill=2)
        advert = pair.b.call("advert", "m")
        pair.a.call("run", "test_faults", "is_ready")
        pair.b.kill(signal.SIGSTOP)
        pair.a.begin("run", "test_faults", "interrupted", call, pair.conn_a, 0, advert)
        time.sleep(0.7)
        pair.a.kill(signal.SIGINT)
        # The fence may have to wait until the connection to the silent peer is lost, but no longer.
        assert pair.a.result(30) == "KeyboardInterrupt"

    def test_handler_that_does_not_raise(self, pair: Pair) -> None:
        """A signal with a handler that returns does not end the call."""
        for peer in (pair.a, pair.b):
            peer.call("buf", "m", 100, seed=1)
        pair.b.call("run", "test_faults", "is_ready")
        pair.b.begin("run", "test_faults", "recv_under_signals", pair.conn_b)
        time.sleep(0.5)
        pair.b.kill(signal.SIGUSR1)
        time.sleep(0.5)
        assert pair.a.call("op", "send", pair.conn_a, "m") == (True, None)
        assert pair.b.result() == (True, 1)


class TestThreads:
    def test_the_interpreter_runs_on(self, pair: Pair) -> None:
        """Other threads run Python while one waits in each kind of call."""
        pair.a.call("buf", "m", 100)
        for call in ("accept", "recv", "wait_notifs"):
            assert (
                pair.a.call("run", "test_faults", "counts_while_waiting", call, pair.conn_a) > 1000
            )

    @RAILS
    def test_a_held_interpreter_keeps_nobody_waiting(
        self, connect: Connect, transport: str
    ) -> None:
        """A thread waits while another one holds the interpreter for longer than a peer may be
        silent. The connection survives, and the peer's data arrives meanwhile."""
        timeout = short(transport)
        pair = connect(transport=transport, timeout=timeout)
        for peer in (pair.a, pair.b):
            peer.call("buf", "m", 4096)
        advert = pair.b.call("advert", "m")
        pair.b.call("begin_thread", "recv", "op", "recv", pair.conn_b, "m")
        pair.b.begin("hold_interpreter", 3 * timeout)
        done = 0
        while not pair.b.pipe.poll(0):
            assert pair.a.call("op", "write", pair.conn_a, "m", advert=advert) == (True, None)
            assert pair.a.call("method", "send_notif", pair.conn_a, b"n")[0]
            done += 1
        pair.b.result()
        assert pair.a.call("op", "send", pair.conn_a, "m") == (True, None)
        assert pair.b.call("join", "recv") == (True, None)
        assert len(pair.b.call("notifs", done)) == done
        assert done > 0

    @RAILS
    def test_many_threads_on_one_connection(self, pair: Pair) -> None:
        pair.a.call("buf", "m", 16 * 100_000, seed=1)
        pair.b.call("buf", "m", 16 * 100_000)
        advert = pair.b.call("advert", "m")
        assert pair.a.call("run", "test_faults", "write_from_threads", pair.conn_a, advert) == []
        assert pair.b.call("crc", "m") == pattern_crc(16 * 100_000, 1)


class TestLeaks:
    """Files, threads and memory do not grow over many rounds."""

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("ending", ["remove", "kill"])
    def test_connections(self, spawn: Spawn, transport: str, ending: str) -> None:
        # A reused process may have spare memory, so these are new.
        a = spawn(env={})
        a.call("open", port=0, bind="127.0.0.1", transport=transport, timeout=5)
        a.call("buf", "m", 100_000, seed=1)
        b = spawn()
        settings = {"port": 0, "bind": "127.0.0.1", "transport": transport, "timeout": 5}
        metadata = b.call("open", **settings)
        b.call("buf", "m", 100_000)
        before: dict[str, int] = {}
        for i in range(ROUNDS + 5):
            if i == 5:
                before = settled(a, {})
            b.begin("accept", timeout=20)
            conn = a.call("connect", metadata)
            accepted = b.result()
            advert = b.call("advert", "m")
            assert a.call("op", "write", conn, "m", advert=advert) == (True, None)
            if ending == "remove":
                assert a.call("method", "remove_remote_endpoint", conn)[0] is True
                b.call("method", "remove_remote_endpoint", accepted)
            else:
                b.kill()
                b.process.wait()
                a.call("op", "write", conn, "m", advert=advert)
                a.call("method", "remove_remote_endpoint", conn)
                b = spawn()
                metadata = b.call("open", **settings)
                b.call("buf", "m", 100_000)
        no_growth(before, settled(a, before))

    @pytest.mark.timeout(600)
    def test_endpoints(self, spawn: Spawn) -> None:
        a = spawn()
        a.call("run", "test_faults", "make_and_drop_endpoints", 5)
        before = settled(a, {})
        a.call("run", "test_faults", "make_and_drop_endpoints", ROUNDS, within=300)
        no_growth(before, settled(a, before))

    def test_transfers_and_regions(self, pair: Pair) -> None:
        """The resources of a transfer or a registration are freed, also if its result is never
        read."""
        pair.a.call("buf", "m", 4096)
        pair.b.call("buf", "m", 4096)
        advert = pair.b.call("advert", "m")
        pair.a.call("run", "test_faults", "churn", pair.conn_a, advert, 2000)
        before = settled(pair.a, {})
        pair.a.call("run", "test_faults", "churn", pair.conn_a, advert, 10_000, within=120)
        no_growth(before, settled(pair.a, before))


def settled(peer: Peer, floor: dict[str, int]) -> dict[str, int]:
    """The usage once pending closes have ended, or after a while."""
    usage = peer.call("usage")
    for _ in range(50):
        if floor and all(usage[key] <= floor[key] for key in ("fds", "threads")):
            break
        time.sleep(0.05)
        usage = peer.call("usage")
    return usage


def no_growth(before: dict[str, int], after: dict[str, int]) -> None:
    # A thread opens one descriptor at its first sleep. That is no leak: a leak grows with each
    # round.
    assert after["fds"] <= before["fds"] + 2, (before, after)
    assert after["threads"] <= before["threads"], (before, after)
    assert after["rss"] <= before["rss"] + 8 * MIB + ROUNDS * 16_384, (before, after)


# Functions of the helper processes.


def is_ready(_side: Any) -> None:
    """Returns when this module has been imported, which may take longer than a test sleeps."""


def parse(side: Any, metadata: bytes) -> tuple[str, int, Any]:
    return side.ep.parse_metadata(metadata)


def flood(side: Any, conn: int) -> tuple[int, str | None]:
    """Posts sends of many iovs until one is refused; the announcement of each has about a
    megabyte."""
    base, mr, n = side.data("m").ctypes.data, side.mrs["m"], 30_000
    for posted in range(4000):
        ok, _ = side.ep.sendv_async(conn, [mr] * n, [base + i * 2 for i in range(n)], [1] * n, n)
        if not ok:
            return posted, side.ep.last_error()
    return 4000, None


def stays(side: Any, name: str, seconds: float = 0.4) -> bool:
    """Whether memory does not change for a while."""
    before, end = side.data(name).copy(), time.monotonic() + seconds
    while time.monotonic() < end:
        if not (side.data(name) == before).all():
            return False
        time.sleep(0.05)
    return True


def start_and_stop(side: Any, kind: str, by: str, conn: int, advert: bytes) -> list[Any]:
    """Starts more transfers than can end in time, and stops them."""
    deadline = {"timeout": 0.02} if by == "deadline" else {}
    posted = []
    for _ in range(8):
        (ok, transfer), why = side.op(kind + "_async", conn, "m", advert=advert, **deadline)
        assert ok, why
        posted.append(transfer)
    if by == "cancel":
        time.sleep(0.005)
        for transfer in posted:
            assert side.ep.cancel(transfer), side.ep.last_error()
    return [side.wait(transfer, 20) for transfer in posted]


def interrupted(side: Any, call: str, conn: int, silent_port: int, advert: bytes = b"") -> str:
    """Makes a waiting call; returns the exception that ends it."""
    ep, mr, data = side.ep, side.mrs["m"], side.data("m")
    ptr, size = data.ctypes.data, len(data)
    host = bytes([127, 0, 0, 1]) + silent_port.to_bytes(2, "big") + bytes(4)

    def wait() -> None:
        ok, transfer = ep.recv_async(conn, mr, ptr, size)
        assert ok
        try:
            ep.wait(transfer)
        finally:
            ep.cancel(transfer)

    def notify() -> None:
        while ep.send_notif(conn, bytes(16 * MIB)):
            pass

    calls = {
        "accept": lambda: ep.accept(timeout=0),
        "accept_local": lambda: ep.accept_local(timeout=0),
        "connect": lambda: ep.connect("127.0.0.1", 0, silent_port, timeout=30),
        "add_remote_endpoint": lambda: ep.add_remote_endpoint(host),
        "send": lambda: ep.send(conn, mr, ptr, size),
        "recv": lambda: ep.recv(conn, mr, ptr, size),
        "sendv": lambda: ep.sendv(conn, [mr], [ptr], [size], 1),
        "recvv": lambda: ep.recvv(conn, [mr], [ptr], [size], 1),
        "send_ipc": lambda: ep.send_ipc(conn, ptr, size),
        "recv_ipc": lambda: ep.recv_ipc(conn, ptr, size),
        "write": lambda: ep.write(conn, mr, ptr, size, advert),
        "read": lambda: ep.read(conn, mr, ptr, size, advert),
        "writev": lambda: ep.writev(conn, [mr], [ptr], [size], [advert], 1),
        "readv": lambda: ep.readv(conn, [mr], [ptr], [size], [advert], 1),
        "wait": wait,
        "wait_notifs": lambda: ep.wait_notifs(),
        "send_notif": notify,
    }
    try:
        answer = calls[call]()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return f"{call} returned {answer!r} ({ep.last_error()})"


def recv_under_signals(side: Any, conn: int) -> tuple[bool, int]:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))
    ok = side.op("recv", conn, "m")[0]
    return ok, len(seen)


def counts_while_waiting(side: Any, call: str, conn: int) -> int:
    """Python's count while another thread waits in a call."""
    import threading

    calls = {
        "accept": lambda: side.ep.accept(timeout=0.5),
        "recv": lambda: side.op("recv", conn, "m", timeout=0.5),
        "wait_notifs": lambda: side.ep.wait_notifs(0.5),
    }
    thread = threading.Thread(target=calls[call])
    thread.start()
    count = 0
    while thread.is_alive():
        count += 1
        time.sleep(0.0001)
    return count


def write_from_threads(side: Any, conn: int, advert: bytes) -> list[str]:
    import struct
    import threading

    size, failures = 100_000, []
    address = struct.unpack_from("<Q", advert)[0]

    def write(i: int) -> None:
        part = struct.pack("<QI", address + i * size, size) + advert[12:]
        for _ in range(20):
            done, why = side.op("write", conn, "m", i * size, size, part)
            if not done:
                failures.append(why)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def make_and_drop_endpoints(side: Any, count: int) -> None:
    import gc

    from uccl import p2p

    for i in range(count):
        ep = p2p.Endpoint(port=0, bind="127.0.0.1")
        memory = ep.alloc(1 << 20)
        assert ep.reg(memory)[0]
        ok, _ = ep.connect("127.0.0.1", 0, p2p.Endpoint.parse_metadata(ep.get_metadata())[1])
        assert ok, ep.last_error()
        if i % 2:
            ep.close()
        del ep, memory
    gc.collect()


def churn(side: Any, conn: int, advert: bytes, count: int) -> None:
    data = side.data("m")
    for _ in range(count):
        ok, mr = side.ep.reg(data.ctypes.data, len(data))
        assert ok
        (ok, _), why = side.op("write_async", conn, "m", advert=advert)
        while not ok:
            # The endpoint reports that its queue is full; it does not queue without limit.
            assert "full" in why, why
            time.sleep(0.001)
            (ok, _), why = side.op("write_async", conn, "m", advert=advert)
        assert side.ep.dereg(mr)
    assert side.op("write", conn, "m", advert=advert)[0]


def advertise_object(side: Any, conn: int, size: int) -> bytes:
    import numpy as np

    side.names.update(object=np.zeros(size, np.uint8), errors=[], gone=False)
    sys.unraisablehook = lambda error: side.names["errors"].append(str(error.exc_value))
    ok, info = side.ep.advertise_ipc(conn, side.names["object"])
    assert ok, side.ep.last_error()
    return info


def write_object(side: Any, conn: int, info: bytes, size: int) -> None:
    side.names["source"] = bytes(size)
    for _ in range(8):
        ok, _ = side.ep.write_ipc_async(conn, side.names["source"], size, info)
        assert ok, side.ep.last_error()


def let_object_go(side: Any) -> list[str]:
    del side.names["object"]
    side.names["has gone"] = True
    return side.names["errors"]


def has_gone(side: Any) -> bool:
    return side.names.get("has gone", False)
