"""``nixl_ep``: ranks that are connected while the others go on without them, and take part later."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")
import nixl_ep_ranks  # noqa: E402
from nixl_ep_ranks import ROOM, Here, disconnected, let_in, masks, step, steps  # noqa: E402
from test_nixl_ep import ALL, folder, join, started, world  # noqa: E402, F401

pytestmark = [pytest.mark.xdist_group("nixl_ep"), pytest.mark.timeout(300)]


def test_ranks_are_staged_while_the_others_go_on(world):  # noqa: F811
    """vLLM connects new ranks beside its calls, and lets them take part later. A new rank warms up
    alone meanwhile."""
    group, old = world(), [0, 1]
    started(group, old)
    group.start(2, 3)
    group.together(join(old, [2, 3], False))
    assert group.run(old, masks) == [[0, 0, 1, 1]] * 2
    assert group.run([2, 3], masks) == [[0] * ROOM] * 2
    group.run(old, steps, [1, 2, 3], old)
    for rank in (2, 3):
        group.run([rank], alone, [4])
    group.run(old, let_in, [2, 3])
    assert group.run(ALL, masks) == [[0] * ROOM] * ROOM
    group.run(ALL, steps, [5, 6], ALL)


def alone(here: Here, seeds: list[int]) -> None:
    """Calls with all other ranks masked."""
    others = [rank for rank in ALL if rank != here.rank]
    for rank in others:
        here.buffer.update_mask_buffer(rank, mask=True)
    assert masks(here) == [int(rank != here.rank) for rank in ALL]
    steps(here, seeds, [here.rank])
    let_in(here, others)


@pytest.mark.parametrize("world", ["emulated", "gpu"], indirect=True)
def test_graphs_go_on_with_ranks_that_were_staged(world):  # noqa: F811
    """vLLM 0.33 captures graphs on a new worker that is alone, keeps those of the old ones, and
    repeats both once the new one takes part, with no other call between."""
    group, old = world(), [0, 1]
    started(group, old)
    group.run(old, captures, old)
    group.run(old, replays, 5, old)
    group.start(2)
    group.together(join(old, [2], False))
    group.run([2], captures_alone)
    group.run(old, replays, 6, old)
    group.run(old, let_in, [2])
    for seed in (7, 8):
        group.run([0, 1, 2], replays, seed, [0, 1, 2])
    group.run(old, disconnected, [2])
    group.leave(2)
    group.run(old, replays, 9, old)


def captures(here: Here, there: list[int]) -> None:
    """Captures a dispatch and a combine."""
    from gpu_comers import Graph

    here.state = nixl_ep_ranks.Fixed(here), Graph(here.buffer.runtime)
    fixed, graph = here.state
    # Loads what a capture may not. An emulated GPU makes the captured calls, too.
    fixed.take(0, there)
    fixed.calls()
    here.settle()
    with graph.capture():
        fixed.calls()
    here.settle()


def captures_alone(here: Here) -> None:
    others = [rank for rank in ALL[:3] if rank != here.rank]
    for rank in others:
        here.buffer.update_mask_buffer(rank, mask=True)
    captures(here, [here.rank])
    let_in(here, others)


def replays(here: Here, seed: int, there: list[int]) -> None:
    """Repeats the captured calls with other tokens."""
    fixed, graph = here.state
    fixed.take(seed, there)
    graph.replay()
    here.settle()
    fixed.check()


def test_a_new_rank_waits_in_its_first_call_until_it_is_let_in(world):  # noqa: F811
    group, old = world(), [0, 1]
    started(group, old)
    group.start(2)
    group.together(join(old, [2], False))
    group.tell(2, step, 5, [0, 1, 2])
    group.run(old, steps, [1, 2, 3], old)
    group.run(old, let_in, [2])
    group.run(old, step, 5, [0, 1, 2])
    group.heard(2)


def test_staged_ranks_may_be_given_up(world):  # noqa: F811
    """The others disconnect them before they have taken part; new ones come in their place."""
    group, old = world(), [0, 1]
    started(group, old)
    for _ in range(2):
        group.start(2)
        group.together(join(old, [2], False))
        group.run(old, disconnected, [2])
        group.run([2], destroyed)
        group.leave(2)
    group.run(old, steps, [1, 2], old)
    assert group.run(old, masks) == [[0, 0, 1, 1]] * 2


def test_a_staged_buffer_may_be_dropped(world):  # noqa: F811
    group = world()
    started(group, [0])
    group.start(1)
    group.together(join([0], [1], False))
    group.run([1], dropped)
    group.run([0], disconnected, [1])
    group.run([0], steps, [1], [0])


def dropped(here: Here) -> None:
    """Drops the buffer without a word. Its thread ends."""
    [thread] = [one for one in threading.enumerate() if one.name == "nixl-ep-meeting"]
    here.buffer = None
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def destroyed(here: Here) -> None:
    """Destroys a buffer; calls say so."""
    here.buffer.destroy()
    assert here.buffer.runtime is None
    with pytest.raises(RuntimeError, match="has been destroyed"):
        here.buffer.connect_ranks([0])
    here.buffer.destroy()
