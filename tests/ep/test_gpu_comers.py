"""Ranks with GPUs that are lost and come back, on GPUs and on an emulated one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import gpu_comers  # noqa: E402
from comers import Comers, calls, dies, disconnected, survives  # noqa: E402
from gpu_comers import captures, captures_half, eager, refused, replays, replays_half  # noqa: E402
from test_comers import ALL, ROUNDS, comes_again, joined, kills, stays_small  # noqa: E402

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(600)]

WHEN = ["before", "in dispatch", "between", "in combine", "anywhere"]
by_ways = pytest.mark.parametrize("via_host", [False, True])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """The parts of the emulated GPU, compiled once."""
    import emulated

    made: Path = tmp_path_factory.mktemp("emulated")
    emulated.compiled(made)
    return made


@pytest.fixture(params=["emulated", "gpu"])
def world(request: Any) -> Iterator[Callable[..., Comers]]:
    made: list[Comers] = []
    options: dict[str, Any] = {"device": "cuda"}
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("lacks a GPU")
    elif torch.cuda.is_available():
        pytest.skip("torch's streams are those of the GPU that is there")
    elif not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("lacks a C++ compiler")
    else:
        options["emulated"] = str(request.getfixturevalue("folder"))

    def make(**given: Any) -> Comers:
        made.append(Comers(**options, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


@by_ways
@pytest.mark.parametrize("when", WHEN)
def test_a_rank_is_killed_and_the_others_go_on_and_it_comes_back(world, when, via_host):
    group = world(masks=True, via_host=via_host)
    before = joined(group)
    kills(group, when)
    without = group.run([0, 2], calls, 30, 2)
    # The results are the same without the memory of the lost rank.
    assert group.run([0, 2], disconnected, [1]) == [3, 3]
    assert group.run([0, 2], calls, 30, 2) == without
    for text in group.run([0, 2], refused):
        assert "rank 1 has not joined" in text
    comes_again(group, 1, before)


def test_without_masks_a_failed_group_is_sound_again_when_the_lost_rank_comes_back(world):
    group = world()
    before = joined(group)
    group.tell(1, dies, "between")
    for rank in (0, 2):
        group.tell(rank, calls, 1, 100)
    group.lose(1)
    for rank in (0, 2):
        well, text = group.outcome(rank)
        assert not well and f" on rank {rank}" in text and "rank 1" in text, text
    comes_again(group, 1, before)


@by_ways
@pytest.mark.parametrize("masks", [True, False])
def test_a_graph_goes_on_with_the_ranks_that_are_there(world, masks, via_host):
    group = world(masks=masks, via_host=via_host)
    joined(group)
    wanted = group.run(ALL, eager, 50)
    group.run(ALL, captures)
    assert group.run(ALL, replays, 50) == wanted
    group.tell(1, dies, "before")
    group.lose(1)
    if masks:
        lost = group.run([0, 2], replays, 60)
        assert lost == group.run([0, 2], eager, 60)
    assert group.run([0, 2], disconnected, [1]) == [3, 3]
    assert group.run([0, 2], replays, 60) == group.run([0, 2], eager, 60)
    group.start(1)
    group.connect()
    assert group.run(ALL, replays, 50) == wanted


def test_a_graph_with_a_combine_of_an_earlier_dispatch_fails_and_says_so(world):
    group = world()
    before = joined(group)
    group.run(ALL, captures_half)
    group.connect()
    texts = group.run(ALL, replays_half)
    assert any("dispatch again" in text for text in texts), texts
    group.connect()
    assert group.run(ALL, calls, 7, 2) == before


def test_handles_of_an_earlier_generation_are_refused(world):
    group = world()
    joined(group)
    for texts in group.run(ALL, gpu_comers.of_before, ALL):
        assert all("of generation 2 " in text and "generation 3 " in text for text in texts), texts
    group.run(ALL, calls, 1)


def test_a_tensor_of_the_earlier_pool_stays(world):
    group = world()
    joined(group)
    group.run(ALL, gpu_comers.keeps_its_pool, ALL)
    group.run(ALL, calls, 1)


def test_nothing_grows_when_ranks_come_and_go(world):
    group = world(masks=True)
    stays_small(group, joined(group), ROUNDS)


def test_a_dead_rank_is_noticed_long_before_the_deadline(world):
    # A call waits for a rank longer than this test may take.
    group = world(masks=True, timeout=2000)
    joined(group)
    group.tell(1, dies, "before")
    for rank in (0, 2):
        group.tell(rank, survives, 3)
    group.lose(1)
    assert [group.heard(rank) for rank in (0, 2)] == [[0, 1, 0]] * 2
