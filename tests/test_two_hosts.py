"""Two hosts: network namespaces joined by a veth pair, over IPv4 and IPv6."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Callable

import pytest
from peer import Peer, can_make_namespaces, pattern_crc

MIB = 1 << 20
LACKING = can_make_namespaces()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=f"lacks {LACKING}")
_serial = itertools.count()


class Hosts:
    """Two namespaces with one link."""

    def __init__(self, family: str) -> None:
        tag = f"{os.getpid()}-{next(_serial)}"
        self.names = [f"uccl-{side}-{tag}" for side in "ab"]
        self.ips = ["10.77.0.1", "10.77.0.2"] if family == "ipv4" else ["fd77::1", "fd77::2"]
        bits = 24 if family == "ipv4" else 64
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip(
                "-n",
                self.names[0],
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.names[1],
            )
            for name, address in zip(self.names, self.ips):
                flags = ["nodad"] if family == "ipv6" else []
                ip("-n", name, "addr", "add", f"{address}/{bits}", "dev", "eth0", *flags)
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
            # Hosts have a default route; an endpoint takes the route's source address as its own.
            for name, gateway in zip(self.names, reversed(self.ips)):
                ip("-n", name, "route", "add", "default", "via", gateway)
        except BaseException:
            self.close()
            raise

    def link(self, state: str) -> None:
        """Connects (``up``) or cuts (``down``) the link."""
        ip("-n", self.names[0], "link", "set", "eth0", state)
        if state == "up" and ":" in self.ips[0]:
            # The link lost its IPv6 address when it went down.
            subprocess.run(
                [
                    "ip",
                    "-n",
                    self.names[0],
                    "addr",
                    "add",
                    f"{self.ips[0]}/64",
                    "dev",
                    "eth0",
                    "nodad",
                ],
                check=False,
                capture_output=True,
            )

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture(params=["ipv4", "ipv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(request.param)
    yield made
    made.close()


class Joined:
    """An endpoint on each host, connected. The transport is TCP: namespaces share their machine's
    memory, which hosts do not."""

    def __init__(self, spawn: Callable[..., Peer], hosts: Hosts, **settings: Any) -> None:
        self.a, self.b = spawn(netns=hosts.names[0]), spawn(netns=hosts.names[1])
        settings["transport"] = "tcp"
        self.meta_a = self.a.call("open", port=0, **settings)
        self.meta_b = self.b.call("open", port=0, **settings)
        self.b.begin("accept", timeout=30)
        self.conn_a = self.a.call("connect", self.meta_b)
        self.conn_b = self.b.result()


@pytest.fixture
def joined(spawn: Callable[..., Peer], hosts: Hosts) -> Joined:
    return Joined(spawn, hosts)


def test_addresses(joined: Joined, hosts: Hosts) -> None:
    """An endpoint without settings advertises an address at which its peers reach it."""
    for peer, meta, address in (
        (joined.a, joined.meta_a, hosts.ips[0]),
        (joined.b, joined.meta_b, hosts.ips[1]),
    ):
        assert peer.call("run", "test_faults", "parse", meta)[0] == address
        assert len(meta) == (10 if "." in address else 22)
        assert peer.call("run", "test_two_hosts", "oob_ip") == address
    info = joined.a.call("method", "connection", joined.conn_a)[0]
    assert hosts.ips[1] in info["addr"]
    assert info["path"] == "tcp"


def test_well_known_port(spawn: Callable[..., Peer], hosts: Hosts) -> None:
    """A client needs only the address and the GPU index."""
    a, b = spawn(netns=hosts.names[0]), spawn(netns=hosts.names[1])
    a.call("open", local_gpu_idx=0)
    b.call("open", local_gpu_idx=1)
    b.begin("method", "accept", timeout=20)
    (ok, _), why = a.call("method", "connect", hosts.ips[1], 1)
    assert ok, why
    (ok, address, gpu, _), why = b.result()
    assert (ok, address, gpu) == (True, hosts.ips[0], 0), why


@pytest.mark.parametrize("size", [1, 65_537, 32 * MIB + 3])
@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_data(joined: Joined, kind: str, size: int) -> None:
    source, target = (joined.b, joined.a) if kind == "read" else (joined.a, joined.b)
    source.call("buf", "m", size, seed=5)
    target.call("buf", "m", size)
    if kind == "send":
        joined.b.begin("op", "recv", joined.conn_b, "m")
        assert joined.a.call("op", "send", joined.conn_a, "m") == (True, None)
        assert joined.b.result() == (True, None)
    else:
        advert = joined.b.call("advert", "m")
        assert joined.a.call("op", kind, joined.conn_a, "m", advert=advert) == (True, None)
    assert target.call("crc", "m") == pattern_crc(size, 5)
    assert target.call("guards", "m")


def test_notifications(joined: Joined) -> None:
    lengths = [0, 1, 70_000, 5 * MIB, 2]
    joined.b.begin("run", "test_semantics", "notif_crcs", len(lengths))
    assert joined.a.call("run", "test_semantics", "send_notifs", joined.conn_a, lengths) == []
    expected = [(joined.conn_b, n, pattern_crc(n, i)) for i, n in enumerate(lengths)]
    assert joined.b.result() == expected


def test_vectors(joined: Joined) -> None:
    for peer, seed in ((joined.a, 1), (joined.b, 2)):
        peer.call("buf", "m", 300 * 1000, seed=seed)
    adverts = joined.b.call("run", "test_semantics", "adverts", "m", 1000)
    assert (
        joined.a.call("run", "test_semantics", "one_sided_v", "writev", joined.conn_a, "m", adverts)
        is True
    )
    assert joined.b.call("crc", "m") == pattern_crc(300 * 1000, 1)


def test_bad_input(joined: Joined) -> None:
    """The owner of memory refuses invalid accesses across a network."""
    for peer in (joined.a, joined.b):
        peer.call("buf", "m", 8192, fill=7)
    advert = joined.b.call("advert", "m")
    outside = (int.from_bytes(advert[:8], "little") + 1).to_bytes(8, "little") + advert[8:]
    assert joined.a.call("op", "write", joined.conn_a, "m", advert=outside)[0] is False
    assert joined.b.call("method", "dereg", joined.b.call("mr", "m"))[0] is True
    for kind in ("write", "read"):
        done, why = joined.a.call("op", kind, joined.conn_a, "m", advert=advert)
        assert done is False and why
    assert joined.b.call("guards", "m") and set(joined.b.call("get", "m")) == {7}


@pytest.mark.parametrize("kind", ["write", "read", "send", "recv"])
def test_cut_link(spawn: Callable[..., Peer], hosts: Hosts, kind: str) -> None:
    """Both sides of a cut link notice it; the endpoints stay usable and connect once more."""
    joined = Joined(spawn, hosts, timeout=2)
    for peer in (joined.a, joined.b):
        peer.call("buf", "m", 256 * MIB, fill=1)
    advert = joined.b.call("advert", "m") if kind in ("write", "read") else None
    (ok, theirs), _ = joined.b.call(
        "op", "recv_async" if kind == "send" else "send_async", joined.conn_b, "m"
    )
    assert ok
    posted = []
    for _ in range(4):
        (ok, transfer), why = joined.a.call(
            "op", kind + "_async", joined.conn_a, "m", advert=advert
        )
        assert ok, why
        posted.append(transfer)
    hosts.link("down")
    state, why = joined.a.call("wait", posted[-1], 30)
    assert state == (False, True) and why
    state, why = joined.b.call("wait", theirs, 30)
    assert state in ((False, True), (True, True))
    hosts.link("up")
    end = time.monotonic() + 20
    joined.b.begin("accept", timeout=30)
    while True:
        ok, why = joined.a.call("try_connect", joined.meta_b)
        if ok:
            break
        assert time.monotonic() < end, why
        time.sleep(0.2)
    joined.b.result()


def test_short_cut(spawn: Callable[..., Peer], hosts: Hosts) -> None:
    """A link that is back before the timeout costs only time."""
    joined = Joined(spawn, hosts, timeout=30)
    joined.a.call("buf", "m", 64 * MIB, seed=1)
    joined.b.call("buf", "m", 64 * MIB)
    advert = joined.b.call("advert", "m")
    joined.a.begin("op", "write", joined.conn_a, "m", advert=advert)
    # A queue that drops all packets stands for the cut: the address remains.
    tc = ["tc", "-n", hosts.names[0], "qdisc"]
    cut = subprocess.run(
        [*tc, "add", "dev", "eth0", "root", "netem", "loss", "100%"],
        check=False,
        capture_output=True,
        text=True,
    )
    if cut.returncode != 0:
        joined.a.result()
        pytest.skip(f"lacks tc with netem ({cut.stderr.strip()})")
    time.sleep(1)
    subprocess.run([*tc, "del", "dev", "eth0", "root"], check=True)
    assert joined.a.result() == (True, None)
    assert joined.b.call("crc", "m") == pattern_crc(64 * MIB, 1)


def test_killed_peer(joined: Joined) -> None:
    joined.a.call("buf", "m", 64 * MIB)
    joined.b.call("buf", "m", 64 * MIB)
    advert = joined.b.call("advert", "m")
    posted = [
        joined.a.call("op", "write_async", joined.conn_a, "m", advert=advert)[0] for _ in range(16)
    ]
    joined.b.kill(signal.SIGKILL)
    state, why = joined.a.call("wait", posted[-1][1], 30)
    assert state == (False, True) and why


def oob_ip(side: Any) -> str:
    from uccl import p2p

    return p2p.get_oob_ip()
