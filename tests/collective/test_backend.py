"""The backend ``uccl`` of ``torch.distributed``, beside gloo."""

from __future__ import annotations

from typing import Any, Callable

import pytest

pytest.importorskip("torch", reason="lacks torch")

import backend

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    "call",
    [backend.copies, backend.splits, backend.messages, backend.shapes, backend.subgroups],
)
def test_calls_of_torch(ranks: Ranks, call: Any) -> None:
    ranks(call)


def test_reductions_are_made_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    found = ranks(backend.reductions)
    assert all(one == found[0] for one in found), "the same bits on every rank"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["between calls", "in a call", "not its call"])
def test_ranks_go_on_without_one_that_died(mortal_ranks: Any, way: str) -> None:
    found = mortal_ranks.run(3, backend.loses_a_rank, way, lost=(1,))
    assert found == [([0.0, 2.0], 2.0), None, ([0.0, 2.0], 2.0)]
