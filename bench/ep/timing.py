"""How long calls on a GPU take, by events on its stream."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

#: Calls between two events, where they are queued.
QUEUED = 8
#: Ways of calling: each call alone from a common start, host time included, or one queued behind
#: the other.
HOW = ("called", "queued")


def elapsed(work: Callable[[], Any]) -> float:
    """Microseconds of a stream's work, from the call on."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3


def times(how: str, count: int, call: Callable[[], Any], meet: Callable[[], Any]) -> list[float]:
    """Microseconds of a call, ``count`` values. ``meet`` waits for all ranks. A first call is not
    counted."""
    each = 1 if how == "called" else QUEUED

    def several() -> None:
        for _ in range(each):
            call()

    call()
    taken = []
    for _ in range(count):
        torch.cuda.synchronize()
        meet()
        taken.append(elapsed(several) / each)
    return taken


def percentile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` percent of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]
