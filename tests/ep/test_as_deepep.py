"""The calls of DeepEP's own suites, for ranks in threads with buffers on the CPU.
``test_emulated.py`` makes the same on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import as_deepep
import many_ranks
from thread_ranks import Rank, Ranks

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(120)]


def in_threads(size: int, function: Callable[..., None], *args: Any) -> None:
    """Calls a function on ``size`` ranks."""
    ranks = Ranks(size)

    def call(number: int) -> None:
        try:
            function(Rank(ranks, number), "cpu", *args)
        except BaseException:
            ranks.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(call, number) for number in range(size)]:
            done.result()


@pytest.mark.parametrize("logfmt", [False, True])
def test_low_latency_mode_in_all_formats(logfmt):
    in_threads(3, as_deepep.few_tokens, logfmt)


def test_low_latency_mode_shrinks():
    in_threads(4, as_deepep.shrinks)


def test_normal_mode_in_all_variants():
    in_threads(3, as_deepep.many_tokens)


@pytest.mark.parametrize(("sync", "masked", "multiple"), as_deepep.SETTINGS)
def test_second_interface_in_all_ways(sync, masked, multiple):
    in_threads(3, as_deepep.second, sync, masked, multiple)


@pytest.mark.parametrize("calls", [many_ranks.first_interface, many_ranks.second_interface])
def test_many_ranks_call_both_interfaces(calls):
    in_threads(72, calls)
