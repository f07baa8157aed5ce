"""Normal mode on a GPU, ranks in threads and in processes, compared with the oracles."""

from __future__ import annotations

from typing import Any, Callable

import pytest

pytest.importorskip("torch")

import gpu_cases
import torch
from elastic_calls import elastic_calls
from gpu_cases import TOKENS, Exact, buffer_of
from many_tokens import many_tokens
from thread_ranks import Rank, reserve, threads

pytestmark = [
    pytest.mark.xdist_group("gpu"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="lacks a GPU"),
]


@pytest.mark.parametrize("seed", range(12))
def test_many_tokens_of_ranks_in_threads_arrive_and_are_summed_as_the_oracle_says(
    seed: int,
) -> None:
    threads(1 + seed % 3, lambda rank: gpu_cases.random_normal(rank, 300 + seed))


@pytest.mark.parametrize("seed", range(12))
def test_the_second_interface_of_ranks_in_threads_equals_the_oracle(seed: int) -> None:
    threads(1 + seed % 3, lambda rank: gpu_cases.random_elastic(rank, 400 + seed))


def in_process(group: Any, function: Callable[..., None], seed: int) -> None:
    function(group, seed, device="cuda")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", [many_tokens, elastic_calls])
def test_ranks_in_processes_do_as_well(
    world: Any, function: Callable[..., None], size: int, seed: int
) -> None:
    world.run(size, in_process, function, 500 + seed)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        gpu_cases.both_modes,
        gpu_cases.by_ranks,
        gpu_cases.via_host,
        gpu_cases.in_fabric,
        gpu_cases.two_combines,
        gpu_cases.counted_layout,
        gpu_cases.of_another_buffer,
        gpu_cases.zero_copy_rows,
        gpu_cases.memory_ahead,
        gpu_cases.returned_to_autograd,
    ],
)
def test_calls_of_one_buffer_go_well(case: Callable[[Rank], None], size: int) -> None:
    threads(size, case)


def test_a_graph_takes_no_layout_made_before_it() -> None:
    threads(1, gpu_cases.not_in_graph)


#: Blocks of a launch: one block sends and receives, or one of each, or several of each.
NUM_SMS = [1, 2, 3, 24]


@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("tokens", [0, 1, 8, 128, 1024, 1025, 2049, 5000])
def test_so_many_tokens_arrive_and_are_summed(tokens: int, num_sms: int) -> None:
    threads(2, lambda rank: gpu_cases.few_and_many(rank, [tokens, tokens], num_sms, hidden=2048))


@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("tokens", [[0, 3000], [8, 0, 1500]])
def test_ranks_without_tokens_take_those_of_others(tokens: list[int], num_sms: int) -> None:
    threads(len(tokens), lambda rank: gpu_cases.few_and_many(rank, tokens, num_sms, hidden=512))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_of_changing_kinds_and_sizes_follow_each_other(size: int) -> None:
    threads(
        size,
        lambda rank: gpu_cases.changing(
            rank, 600 + size, [8, 128, 1500, 4000], turns=50, hidden=256
        ),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", [gpu_cases.estimates, gpu_cases.estimates_by_expert])
def test_an_estimate_of_the_received_rows_changes_nothing(
    case: Callable[[Rank], None], size: int
) -> None:
    threads(size, case)


def test_a_dispatch_has_torch_compute_nothing() -> None:
    threads(2, gpu_cases.computes_nothing)


@pytest.mark.parametrize("size", [1, 2])
def test_calls_on_two_streams_wait_for_events(size: int) -> None:
    threads(size, lambda rank: gpu_cases.two_streams(rank, reserve))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [gpu_cases.asynchronous, gpu_cases.asynchronous_elastic])
def test_asynchronous_calls_are_on_a_stream_of_their_own(
    case: Callable[..., None], size: int
) -> None:
    threads(size, lambda rank: case(rank, reserve))


