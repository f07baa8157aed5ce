"""Agents that die and come back under their name: no state that others keep of them may outlive
them.

``UCCL_TEST_ROUNDS`` is the number of restarts of an agent, and ``UCCL_TEST_PAUSES`` lists the
seconds that it stays away.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable

import pytest
from agents import Agent
from peer import PeerError

ROUNDS = int(os.environ.get("UCCL_TEST_ROUNDS", "3"))
PAUSES = [float(pause) for pause in os.environ.get("UCCL_TEST_PAUSES", "0").split(",")]
SIZE = 100_000


def outcome(call: Callable[..., str], *args: Any) -> str:
    """The state of a transfer, or the last line of NIXL's exception."""
    try:
        return call(*args)
    except PeerError as e:
        return str(e).strip().splitlines()[-1]


@pytest.mark.timeout(60 + ROUNDS * (15 + int(sum(PAUSES))))
@pytest.mark.parametrize("pause", PAUSES)
def test_an_agent_that_restarts(agent: Callable[..., Agent], link: str, pause: float) -> None:
    """With new metadata the agent is reached at once; with the old metadata each transfer fails
    with a reason."""
    here = agent("here", link=link)
    mine = here.buf(SIZE, seed=1)
    before: dict[str, int] = {}
    for round in range(ROUNDS):
        there = agent("there", link=link)
        theirs = there.buf(SIZE)
        here.meet(there)
        assert here.write(mine, theirs) == "DONE", round
        assert theirs.get() == mine.get()
        prepared = here.prepare("WRITE", mine, theirs)
        there.kill()
        there.peer.process.wait()
        for result in (outcome(here.write, mine, theirs), outcome(here.run, prepared)):
            assert "ERR" in result or "nixl" in result, (round, result)
        here.release(prepared)
        # Some releases of NIXL forget the agent by themselves.
        outcome(here.call, "forget", "there")
        time.sleep(pause)
        # The resources of a peer are freed when its end has been noticed.
        end = time.monotonic() + 30
        while any(
            count > before.get(what, count) + 4
            for what, count in here.peer.call("usage").items()
            if what != "rss"
        ):
            assert time.monotonic() < end, (round, before, here.peer.call("usage"))
            time.sleep(0.1)
        before = before or here.peer.call("usage")


def test_transfers_to_an_agent_that_was_forgotten_leave_nothing(
    agent: Callable[..., Agent], link: str
) -> None:
    """Posting a transfer to a forgotten agent leaves no open connection."""
    here, there = agent("here", link=link), agent("there", link=link)
    mine, theirs = here.buf(SIZE, seed=1), there.buf(SIZE)

    def rounds(count: int) -> int:
        for _ in range(count):
            here.meet(there)
            prepared = here.prepare("WRITE", mine, theirs)
            assert here.run(prepared) == "DONE"
            here.call("forget", "there")
            assert "DONE" not in outcome(here.run, prepared)
            here.release(prepared)
        return here.peer.call("usage")["fds"]

    before = rounds(3)
    end = time.monotonic() + 30
    while (after := rounds(10)) > before + 4:
        assert time.monotonic() < end, (before, after)
