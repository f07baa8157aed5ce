"""Ranks with GPUs in processes: the last one is killed, and the others notice."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from cases import Call
from few_tokens import FewTokens

RANKS = 3
#: The rank that is killed.
LOST = RANKS - 1
#: Seconds that a call waits for a rank: nearly the limit of a test, since the end of a process is
#: noticed at once.
SOON = 40
#: The moment of the kill, and the phase in which the others then miss the rank.
PHASES = {
    "before": "dispatch",
    "in dispatch": "combine",
    "between": "combine",
    "in combine": "dispatch",
}


def dies(few: FewTokens, call: Call, when: str) -> None:
    """Takes part in a call up to the moment ``when``, and kills itself."""
    if when != "before":
        returned = few.dispatch(call, when == "in dispatch")
        torch.cuda.synchronize()
        if when != "in dispatch":
            received = few.check_dispatch(call, returned)
            if when == "in combine":
                few.combine(call, returned[2], received, return_recv_hook=True)
                torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def whole(few: FewTokens, call: Call) -> None:
    """A dispatch and a combine of all ranks; raises an error if a rank is missing."""
    returned = few.dispatch(call, False)
    torch.cuda.synchronize()
    few.buffer.check()
    received = few.check_dispatch(call, returned)
    combined, _, _ = few.combine(call, returned[2], received)
    torch.cuda.synchronize()
    few.buffer.check()
    assert torch.equal(combined.cpu(), few.wanted(call))


def said(few: FewTokens) -> str:
    """The error of a call, which names the missing rank."""
    try:
        for _ in range(2):
            whole(few, few.call())
    except (OSError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nobody is missing")


def goes_on(few: FewTokens, when: str) -> None:
    """Calls that mask the missing rank."""
    call = few.call()
    if when != "before":
        returned = few.dispatch(call, False)
        # The rows that the lost rank sent have arrived.
        received = few.check_dispatch(call, returned)
        combined, _, _ = few.combine(call, returned[2], received)
        is_lost = lambda expert: when != "in combine" and few.shape.owner(expert) == LOST  # noqa: E731
        assert torch.equal(few.here(combined), few.wanted(call, left_out=is_lost))
    for _ in range(3):
        few.without([LOST], few.call())
    few.buffer.check()


def loses(group: Any, when: str, masks: bool) -> str:
    """Makes a call with all ranks, loses one, and makes more; returns this rank's error."""
    left = torch.distributed.new_group(list(range(LOST)))
    few = FewTokens(group, 300, device="cuda", timeout=SOON, enable_shrink=masks)
    whole(few, few.call())
    torch.distributed.barrier(group)
    if group.rank() == LOST:
        dies(few, few.call(), when)
    if masks:
        goes_on(few, when)
        text = ""
    else:
        text = said(few)
        # The GPU still works, for other calls and for those of a new group.
        few.buffer.destroy()
        few = FewTokens(left, 301, device="cuda", timeout=10 * SOON)
        few.two_at_a_time()
    torch.cuda.synchronize()
    torch.distributed.barrier(left)
    few.buffer.destroy()
    return text
