"""Low latency mode on a GPU, ranks in threads and in processes, compared with the oracle."""

from __future__ import annotations

import time
from typing import Any, Callable

import pytest

pytest.importorskip("torch")

import gpu_beside
import gpu_lost
import gpu_steps
import torch
from cases import Sizes
from few_tokens import FewTokens
from oracle.routing import Shape
from thread_ranks import Rank, reserve, threads
from world import World

pytestmark = [
    pytest.mark.xdist_group("gpu"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="lacks a GPU"),
]


def in_thread(rank: Rank, seed: int) -> None:
    few = FewTokens(rank, seed, comm=rank, device="cuda", timeout=20)
    few.two_at_a_time()
    few.buffer.check()


@pytest.mark.parametrize("seed", range(16))
def test_ranks_in_threads_of_one_gpu_equal_the_oracle(seed: int) -> None:
    threads(1 + seed % 3, lambda rank: in_thread(rank, seed))


def left_out(rank: Rank, seed: int, is_late: bool) -> None:
    timeout = 5 if is_late else 20
    few = FewTokens(rank, seed, comm=rank, device="cuda", timeout=timeout, enable_shrink=True)
    call, out = few.draw.call(few.sizes), few.draw.randrange(rank.size())
    if rank.rank() != out:
        if not is_late:
            few.buffer.low_latency_update_mask_buffer(out, True)
        few.without([out], call)
        few.without([out], call)
        few.buffer.check()
    # Windows have to exist until the other ranks have ended.
    rank.allgather(b"")


@pytest.mark.parametrize(
    ("seed", "is_late"), [(0, False), (1, False), (2, False), (3, True), (4, True)]
)
def test_calls_go_on_without_a_rank_that_is_masked_or_late(seed: int, is_late: bool) -> None:
    threads(2 + seed % 2, lambda rank: left_out(rank, 200 + seed, is_late))


def let_in(group: Any, seed: int, **keywords: Any) -> None:
    few = FewTokens(group, seed, device="cuda", timeout=20, **keywords)
    few.lets_in(few.draw.randrange(group.size()), range(1, 10))
    torch.cuda.synchronize()
    few.buffer.check()
    # Windows have to exist until the other ranks have ended.
    group.allgather(b"") if "comm" in keywords else torch.distributed.barrier(group)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_was_masked_takes_part_again(seed: int) -> None:
    threads(2 + seed % 2, lambda rank: let_in(rank, 500 + seed, comm=rank, enable_shrink=seed > 1))


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 1), (4, 2)])
def test_a_rank_of_another_process_that_was_masked_takes_part_again(
    world: Any, size: int, nodes: int
) -> None:
    world.run(size, let_in, 510 + size, nodes=nodes)


def in_process(group: Any, seed: int, sizes: Sizes | None = None) -> None:
    few = FewTokens(group, seed, sizes, device="cuda", timeout=40)
    few.two_at_a_time()
    torch.cuda.synchronize()
    few.buffer.check()
    torch.distributed.barrier(group)
    few.buffer.destroy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_in_processes_reach_the_windows_of_each_other(
    world: Any, size: int, seed: int
) -> None:
    world.run(size, in_process, 100 + seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_send_their_parts_of_sums(world: Any, size: int, seed: int) -> None:
    world.run(size, in_process, 400 + seed, Sizes(Shape(size, 24), hidden=7168, top_k=8, most=64))


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="lacks a second GPU")


@needs_two
def test_calls_go_on_beside_collectives_that_other_ranks_have_begun_first(world: Any) -> None:
    world.run(2, gpu_beside.beside_collectives, 20)


@needs_two
def test_calls_of_two_buffers_begin_in_any_order_where_both_have_room(world: Any) -> None:
    world.run(2, gpu_beside.in_different_order, 20)


@needs_two
def test_calls_run_on_a_part_of_a_gpu(world: Any) -> None:
    world.run(2, gpu_beside.on_half_of_a_gpu, 5)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_two_nodes_reach_each_other_by_the_host(world: Any, size: int) -> None:
    world.run(size, in_process, 300 + size, nodes=2)


