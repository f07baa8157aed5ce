"""The calls of the GPU tests on an emulated GPU: they check the arguments that Python passes to the
kernels on machines without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import as_deepep
import gpu_cases
import many_ranks
from thread_ranks import Rank, threads

pytestmark = [
    pytest.mark.xdist_group("emulated"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (shutil.which("cc") and shutil.which("c++")), reason="lacks a C++ compiler"
    ),
]

#: The first seed of the random cases, and the number of cases of each mode.
SEED, CASES = (
    int(os.environ.get(f"UCCL_EP_EMULATED_{name}", default))
    for name, default in [("SEED", "0"), ("CASES", "3")]
)


def serve(folder: str, pipe: Any) -> None:
    """The main loop of a process with the emulated GPU: it runs the functions that arrive."""
    import cases
    import emulated

    torch.set_num_threads(1)
    emulated.load(Path(folder))
    # All threads of a launch take turns on one thread of the host.
    cases.CHANNELS, cases.CHOICES, cases.EXPERTS = 6_000, 150, 24
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            function(*args)
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())


@pytest.fixture(scope="module")
def run() -> Any:
    """Calls a function in the process with the emulated GPU."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(folder, theirs), daemon=True)
        process.start()
        # Only the process has this end now, so its death closes the pipe.
        theirs.close()

        def answer(function: Callable[..., None], *args: Any) -> None:
            ours.send((function, args))
            assert ours.poll(200), "the process does not answer"
            why = ours.recv()
            assert not why, why

        yield answer
        ours.send(None)
        process.join(10)
        process.kill()


def prepared() -> None:
    """Prepares nothing: an emulated GPU needs no reserve."""


def in_threads(size: int, function: Callable[[Rank], Any], *args: Any) -> list[Any]:
    """Calls a function on ``size`` ranks."""
    return threads(size, lambda rank: function(rank, *args), prepared)


@pytest.mark.parametrize(
    "function", [gpu_cases.random_normal, gpu_cases.random_elastic, gpu_cases.few_tokens]
)
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_random_calls_equal_the_oracle(run: Any, function: Callable[..., None], seed: int) -> None:
    run(in_threads, 1 + (seed + 1) % 3, function, seed)


@pytest.mark.parametrize(
    "function",
    [
        gpu_cases.both_modes,
        gpu_cases.by_ranks,
        gpu_cases.two_combines,
        gpu_cases.counted_layout,
        gpu_cases.of_another_buffer,
    ],
)
def test_calls_of_one_buffer_go_well(run: Any, function: Callable[[Rank], None]) -> None:
    run(in_threads, 2, function)


def test_ranks_that_may_not_use_nvlink_go_by_the_host(run: Any) -> None:
    run(in_threads, 2, gpu_cases.via_host)


def in_fabric(domain: int) -> None:
    """Ranks with or without fabric handles: those of domain 0 have none."""
    import emulated

    emulated.DRIVER.fake_fabric(domain)
    try:
        in_threads(2, gpu_cases.in_fabric)
    finally:
        emulated.DRIVER.fake_fabric(0)


@pytest.mark.parametrize("domain", [0, 1])
def test_ranks_ask_for_fabric_handles(run: Any, domain: int) -> None:
    run(in_fabric, domain)


def test_an_elastic_buffer_tells_its_nodes(run: Any) -> None:
    run(gpu_cases.tells_its_nodes, in_threads)


def test_ranks_of_the_same_number_on_all_nodes_count_together(run: Any) -> None:
    run(gpu_cases.counts_by_scaleup_rank, in_threads)


def test_a_graph_takes_no_layout_made_before_it(run: Any) -> None:
    run(in_threads, 1, gpu_cases.not_in_graph)


@pytest.mark.parametrize("case", [gpu_cases.memory_ahead, gpu_cases.returned_to_autograd])
def test_memory_made_ahead_is_as_if_made_for_its_call(
    run: Any, case: Callable[[Rank], None]
) -> None:
    run(in_threads, 2, case)


def barriers(rank: Rank, ways: tuple[bool, ...]) -> None:
    """Barriers of all ranks; then one rank is missing, and the others wait for it once."""
    for via_host in ways:
        buffer = gpu_cases.buffer_of(
            rank, timeout=4, enable_shrink=True, allow_nvlink_for_low_latency_mode=not via_host
        )
        status = torch.zeros(rank.size(), dtype=torch.int32, device=buffer.device)
        for _ in range(12):
            buffer.clean_low_latency_buffer(8, 512, 4)
        if rank.rank() != 1:
            for _ in range(3):
                buffer.clean_low_latency_buffer(8, 512, 4)
        buffer.low_latency_query_mask_buffer(status)
        torch.cuda.current_stream().synchronize()
        buffer.check()
        # The missing rank masks none: the others came to all of its barriers.
        assert status.tolist() == [0, 0 if rank.rank() == 1 else 1, 0][: rank.size()]
        rank.allgather(b"")


