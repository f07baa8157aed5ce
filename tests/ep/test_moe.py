"""The model of examples/moe: it learns and writes the same with its experts spread over ranks as
with all of them on each rank."""

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
def test_a_model_learns_the_same_with_its_experts_on_several_ranks(
    world, ranks: int, nodes: int
) -> None:
    for losses, is_same, off, tolerance in world.run(ranks, trained, nodes=nodes):
        for step, (spread, whole) in enumerate(losses):
            assert abs(spread - whole) <= tolerance, f"step {step}: {losses}"
        assert losses[-1][0] < losses[0][0] - 0.5, losses
        assert is_same and off <= tolerance, off


def passed(group, tokens: list[int], most: int):
    """Compares results and gradients of spread experts with those of whole ones. The ranks have
    ``tokens`` tokens, with choices below ``most``."""
    sys.path.insert(0, str(EXAMPLE))
    import alone
    import model
    import parallel

    def results(mixture, experts):
        rank = group.rank()
        torch.manual_seed(1 + rank)
        x = torch.randn(tokens[rank], model.HIDDEN, dtype=torch.double, requires_grad=True)
        weights, choices = torch.rand(tokens[rank], most, dtype=torch.double).topk(model.TOP_K)
        out = mixture(x, choices, weights.requires_grad_(), experts)
        out.square().sum().backward()
        return out.detach(), x.grad, weights.grad

    torch.manual_seed(0)
    whole, spread = model.Experts().double(), model.Experts().double()
    spread.load_state_dict(whole.state_dict())
    local = model.EXPERTS // group.size()
    spread.keep(group.rank() * local, local)
    many = parallel.ManyTokens(group, model.HIDDEN, model.EXPERTS, "cpu")
    pairs = zip(results(many, spread), results(alone.ManyTokens(group.size(), 1), whole))
    return [torch.equal(*pair) for pair in pairs], [
        float(weights.grad.abs().sum()) for weights in spread.parameters()
    ]


@pytest.mark.parametrize(("tokens", "most"), [([5, 0], 8), ([5, 3], 4), ([0, 0], 8)])
def test_gradients_pass_where_a_rank_has_no_token_or_gets_none(
    world, tokens: list[int], most: int
) -> None:
    for rank, (are_equal, gradients) in enumerate(world.run(2, passed, tokens, most)):
        assert all(are_equal), (rank, are_equal)
        gets_some = sum(tokens) > 0 and (rank == 0 or most > 4)
        assert all((gradient > 0) == gets_some for gradient in gradients), (rank, gradients)


@pytest.mark.timeout(120)
def test_the_program_trains_in_processes_that_it_starts() -> None:
    command = [sys.executable, str(EXAMPLE / "train.py"), "--ranks", "2", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "step   2: loss" in done.stdout and "goes on" in done.stdout, done.stdout
