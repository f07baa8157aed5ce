from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import Engine, start


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes processes, each with an engine."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(start(**settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(params=["one host", "tcp"])
def pair(engines: Callable[..., Engine], request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Two processes with an engine each, on each kind of path."""
    env = {"MC_FORCE_TCP": "1"} if request.param == "tcp" else {}
    first, second = engines(env=env), engines(env=env)
    for engine in (first, second):
        assert engine.call("initialize") == 0
    return first, second
