from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def world():
    """Processes of ranks, for all tests."""
    pytest.importorskip("torch")
    from world import World

    ranks = World()
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
def many():
    """More processes of ranks than most tests want."""
    pytest.importorskip("torch")
    from world import World

    ranks = World(16)
    yield ranks
    ranks.end()
