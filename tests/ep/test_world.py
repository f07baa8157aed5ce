"""The processes of ranks that other tests run in."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="lacks torch")

from world import RankEnded, World

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(120)]


def number(group: Any) -> int:
    return group.rank()


def ends(group: Any, how: str) -> None:
    """Rank 1 ends, and the others wait for it."""
    import torch

    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "SIGKILL" else os._exit(3)
    torch.distributed.barrier(group)


def ends_later(group: Any) -> None:
    """Rank 1 ends after its answer."""
    if group.rank() == 1:
        threading.Timer(0.05, os._exit, (4,)).start()


def test_a_rank_that_ends_is_named_and_the_next_test_has_new_ranks() -> None:
    world = World(3)
    try:
        for how, said in [("SIGKILL", "by SIGKILL"), ("exit", "with exit code 3")]:
            with pytest.raises(RankEnded, match=rf"^rank 1 \(process \d+\) ended {said}"):
                world.run(3, ends, how)
            assert world.run(3, number) == [0, 1, 2]
        world.run(3, ends_later)
        with pytest.raises(RankEnded, match=r"rank 1 \(process \d+\) ended with exit code 4"):
            while True:
                world.run(3, number)
        assert world.run(2, number) == [0, 1]
    finally:
        world.end()
    world.end()
