"""Forked children: they do not touch their parent's endpoint, and make their own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import warnings
from typing import Any, Callable

import pytest
from uccl import p2p


@pytest.fixture(autouse=True)
def threads_are_expected() -> None:
    # CPython warns of forks of processes with threads, which these tests do.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")


class Pair:
    """Two endpoints of this process, connected."""

    def __init__(self, transport: str) -> None:
        settings: dict[str, Any] = {"bind": "127.0.0.1", "port": 0, "transport": transport}
        self.a, self.b = p2p.Endpoint(**settings), p2p.Endpoint(**settings)
        ok, self.conn = self.a.add_remote_endpoint(self.b.get_metadata())
        assert ok, p2p.last_error()
        assert self.b.accept(timeout=20)[0], p2p.last_error()

    def is_in_use(self) -> None:
        source, target = bytearray(b"x" * 100_000), bytearray(100_000)
        ok, here = self.a.reg(source)
        assert ok
        ok, there = self.b.reg(target)
        assert ok
        ok, advert = self.b.advertise(there, target)
        assert ok
        assert self.a.write(self.conn, here, source, len(source), advert), p2p.last_error()
        assert target == source
        assert self.a.dereg(here) and self.b.dereg(there)
        assert self.a.send_notif(self.conn, b"still here"), p2p.last_error()
        assert [payload for _, payload in self.b.wait_notifs(20)] == [b"still here"]


@pytest.fixture(params=["local", "tcp"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a child; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_drops_its_copy(pair: Pair) -> None:
    def drop() -> None:
        del pair.a, pair.b
        gc.collect()

    assert in_child(drop) == 0
    pair.is_in_use()


def test_a_child_that_calls_is_told_the_owner(pair: Pair) -> None:
    parent = os.getpid()

    def call() -> None:
        memory = bytearray(10)
        assert pair.a.reg(memory)[0] is False
        assert f"belongs to process {parent}" in p2p.last_error()
        assert pair.a.send_notif(pair.conn, b"") is False
        assert f"belongs to process {parent}" in p2p.last_error()
        assert pair.b.get_notifs() == []
        with pytest.raises(RuntimeError, match="forked child"):
            pair.a.stats()

    assert in_child(call) == 0
    pair.is_in_use()


def test_a_child_of_multiprocessing_ends(pair: Pair) -> None:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: None)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    pair.is_in_use()


def test_an_interpreter_that_was_forked_ends(pair: Pair) -> None:
    """The child exits through sys.exit, with all of the interpreter's cleanup."""
    command = [sys.executable, "-c", FORKS_AND_EXITS, pair.b.get_metadata().hex()]
    subprocess.run(command, check=True, timeout=50)
    assert [payload for _, payload in pair.b.wait_notifs(20)] == [b"from its parent"]
    pair.is_in_use()


FORKS_AND_EXITS = """
import os, sys, warnings
from uccl import p2p
warnings.simplefilter("ignore")
ep = p2p.Endpoint(bind="127.0.0.1", port=0)
ok, conn = ep.add_remote_endpoint(bytes.fromhex(sys.argv[1]))
assert ok, p2p.last_error()
pid = os.fork()
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert ep.send_notif(conn, b"from its parent"), p2p.last_error()
"""


def test_a_child_makes_its_own(pair: Pair) -> None:
    metadata = pair.b.get_metadata()

    def talk() -> None:
        own = p2p.Endpoint(bind="127.0.0.1", port=0)
        ok, conn = own.add_remote_endpoint(metadata)
        assert ok, p2p.last_error()
        assert own.send_notif(conn, b"from the child"), p2p.last_error()
        del own
        gc.collect()

    assert in_child(talk) == 0
    assert [payload for _, payload in pair.b.wait_notifs(20)] == [b"from the child"]
    pair.is_in_use()