#: Sizes of the calls in graphs.
TOKENS, TOP_K, EXPERTS, HIDDEN = 16, 4, 8, 512


def drawn(rank: int, size: int, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of each call, of varying numbers of tokens, and the counts of a rank's
    experts."""
    generator = torch.Generator().manual_seed(7)
    choices = torch.rand(size, calls, TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    coming = torch.randint(0, TOKENS + 1, (size, calls, 1, 1), generator=generator)
    choices[(torch.arange(TOKENS)[:, None] >= coming).expand_as(choices)] = -1
    local = torch.arange(EXPERTS // size) + rank * (EXPERTS // size)
    counts = (choices.transpose(0, 1).reshape(calls, -1)[:, :, None] == local).sum(1)
    return choices[rank].cuda(), counts.int().cuda()


class Repeated:
    """A dispatch and its combine; ``wrong`` counts the values that differ from the expected
    ones."""

    def __init__(self, buffer: Any, rank: int) -> None:
        self.buffer = buffer
        torch.manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
        self.choices = torch.full((TOKENS, TOP_K), -1, device="cuda")
        self.counts = torch.zeros(EXPERTS // buffer.group_size, dtype=torch.int32, device="cuda")
        # Sums with these weights are exact.
        self.weights = torch.tensor([0.5, 0.25, 1.0, 2.0], device="cuda").repeat(TOKENS, 1)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        # The first use loads the kernels of the comparison.
        self.compare(torch.zeros_like(self.x), self.counts)

    def call(self) -> None:
        """A dispatch and a combine, with the choices at the time they run."""
        rows, count, handle, _, hook = self.buffer.low_latency_dispatch(
            self.x, self.choices, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        hook()
        out, _, _ = self.buffer.low_latency_combine(rows, self.choices, self.weights, handle)
        self.compare(out, count)

    def compare(self, out: torch.Tensor, count: torch.Tensor) -> None:
        """Adds the number of wrong values."""
        factor = (self.weights * (self.choices >= 0)).sum(1, keepdim=True)
        wanted = (self.x.float() * factor).bfloat16()
        self.wrong += (out != wanted).sum() + (count != self.counts).sum()


class Overlapped(Repeated):
    """The same, asynchronous, with a product of matrices beside each call; and a call of normal
    mode for as many tokens, beside and behind them."""

    def __init__(self, buffer: Any, rank: int) -> None:
        self.square = torch.randn(1024, 1024, device="cuda")
        self.product = torch.empty_like(self.square)
        torch.mm(self.square, self.square, out=self.product)
        super().__init__(buffer, rank)
        with torch.cuda.stream(buffer.get_comm_stream()):
            reserve()

    def call(self) -> None:
        """Calls on the communication stream; the products are on the current one."""
        buffer = self.buffer
        rows, count, handle, dispatched, _ = buffer.low_latency_dispatch(
            self.x, self.choices, TOKENS, EXPERTS, use_fp8=False, async_finish=True
        )
        torch.mm(self.square, self.square, out=self.product)
        dispatched.current_stream_wait()
        rows = rows * 1
        before = buffer.capture()
        torch.mm(self.square, self.square, out=self.product)
        out, combined, _ = buffer.low_latency_combine(
            rows, self.choices, self.weights, handle, async_finish=True
        )
        _, _, per_expert, token_in_rank, counted = buffer.get_dispatch_layout(
            self.choices, EXPERTS, previous_event=before, async_finish=True
        )
        many, _, _, _, of_many, received = buffer.dispatch(
            self.x,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.choices,
            topk_weights=self.weights,
            num_worst_tokens=TOKENS * buffer.group_size,
            previous_event=counted,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        torch.mm(self.square, self.square, out=self.product)
        for event in (combined, received):
            event.current_stream_wait()
        self.compare(out, count)
        # This call is on the current stream.
        sums, _, _ = buffer.combine(many, of_many)
        copies = token_in_rank.sum(1, keepdim=True)
        self.wrong += (sums != (self.x.float() * copies).bfloat16()).sum()


def in_graph(
    group: Any,
    calls: int,
    meet: Callable[[], Any],
    kind: Callable[..., Repeated] = Repeated,
    **keywords: Any,
) -> None:
    from uccl.ep import Buffer

    rank, size = group.rank(), group.size()
    room = 2 * Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, size, EXPERTS)
    ends = (None, 0, room) if "comm" in keywords else (group, 0, room)
    buffer = Buffer(*ends, low_latency_mode=True, device="cuda", timeout=30, **keywords)
    choices, counts = drawn(rank, size, calls)
    repeated, graph = kind(buffer, rank), torch.cuda.CUDAGraph()
    for turn in range(size):
        meet()
        if turn == rank:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                repeated.call()
    # The capture has returned torch's cached memory.
    meet()
    reserve()
    meet()
    # One call precedes the graph, and one follows it.
    repeated.call()
    for number in range(calls):
        repeated.choices.copy_(choices[number])
        repeated.counts.copy_(counts[number])
        graph.replay()
    repeated.call()
    torch.cuda.current_stream().synchronize()
    buffer.check()
    assert repeated.wrong.item() == 0
    meet()
    del graph
    buffer.destroy()


@pytest.mark.parametrize("size", [1, 2])
def test_a_graph_of_ranks_in_threads_is_repeated_with_other_tokens(size: int) -> None:
    def run(rank: Rank) -> None:
        in_graph(rank, 1000, lambda: rank.allgather(b""), comm=rank)

    threads(size, run)


def graph_in_process(group: Any, kind: Callable[..., Repeated]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        in_graph(group, 100, lambda: torch.distributed.barrier(group), kind)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [Repeated, Overlapped])
def test_a_graph_of_ranks_in_processes_is_repeated_with_other_tokens(
    world: Any, size: int, kind: Callable[..., Repeated]
) -> None:
    world.run(size, graph_in_process, kind)


@needs_two
def test_a_call_runs_beside_a_product(world: Any) -> None:
    world.run(2, runs_beside)


def runs_beside(group: Any) -> None:
    """A call waits for a rank that begins it only when the other one's product, which was enqueued
    behind the call, has ended: so the current stream did not wait for the call."""
    from uccl.ep import Buffer

    room = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 2, EXPERTS)
    buffer = Buffer(group, 0, room, low_latency_mode=True, device="cuda", timeout=60)
    x = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16, device="cuda")
    choices = torch.arange(TOP_K, device="cuda").repeat(TOKENS, 1) * 2
    square = torch.randn(2048, 2048, device="cuda")
    product = torch.mm(square, square)

    def call() -> Any:
        return buffer.low_latency_dispatch(
            x, choices, TOKENS, EXPERTS, use_fp8=False, async_finish=True
        )

    # The first call loads the kernels.
    call()[3].current_stream_wait()
    torch.cuda.synchronize()
    torch.distributed.barrier(group)
    if group.rank() == 1:
        torch.distributed.barrier(group)
    rows, count, _, event, _ = call()
    if group.rank() == 0:
        torch.mm(square, square, out=product)
        torch.cuda.current_stream().synchronize()
        assert not event.event.event.query(), "the call waits for the other rank"
        torch.distributed.barrier(group)
    event.current_stream_wait()
    torch.cuda.synchronize()
    buffer.check()
    assert count.tolist() == [2 * TOKENS, 0] * 2
    assert bool((rows[0, : 2 * TOKENS] == 1).all())
    torch.distributed.barrier(group)
    buffer.destroy()


def waits_of(rank: Rank, tokens: int) -> list[list[int]]:
    from uccl.ep import Buffer

    buffer = Buffer(None, 0, 1 << 24, low_latency_mode=True, comm=rank, device="cuda", timeout=20)
    x = torch.ones((tokens, 256), dtype=torch.bfloat16, device="cuda")
    # Each token is sent to all experts.
    choices = torch.arange(8, device="cuda").repeat(tokens, 1)
    weights = torch.ones((tokens, 8), device="cuda")
    waits = torch.zeros((2, 2), dtype=torch.int64, device="cuda")
    if rank.rank() == 1:
        time.sleep(0.2)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(
        x, choices, tokens, 8, use_fp8=False, dispatch_wait_recv_cost_stats=waits[0]
    )
    rows = rows.clone()
    if rank.rank() == 1:
        torch.cuda.current_stream().synchronize()
        time.sleep(0.2)
    buffer.low_latency_combine(
        rows, choices, weights, handle, combine_wait_recv_cost_stats=waits[1]
    )
    said = waits.cpu().tolist()
    rank.allgather(b"")
    return said


# With more tokens, a rank waits for weights before it sends rows back.
@pytest.mark.parametrize("tokens", [4, 64])
def test_statistics_say_which_rank_was_waited_for(tokens: int) -> None:
    first = threads(2, lambda rank: waits_of(rank, tokens))[0]
    for own, late in first:
        assert own < 50_000_000 < late < 10_000_000_000, first


def alone(rank: Rank) -> str:
    from uccl.ep import Buffer

    buffer = Buffer(None, 0, 1 << 24, low_latency_mode=True, comm=rank, device="cuda", timeout=1)
    x = torch.zeros((4, 256), dtype=torch.bfloat16, device="cuda")
    choices = torch.arange(8, device="cuda").view(4, 2) % 4
    said = ""
    if rank.rank() == 0:
        buffer.low_latency_dispatch(x, choices, 4, 4, use_fp8=False)
        buffer.check()
        torch.cuda.current_stream().synchronize()
        with pytest.raises(TimeoutError) as raised:
            buffer.low_latency_dispatch(x, choices, 4, 4, use_fp8=False)
        said = str(raised.value)
        assert float((x + 1).sum()) == 1024, "the GPU stays usable"
    rank.allgather(b"")
    return said


def test_a_rank_that_does_not_come_is_named_by_the_next_call() -> None:
    started = time.monotonic()
    said = threads(2, alone)[0]
    assert "dispatch on rank 0" in said and "rank 1: data of call 1 round 0 expected" in said, said
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("when", gpu_lost.PHASES)
@pytest.mark.parametrize("masks", [False, True])
def test_a_rank_is_killed_and_the_others_name_it_or_go_on_without_it(
    when: str, masks: bool
) -> None:
    ranks = World(gpu_lost.RANKS)
    try:
        texts = ranks.run(gpu_lost.RANKS, gpu_lost.loses, when, masks, lost=(gpu_lost.LOST,))[
            : gpu_lost.LOST
        ]
    finally:
        ranks.end()
    if not masks:
        assert all(
            text.startswith(f"{gpu_lost.PHASES[when]} on rank {rank}")
            for rank, text in enumerate(texts)
        ), texts
        # The first rank to fail notifies the other.
        assert any(f"rank {gpu_lost.LOST} has ended" in text for text in texts), texts


def test_nothing_grows_with_random_calls() -> None:
    before, after = threads(2, gpu_steps.steps)[0]
    assert {name: after[name] for name in before if after[name] > before[name]} == {}, (
        before,
        after,
    )


def with_pool(rank: Rank) -> None:
    from uccl.ep import Buffer

    # Callers first clear the memory that calls then use.
    few = FewTokens(rank, 11, comm=rank, device="cuda", timeout=20)
    pool = few.buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert pool.device == few.buffer.device and pool.zero_().count_nonzero() == 0
    part = few.buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), offset=64)
    part.fill_(1)
    # Both bytes of a bf16 one are set.
    assert part.shape == (4, 8) and pool.count_nonzero() == 64
    torch.cuda.current_stream().synchronize()
    rank.allgather(b"")
    few.two_at_a_time()
    few.buffer.check()
    small = Buffer(None, 0, 1 << 12, low_latency_mode=True, comm=rank, device="cuda")
    tensor = small.get_local_buffer_tensor(torch.uint8)
    small.destroy()
    # The tensor keeps the memory.
    assert tensor.fill_(7).sum() == 7 * tensor.numel()


def test_a_tensor_of_the_pool_is_the_memory_of_calls() -> None:
    threads(1, with_pool)
