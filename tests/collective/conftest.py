from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# The ranks' processes are those of the tests of expert parallelism.
sys.path.insert(0, str(Path(__file__).parents[1] / "ep"))

#: The number of ranks of most tests.
RANKS = 3


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Runs a function on every rank, in processes that outlive a test."""
    pytest.importorskip("torch", reason="lacks torch")
    from world import World

    world = World(RANKS)

    def run(function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        return world.run(RANKS, function, *args, **how)

    yield run
    world.end()


@pytest.fixture
def mortal_ranks() -> Iterator[Any]:
    """Ranks of one test's own, which it may kill."""
    pytest.importorskip("torch", reason="lacks torch")
    from world import World

    world = World(RANKS)
    yield world
    world.end()
