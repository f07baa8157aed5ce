"""The model of examples/moe: it learns and writes the same with its experts spread over ranks as with all of them on each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe"


def trained(group):
    sys.path.insert(0, str(EXAMPLE))
    import train

    outcome = train.run(group, steps=3, length=train.GIVEN + 6)
    return outcome.losses, outcome.is_same, outcome.off, train.TOLERANCE


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_model_learns_the_same_with_its_experts_on_several_ranks(world, ranks: int, nodes: int) -> None:
    for losses, is_same, off, tolerance in world.run(ranks, trained, nodes=nodes):
        for step, (spread, whole) in enumerate(losses):
            assert abs(spread - whole) <= tolerance, f"step {step}: {losses}"
        assert losses[-1][0] < losses[0][0] - 0.5, losses
        assert is_same and off <= tolerance, off


@pytest.mark.timeout(120)
def test_the_program_trains_in_processes_that_it_starts() -> None:
    command = [sys.executable, EXAMPLE / "train.py", "--ranks", "2", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "step   2: loss" in done.stdout and "goes on" in done.stdout, done.stdout