def test_a_barrier_masks_a_late_rank(run: Any) -> None:
    run(in_threads, 3, barriers, (False, True))


@pytest.mark.parametrize("tokens", [[0, 0], [1, 1], [8, 8], [0, 1100], [8, 0, 130]])
def test_so_many_tokens_arrive_and_are_summed(run: Any, tokens: list[int]) -> None:
    run(in_threads, len(tokens), gpu_cases.few_and_many, tokens, 3, 8)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_of_changing_kinds_and_sizes_follow_each_other(run: Any, size: int) -> None:
    run(in_threads, size, gpu_cases.changing, size, [8, 40, 300], 12, 16)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_received_rows_may_be_a_view_of_the_buffer(run: Any, size: int) -> None:
    run(in_threads, size, gpu_cases.zero_copy_rows)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", [gpu_cases.estimates, gpu_cases.estimates_by_expert])
def test_an_estimate_of_the_received_rows_changes_nothing(
    run: Any, case: Callable[[Rank], None], size: int
) -> None:
    run(in_threads, size, case)


def test_a_dispatch_has_torch_compute_nothing(run: Any) -> None:
    run(in_threads, 2, gpu_cases.computes_nothing)


def test_calls_on_two_streams_wait_for_events(run: Any) -> None:
    run(in_threads, 2, gpu_cases.two_streams, prepared)


@pytest.mark.parametrize("case", [gpu_cases.asynchronous, gpu_cases.asynchronous_elastic])
def test_asynchronous_calls_are_on_a_stream_of_their_own(
    run: Any, case: Callable[..., None]
) -> None:
    run(in_threads, 2, case, prepared)


@pytest.mark.parametrize("size", [1, 2])
def test_calls_use_no_more_multiprocessors_than_set(run: Any, size: int) -> None:
    run(in_threads, size, gpu_cases.few_blocks)


@pytest.mark.parametrize("logfmt", [False, True])
def test_low_latency_mode_as_deepeps_suite_has_it(run: Any, logfmt: bool) -> None:
    run(in_threads, 2, as_deepep.few_tokens, "cuda", logfmt)


def test_low_latency_mode_shrinks_as_in_deepeps_suite(run: Any) -> None:
    run(in_threads, 4, as_deepep.shrinks, "cuda")


def test_normal_mode_as_deepeps_suite_has_it(run: Any) -> None:
    run(in_threads, 2, as_deepep.many_tokens, "cuda")


@pytest.mark.parametrize(("sync", "masked", "multiple"), as_deepep.SETTINGS)
def test_second_interface_as_deepeps_suite_has_it(
    run: Any, sync: bool, masked: float, multiple: bool
) -> None:
    run(in_threads, 2, as_deepep.second, "cuda", sync, masked, multiple)


def test_the_hint_has_room_for_the_tokens_of_programs(run: Any) -> None:
    run(in_threads, 2, gpu_cases.room_of_the_hint)


@pytest.mark.parametrize("via_host", [False, True])
@pytest.mark.parametrize("worst", [False, True])
def test_more_tokens_than_the_buffer_has_room_for_go_in_rounds(
    run: Any, worst: bool, via_host: bool
) -> None:
    run(in_threads, 3, gpu_cases.in_rounds, worst, via_host)


@pytest.mark.parametrize("tokens", [[1, 150], [40, 0, 97, 5]])
def test_any_number_of_tokens_of_each_rank_arrives(run: Any, tokens: list[int]) -> None:
    run(in_threads, len(tokens), gpu_cases.any_number_in_threads, tokens, 1 << 14, 256)


@pytest.mark.parametrize(("is_elastic", "via_host"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("worst", [False, True])
def test_all_ranks_fail_in_a_call_that_is_too_large(
    run: Any, is_elastic: bool, worst: bool, via_host: bool
) -> None:
    run(in_threads, 3, gpu_cases.too_many, is_elastic, worst, via_host)


def test_calls_go_on_without_a_rank_that_is_masked(run: Any) -> None:
    run(in_threads, 3, gpu_cases.masked)


@pytest.mark.parametrize("is_few", [False, True])
def test_a_rank_that_was_masked_takes_part_again(run: Any, is_few: bool) -> None:
    run(in_threads, 2, gpu_cases.let_in, is_few, [3])


@pytest.mark.parametrize("calls", [many_ranks.first_interface, many_ranks.second_interface])
def test_many_ranks_call_both_interfaces(run: Any, calls: Callable[[Rank, str], None]) -> None:
    run(in_threads, 66, calls, "cuda")


def test_a_late_rank_is_named(run: Any) -> None:
    run(gpu_cases.names_the_late, in_threads)


def test_wrong_calls_are_refused_with_reasons(run: Any) -> None:
    run(gpu_cases.is_refused_with_words, in_threads)


def test_a_signal_ends_the_wait_for_counts(run: Any) -> None:
    run(gpu_cases.stops, prepared)
