"""Ranks that are lost and come back: the errors of the others, and the same results afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import comers  # noqa: E402
from comers import RANKS, Comers, calls, connected, dies, disconnected, held, survives  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(300)]

ALL = list(range(RANKS))
#: The number of times that a rank is killed and comes back; a run by hand may have more.
ROUNDS = int(os.environ.get("UCCL_EP_COMERS", "10"))
on_nodes = pytest.mark.parametrize("nodes", [1, RANKS])


@pytest.fixture
def world() -> Iterator[Callable[..., Comers]]:
    made = []

    def make(**options: Any) -> Comers:
        made.append(Comers(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def joined(world: Comers) -> list[Any]:
    """Starts and connects all ranks; returns the results of some calls."""
    world.start(*ALL)
    world.connect()
    return world.run(ALL, calls, 7, 2)


def kills(group: Comers, when: str) -> None:
    """Kills rank 1 while all ranks make calls; the others continue without it."""
    group.tell(1, dies, when)
    for rank in (0, 2):
        group.tell(rank, survives, 40 if when == "anywhere" else 3)
    group.lose(1)
    assert [group.heard(rank) for rank in (0, 2)] == [[0, 1, 0]] * 2


def comes_again(world: Comers, rank: int, before: list[Any]) -> None:
    """Starts a rank anew and connects all; calls return the same as before."""
    world.start(rank)
    world.connect()
    assert world.run(ALL, calls, 7, 2) == before


@on_nodes
@pytest.mark.parametrize("when", ["before", "in dispatch", "between", "in combine", "anywhere"])
def test_a_rank_is_killed_and_the_others_go_on_and_it_comes_back(world, when, nodes):
    group = world(nodes=nodes, masks=True)
    before = joined(group)
    kills(group, when)
    without = group.run([0, 2], calls, 30, 2)
    # The results are the same without the memory of the lost rank.
    assert group.run([0, 2], disconnected, [1]) == [3, 3]
    assert group.run([0, 2], calls, 30, 2) == without
    comes_again(group, 1, before)


@on_nodes
def test_without_masks_every_rank_names_the_missing_one_and_all_go_on_when_it_comes_back(
    world, nodes
):
    group = world(nodes=nodes, timeout=4)
    before = joined(group)
    group.tell(1, dies, "between")
    for rank in (0, 2):
        group.tell(rank, calls, 1, 100)
    group.lose(1)
    texts = []
    for rank in (0, 2):
        well, text = group.outcome(rank)
        assert not well and (f" on rank {rank} " in text or f" on rank {rank}:" in text), text
        texts.append(text)
    # The first rank to fail notifies the other.
    assert any("rank 1" in text for text in texts), texts
    assert all("expected" in text for text in texts), texts
    comes_again(group, 1, before)


@on_nodes
def test_a_rank_that_was_stopped_is_replaced_and_harms_nobody_when_it_goes_on(world, nodes):
    group = world(nodes=nodes, masks=True, timeout=3)
    before = joined(group)
    process, pipe = group.stop(2)
    assert group.run([0, 1], survives, 2) == [[0, 0, 1]] * 2
    # This command waits for the old process, which runs it once it continues.
    pipe.send((calls, (7, 2)))
    group.start(2)
    for rank in (0, 1):
        group.tell(rank, connected, [2])
    group.tell(2, connected, [0, 1])
    assert [group.heard(rank) for rank in ALL] == [3, 3, 3]
    os.kill(process.pid, signal.SIGCONT)
    for _ in range(5):
        assert group.run(ALL, calls, 7, 2) == before
    assert pipe.poll(comers.LIMIT), "the old one does not end its calls"


def refused(buffer: Any, ranks: list[int]) -> list[str]:
    """The errors for handles of dispatches before ranks connected anew, in combines and in a
    dispatch with the handle."""
    x, experts, weights = comers.inputs(buffer, 1)
    rows, _, few, _, _ = buffer.low_latency_dispatch(
        x, experts, comers.TOKENS, comers.EXPERTS, use_fp8=False
    )
    per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(experts, comers.EXPERTS)
    *_, many, _ = buffer.dispatch(
        x, None, per_rank, None, token_in_rank, per_expert, experts, weights
    )
    # Handles stay valid when masks change.
    other = (buffer.rank + 1) % RANKS
    buffer.update_mask_buffer(other, True)
    buffer.clean_mask_buffer()
    buffer.low_latency_combine(rows, experts, weights, few)
    buffer.connect_ranks(ranks)
    texts = []
    for call in (
        lambda: buffer.low_latency_combine(rows, experts, weights, few),
        lambda: buffer.combine(rows.view(-1, comers.HIDDEN), many),
        lambda: buffer.dispatch(x, many),
    ):
        with pytest.raises(RuntimeError, match="dispatch again") as raised:
            call()
        texts.append(str(raised.value))
    return texts


def test_a_handle_of_an_earlier_generation_is_refused_with_both(world):
    group = world()
    joined(group)
    for texts in group.run(ALL, refused, ALL):
        assert all("of generation 2 " in text and "generation 3 " in text for text in texts), texts
    group.run(ALL, calls, 1)


def test_ranks_that_do_not_come_are_named(world):
    group = world(timeout=2)
    group.start(0, 2)
    for rank in (0, 2):
        group.tell(rank, connected, ALL)
    outcomes = [group.outcome(rank) for rank in (0, 2)]
    assert all(not well and "TimeoutError: join on rank" in text for well, text in outcomes), (
        outcomes
    )
    # The first rank that gives up is then missing, too.
    assert any("of ranks [0, 1, 2], 1 is missing" in text for _, text in outcomes), outcomes
    # The failed meeting leaves no obstacle for the next one.
    group.start(1)
    group.connect()
    group.run(ALL, calls, 1)


def later(buffer: Any, ranks: list[int]) -> list[list[int]]:
    """Connects ranks that take part from the second call on."""
    status = torch.zeros(RANKS, dtype=torch.int32)
    buffer.connect_ranks(ranks, activate=False)
    buffer.query_mask_buffer(status)
    calls(buffer, 3)
    buffer.clean_mask_buffer()
    return [status.tolist(), *calls(buffer, 7, 2)]


def test_ranks_may_be_connected_before_they_take_part(world):
    group = world()
    before = joined(group)
    assert group.run([0, 2], disconnected, [1]) == [3, 3]
    group.tell(1, dies, "before")
    group.lose(1)
    group.start(1)
    for rank in (0, 2):
        group.tell(rank, later, [1])
    group.tell(1, later, [0, 2])
    masks, made = zip(*[(first, rest) for first, *rest in map(group.heard, ALL)])
    assert list(masks) == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert list(made) == before


def wrong(buffer: Any) -> None:
    with pytest.raises(ValueError, match="no rank 3: the buffer was made for 3 ranks"):
        buffer.connect_ranks([3])
    with pytest.raises(ValueError, match="is this one"):
        buffer.disconnect_ranks([buffer.rank])
    with pytest.raises(ValueError, match="has not joined"):
        buffer.update_mask_buffer((buffer.rank + 1) % RANKS, False)


def test_impossible_meetings_are_refused(world):
    group = world()
    group.start(0)
    group.run([0], wrong)


def grew(then: dict[str, int], now: dict[str, int]) -> list[str]:
    """The resources that have increased. Pages vary by some MiB with allocators and torch."""
    kept = {"pages": 4096}
    return [
        f"{name}: {now[name]}, before {then[name]}"
        for name in then
        if now[name] > then[name] + kept.get(name, 0)
    ]


def stays_small(group: Comers, before: list[Any], rounds: int) -> None:
    """Kills a rank and lets it come back again and again; nothing grows after the fifth time."""
    early: list[Any] = []
    for turn in range(rounds):
        when = ["before", "in dispatch", "between", "in combine", "anywhere"][turn % 5]
        kills(group, when)
        comes_again(group, 1, before)
        # An emulated GPU gives memory back here.
        counts = group.run([0, 2], held)
        if turn == 4:
            early = [*counts, group.store.num_keys()]
    # On a busy machine the memory of earlier ranks is freed a while later.
    for _ in range(20):
        last = [*group.run([0, 2], held), group.store.num_keys()]
        grown = [more for then, now in zip(early[:2], last[:2]) for more in grew(then, now)]
        if not grown:
            break
    print(f"after 5 rounds {early}, after {rounds} {last}")
    assert not grown
    assert last[2] <= early[2], "keys of the store"


@on_nodes
def test_nothing_grows_when_ranks_come_and_go(world, nodes):
    group = world(nodes=nodes, masks=True)
    stays_small(group, joined(group), ROUNDS)