@pytest.mark.parametrize("size", [1, 2])
def test_calls_use_no_more_multiprocessors_than_set(size: int) -> None:
    threads(size, gpu_cases.few_blocks)


def test_calls_go_on_without_a_rank_that_is_masked() -> None:
    threads(3, gpu_cases.masked)


def test_a_rank_that_was_masked_takes_part_again() -> None:
    threads(3, lambda rank: gpu_cases.let_in(rank, False, range(1, 10)))


def test_a_late_rank_is_named() -> None:
    gpu_cases.names_the_late(threads)


def test_wrong_calls_are_refused_with_reasons() -> None:
    gpu_cases.is_refused_with_words(threads)


def test_a_signal_ends_the_wait_for_counts() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu_cases.stops(reserve)


def in_graph(rank: Rank, is_small: bool) -> None:
    """A graph repeats a dispatch with rows for the worst case, and its combine, with other
    tokens. In a small buffer they take several rounds."""
    from uccl.ep import Buffer

    small: dict[str, Any] = {"comm": rank, "device": "cuda", "timeout": 20}
    buffer = Buffer(None, rank.size() * 5000, **small) if is_small else buffer_of(rank)
    exact = Exact(rank, buffer)
    worst, graph = TOKENS * rank.size(), torch.cuda.CUDAGraph()
    x, wrong = exact.given[0], torch.zeros((), dtype=torch.int64, device="cuda")
    copies = exact.copies.cuda()

    def compare(out: torch.Tensor) -> None:
        wrong.add_((out != (x.float() * copies).bfloat16()).sum())

    for turn in range(rank.size()):
        rank.allgather(b"")
        if turn == rank.rank():
            # Kernels are loaded before the capture, and before any kernel waits.
            compare(x.add_(1))
            x.sub_(1)
            wrong.zero_()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                compare(exact.normal(num_worst_tokens=worst))
    rank.allgather(b"")
    # The capture has returned torch's cached memory.
    reserve()
    rank.allgather(b"")
    compare(exact.normal(num_worst_tokens=worst))
    for _ in range(200):
        x.add_(1)
        graph.replay()
    compare(exact.normal(num_worst_tokens=worst))
    torch.cuda.current_stream().synchronize()
    exact.buffer.check()
    assert wrong.item() == 0
    rank.allgather(b"")
    del graph


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_graph_repeats_calls_with_rows_for_the_worst_case(size: int, is_small: bool) -> None:
    threads(size, lambda rank: in_graph(rank, is_small))


def counted_in_graph(rank: Rank) -> None:
    exact = Exact(rank, buffer_of(rank))
    with pytest.raises(RuntimeError, match="a graph does not wait for counts"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            exact.normal()


def test_a_graph_refuses_to_wait_for_counts() -> None:
    threads(1, counted_in_graph)


@pytest.mark.parametrize("via_host", [False, True])
@pytest.mark.parametrize("worst", [False, True])
def test_more_tokens_than_the_buffer_has_room_for_go_in_rounds(worst: bool, via_host: bool) -> None:
    threads(3, lambda rank: gpu_cases.in_rounds(rank, worst, via_host))


def number_in_process(group: Any, tokens: list[int]) -> None:
    gpu_cases.any_number(group, tokens, 1 << 26, 512, device="cuda")


@pytest.mark.parametrize(
    "tokens",
    [[1, 65_536], [65_536, 65_536], [30_000, 0], [65_536, 40_000, 0, 7], [16_384] * 4],
)
def test_any_number_of_tokens_of_each_rank_arrives(world: Any, tokens: list[int]) -> None:
    world.run(len(tokens), number_in_process, tokens)


@pytest.mark.parametrize(("is_elastic", "via_host"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("worst", [False, True])
def test_all_ranks_fail_in_a_call_that_is_too_large(
    is_elastic: bool, worst: bool, via_host: bool
) -> None:
    threads(3, lambda rank: gpu_cases.too_many(rank, is_elastic, worst, via_host))
