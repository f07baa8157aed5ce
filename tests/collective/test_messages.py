"""``uccl.collective``: messages between ranks, beside the file of UCCL's own wheel on the same script."""

from __future__ import annotations

from typing import Any, Callable

import pytest

pytest.importorskip("torch", reason="lacks torch")

import calls
import wheel_file

Ranks = Callable[..., list[Any]]


@pytest.fixture(params=["uccl", "wheel"])
def name(request: pytest.FixtureRequest, base_port: int) -> str:
    """This project's module, and the wheel's with ports of its own."""
    if request.param == "uccl":
        return request.param
    wheel_file.fetch()
    return f"wheel:{base_port}"


@pytest.mark.parametrize("call", [calls.order, calls.ring, calls.gathered])
def test_a_script_of_the_wheel(ranks: Ranks, name: str, call: Any) -> None:
    ranks(call, name)


def test_errors_have_the_kinds_that_the_wheel_has(ranks: Ranks, base_port: int) -> None:
    wheel_file.fetch()
    theirs = ranks(calls.errors, f"wheel:{base_port}")
    assert ranks(calls.errors, "uccl") == theirs


def test_memory_for_other_hosts_is_registered(ranks: Ranks) -> None:
    ranks(calls.other_hosts)


def test_both_forms_of_the_arguments(ranks: Ranks) -> None:
    ranks(calls.forms)
