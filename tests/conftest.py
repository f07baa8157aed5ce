"""Fixtures: helper processes that end with their test, and a bound on every test's time."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Callable

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from peer import Peer

DEFAULT_SECONDS = 60
TRANSPORTS = os.environ.get(
    "UCCL_TEST_TRANSPORTS", "local,tcp,libfabric:tcp;ofi_rxm,libfabric:shm"
).split(",")
"""The transports that tests run over; the provider of libfabric follows a colon."""

STDERR = pytest.StashKey[int]()


class Expired(BaseException):
    """A test took longer than its bound."""


def pytest_configure(config: pytest.Config) -> None:
    # Before output is captured: stacks that a process prints as it ends must not end with it.
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # The first limit raises an exception. If the process is stuck where Python delivers none, the
    # second limit prints its stacks and ends it.
    marker = item.get_closest_marker("timeout")
    seconds = int(marker.args[0]) if marker else DEFAULT_SECONDS

    def expired(_signal: int, _frame: Any) -> None:
        raise Expired(f"{item.nodeid} took more than {seconds} s")

    old = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(seconds + 30, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the tests' ``seen`` properties, also those of tests that ran in other processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "seen":
                terminalreporter.write_line(value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = filter(wanted, items)
    for item in items:
        marker = item.get_closest_marker("rails")
        if marker and (why := marker.kwargs.get("but_not", {}).get(transport_of(item))):
            item.add_marker(pytest.mark.skip(reason=why))
    if os.environ.get("UCCL_TEST_SLOW") == "1":
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="lacks UCCL_TEST_SLOW=1"))


def wanted(item: pytest.Item) -> bool:
    """Whether a test is worth its time over the transport that it is to run over."""
    over_rails = transport_of(item) not in (None, "local", "tcp")
    return not over_rails or item.get_closest_marker("rails") is not None


def transport_of(item: pytest.Item) -> str | None:
    parameters = getattr(item, "callspec", None)
    return parameters.params.get("transport") if parameters else None


@functools.cache
def lacking(transport: str) -> str | None:
    """Names the library that this machine lacks for a transport, or None. A process of its own
    loads the library, because libraries may install signal handlers."""
    if not transport.startswith("libfabric"):
        return None
    name = os.environ.get("UCCL_LIBFABRIC_SO", "libfabric.so.1")
    command = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", name]
    loads = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return None if loads else f"{name} (Debian: libfabric1)"


@pytest.fixture(scope="session")
def idle_peers() -> Iterator[list[Peer]]:
    """Helper processes that wait for a test: starting one takes longer than most tests."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def spawn(idle_peers: list[Peer]) -> Iterator[Callable[..., Peer]]:
    """Starts helper processes for this test. A process with settings is not shared with other
    tests."""
    peers: list[tuple[Peer, bool]] = []

    def start(**settings: Any) -> Peer:
        peer = Peer(**settings) if settings or not idle_peers else idle_peers.pop()
        peers.append((peer, not settings))
        return peer

    yield start
    for peer, for_any in peers:
        if for_any and len(idle_peers) < 3 and peer.reset():
            idle_peers.append(peer)
        else:
            peer.close()


@pytest.fixture
def base_port() -> int:
    """The first of 8 free ports in a row, for well-known ports that no other process uses.

    They lie outside the range of ephemeral ports.
    """
    for base in range(20000 + os.getpid() % 700 * 16, 32000, 16):
        try:
            for port in range(base, base + 8):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
        except OSError:
            continue
        return base
    raise RuntimeError("no free ports")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    if lack := lacking(request.param):
        pytest.skip(f"lacks {lack}")
    return request.param


class Pair:
    """Two processes with connected endpoints: ``a`` connected, ``b`` accepted."""

    def __init__(self, a: Peer, b: Peer, **kwargs: Any) -> None:
        self.a, self.b = a, b
        self.meta_a = a.call("open", port=0, **kwargs)
        self.meta_b = b.call("open", port=0, **kwargs)
        b.begin("accept", timeout=30)
        self.conn_a = a.call("connect", self.meta_b)
        self.conn_b = b.result()


@pytest.fixture
def pair(spawn: Callable[..., Peer], transport: str) -> Pair:
    """Two connected processes on loopback, over each transport."""
    return Pair(spawn(), spawn(), transport=transport, bind="127.0.0.1")


@pytest.fixture
def connect(spawn: Callable[..., Peer]) -> Callable[..., Pair]:
    """Two connected processes on loopback, with settings of the test's choice."""

    def make(**kwargs: Any) -> Pair:
        return Pair(spawn(), spawn(), **{"bind": "127.0.0.1", **kwargs})

    return make
