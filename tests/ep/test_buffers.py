"""Errors of buffers, and calls with ranks that are late, lost, stopped or different."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases import answers

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]


#: Ranks that map each other's memory, and ranks with a network between some of them.
on_nodes = pytest.mark.parametrize("nodes", [1, 2])


def sizes(group) -> None:
    """One call with each of several sizes of real models."""
    from uccl.ep import Buffer

    for hidden, num_experts, top_k in [(3584, 384, 10), (8192, 64, 32), (7168, 288, 8)]:
        tokens, ranks = 3, group.size()
        size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, num_experts)
        buffer = Buffer(group, 0, size)
        torch.manual_seed(group.rank())
        x = torch.randn(tokens, hidden).bfloat16()
        experts = torch.rand(tokens, num_experts).topk(top_k).indices
        got, _, handle, _, _ = buffer.low_latency_dispatch(
            x, experts, tokens, num_experts, use_fp8=False
        )
        ones = torch.ones(tokens, top_k) / top_k
        out, _, _ = buffer.low_latency_combine(got, experts, ones, handle)
        torch.testing.assert_close(out, x, rtol=2e-2, atol=2e-2)


def test_sizes_that_users_have(world):
    world.run(2, sizes)


def in_place(group, with_hook: bool) -> None:
    """Combines of rows that the experts wrote to the buffer's own memory, many times; rows in other
    memory are refused."""
    from uccl.ep import Buffer

    hidden, tokens, num_experts, ranks = 512, 9, 4 * group.size(), group.size()
    buffer = Buffer(
        group, 0, Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, num_experts)
    )
    torch.manual_seed(group.rank())
    for call in range(12):
        x = torch.randint(-4, 5, (tokens, hidden)).bfloat16()
        experts = torch.rand(tokens, num_experts).topk(2).indices
        got, _, handle, _, _ = buffer.low_latency_dispatch(
            x, experts, tokens, num_experts, use_fp8=False
        )
        made = buffer.get_next_low_latency_combine_buffer(handle)
        made.copy_(got * (call + 1))
        out, _, hook = buffer.low_latency_combine(
            made, experts, torch.ones(tokens, 2), handle, zero_copy=True, return_recv_hook=with_hook
        )
        # Peers may still read this memory: the next call gets other memory, or waits for them.
        del made
        if hook is not None:
            hook()
        assert torch.equal(out, (x.float() * (call + 1) * 2).bfloat16()), call
    # Peers must have ended their reads when the buffer is destroyed.
    torch.distributed.barrier(group)
    with pytest.raises(ValueError, match="get_next_low_latency_combine_buffer"):
        other = torch.zeros_like(got)
        buffer.low_latency_combine(other, experts, torch.ones(tokens, 2), handle, zero_copy=True)


@on_nodes
@pytest.mark.parametrize("with_hook", [False, True])
def test_a_combine_in_place_equals_a_copied_one(world, with_hook, nodes):
    world.run(3, in_place, with_hook, nodes=nodes)


def left_out(group) -> None:
    """A combine without some of the dispatch's choices."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20)
    x, experts = torch.full((2, 512), 1.0 + group.rank()).bfloat16(), torch.tensor([[0, 2], [1, 3]])
    for dtype in (torch.int64, torch.int32):
        chosen = experts.to(dtype)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, chosen, 2, 4, use_fp8=False)
        chosen[0, 1] = -1
        out, _, _ = buffer.low_latency_combine(rows, chosen, torch.ones(2, 2), handle)
        assert torch.equal(out, x * torch.tensor([[1.0], [2.0]]).bfloat16()), out[:, 0]


@on_nodes
def test_a_choice_that_is_none_in_the_combine_is_left_out(world, nodes):
    world.run(2, left_out, nodes=nodes)


def refusals(group) -> list[str]:
    """The errors of wrong arguments."""
    from uccl.ep import Buffer, ElasticBuffer

    buffer = Buffer(group, 1 << 20, 0, unknown=False, other=None)
    x = torch.zeros(4, 512).bfloat16()
    experts = torch.zeros(4, 1, dtype=torch.int64)
    calls = [
        lambda: Buffer(group, 1 << 20, 0, use_magic=True),
        lambda: buffer.low_latency_dispatch(x, experts, 3, 4),
        lambda: buffer.low_latency_dispatch(x, experts + 9, 4, 4),
        lambda: buffer.low_latency_dispatch(
            x, experts, 4, 4, use_nvfp4=True, x_global_scale=torch.ones(2)
        ),
        lambda: buffer.low_latency_dispatch(
            x, experts, 4, 4, use_nvfp4=True, x_global_scale=torch.tensor(0.0)
        ),
        lambda: buffer.low_latency_dispatch(x, experts, 4, 4, x_global_scale=torch.tensor(1.0)),
        lambda: buffer.low_latency_dispatch(x.float(), experts, 4, 4),
        lambda: buffer.low_latency_dispatch(x, experts, 4, 4, use_ue8m0=True),
        lambda: buffer.low_latency_dispatch(
            x, experts, 4, 4, dispatch_wait_recv_cost_stats=torch.zeros(2, 2, dtype=torch.int64)
        ),
        lambda: buffer.dispatch(x, topk_idx=experts),
        lambda: ElasticBuffer(group),
        lambda: ElasticBuffer(group, num_bytes=1 << 20).engram_write,
        lambda: ElasticBuffer(group, num_bytes=4096).dispatch(
            x, topk_idx=experts, num_experts=4, num_max_tokens_per_rank=4096
        ),
    ]
    return answers(calls)


def test_refusals_name_value_and_limit(world):
    for texts in world.run(2, refusals):
        for text, words in zip(
            texts,
            ["use_magic", "room for 3", "expert 9 of 4"]
            + ["should have one element", "more than 0, not 0", "x_global_scale needs use_nvfp4"]
            + ["torch.float32", "round_scale"]
            + ["dispatch_wait_recv_cost_stats has the shape (2, 2)"]
            + ["num_tokens_per_expert", "num_bytes", "experimental", "bytes of the buffer"],
        ):
            assert words in text, texts


def late(group) -> str:
    """Rank 1 makes no call."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=0.5)
    x, experts = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    if group.rank() == 1:
        torch.distributed.barrier(group)
        return ""
    try:
        buffer.low_latency_dispatch(x, experts, 2, 6)
    except (TimeoutError, RuntimeError) as e:
        return str(e)
    finally:
        torch.distributed.barrier(group)
    return "nothing"


@on_nodes
def test_a_late_rank_is_named(world, nodes):
    texts = world.run(3, late, nodes=nodes)
    for rank in (0, 2):
        assert texts[rank].startswith(f"dispatch on rank {rank}"), texts
    assert any("rank 1: data of call 1 round 0 expected, nothing seen" in text for text in texts), (
        texts
    )


#: The sleep of rank 1 before each of its calls, in seconds.
SLEEP = 0.4


def waits(group, with_hook: bool, folder: str) -> list[list[int]]:
    """The wait statistics after a dispatch, a second one, and a combine; rank 1 sleeps before
    each."""
    from uccl.ep import Buffer

    rank, ranks = group.rank(), group.size()
    buffer = Buffer(group, 0, 1 << 20, low_latency_mode=True)
    x, experts = torch.ones(2, 512).bfloat16(), torch.tensor([[0, 1], [2, 5]])
    of_dispatch, of_combine = (torch.zeros(ranks, dtype=torch.int64) for _ in range(2))

    def called(number: int, call):
        """Rank 1 makes its call after the others have begun theirs, and after a sleep; they wait
        meanwhile."""
        if rank == 1:
            while not all(
                Path(folder, f"{number}.{peer}").exists() for peer in range(ranks) if peer != 1
            ):
                time.sleep(0.001)
            time.sleep(SLEEP)
        else:
            Path(folder, f"{number}.{rank}").touch()
        *returned, hook = call()
        if hook is not None:
            hook()
        return returned

    def dispatch():
        return buffer.low_latency_dispatch(
            x,
            experts,
            2,
            6,
            use_fp8=False,
            dispatch_wait_recv_cost_stats=of_dispatch,
            return_recv_hook=with_hook,
        )

    seen = []
    for number in range(2):
        rows, _, handle, _ = called(number, dispatch)
        seen.append(of_dispatch.tolist())

    def combine():
        weights = torch.ones(2, 2)
        return buffer.low_latency_combine(
            rows,
            experts,
            weights,
            handle,
            return_recv_hook=with_hook,
            combine_wait_recv_cost_stats=of_combine,
        )

    out, _ = called(2, combine)
    assert torch.equal(out, 2 * x)
    return [*seen, of_combine.tolist()]


@pytest.mark.parametrize("with_hook", [False, True])
def test_statistics_tell_which_rank_was_waited_for_and_how_long(world, tmp_path, with_hook):
    everyone = world.run(3, waits, with_hook, str(tmp_path))
    # A rank does not wait for its own data. The bound is low, because a scheduler may delay a rank
    # that waits for the late one.
    least = SLEEP / 4 * 1e9
    for rank in (0, 2):
        first, second, combined = everyone[rank]
        assert [first[rank], second[rank], combined[rank]] == [0, 0, 0], everyone
        assert first[1] > least and second[1] > first[1] + least and combined[1] > least, everyone
    for times in everyone[1]:
        assert times[1] == 0 and max(times) < least, everyone


def late_hook(group) -> list[int]:
    """The wait statistics of a rank that calls its hook when all data has arrived."""
    from uccl.ep import Buffer

    stats = torch.zeros(group.size(), dtype=torch.int64)
    buffer = Buffer(group, 0, 1 << 20, low_latency_mode=True)
    x, experts = torch.ones(2, 512).bfloat16(), torch.tensor([[0, 1], [2, 5]])
    *_, hook = buffer.low_latency_dispatch(
        x, experts, 2, 6, dispatch_wait_recv_cost_stats=stats, return_recv_hook=True
    )
    torch.distributed.barrier(group)
    hook()
    return stats.tolist()


def test_data_that_was_there_before_the_hook_was_not_waited_for(world):
    assert world.run(3, late_hook) == [[0, 0, 0]] * 3


def different(group) -> str:
    """Ranks with dispatches of different formats."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=5)
    x, experts = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    try:
        buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=group.rank() == 1)
    except RuntimeError as e:
        return str(e)
    return "nothing"


@on_nodes
def test_errors_name_the_difference_of_ranks(world, nodes):
    texts = world.run(2, different, nodes=nodes)
    words = [
        "rank 1 has bytes of payload 512, this rank 1024",
        "rank 0 has bytes of payload 1024, this rank 512",
    ]
    assert any(text.endswith(of) for text, of in zip(texts, words)), texts
    assert all(text.endswith(of) or "gave up" in text for text, of in zip(texts, words)), texts


def killed(group) -> str:
    """Rank 1 dies in the middle of a call."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=40)
    x, experts = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    if group.rank() == 1:
        # If the hook were dropped, the rank would give up on the call.
        *_, hook = buffer.low_latency_dispatch(
            x, experts, 2, 6, use_fp8=False, return_recv_hook=True
        )
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=False)
        buffer.low_latency_combine(got, experts, torch.ones(2, 1), handle)
    except RuntimeError as e:
        return str(e)
    return "nothing"


@on_nodes
def test_a_rank_that_dies_is_seen(nodes):
    from world import World

    # A world of its own: the processes that remain are of no use to other tests.
    world = World()
    try:
        texts = world.run(3, killed, nodes=3 if nodes > 1 else 1, lost=(1,))
    finally:
        world.end()
    # Between hosts, the end of a process shows as a lost connection.
    ends = "rank 1 has ended" if nodes == 1 else "lost "
    assert any("rank 1 " in str(text) and ends in str(text) for text in texts), texts
    assert all(ends in text or "gave up" in text for text in (texts[0], texts[2])), texts
    assert any("expected" in str(text) for text in texts), texts


def stopped(group, timeout: float, pause: float) -> list[str]:
    """Rank 0 stops rank 1 for a while, in each turn a little later."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=timeout)
    x, experts = (
        torch.full((4, 512), 3.0).bfloat16(),
        torch.tensor([[0, 2], [1, 4], [3, 5], [2, 3]]),
    )
    pids = [0] * group.size()
    torch.distributed.all_gather_object(pids, os.getpid(), group)
    ends = []
    for delay in (0.0, 0.0005, 0.002, 0.01):
        torch.distributed.barrier(group)
        halt = threading.Timer(delay, os.kill, (pids[1], signal.SIGSTOP))
        go_on = threading.Timer(delay + pause, os.kill, (pids[1], signal.SIGCONT))
        timers = [halt, go_on] if group.rank() == 0 else []
        for timer in timers:
            timer.start()
        try:
            for _ in range(20):
                got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 4, 6, use_fp8=False)
                out, _, _ = buffer.low_latency_combine(
                    got, experts, torch.full((4, 2), 0.5), handle
                )
                assert torch.equal(out, x), out
        except (TimeoutError, RuntimeError) as e:
            ends.append(str(e))
            break
        finally:
            for timer in timers:
                timer.join()
    torch.distributed.barrier(group)
    return ends


@on_nodes
def test_a_rank_that_is_stopped_for_less_than_the_deadline_is_waited_for(world, nodes):
    assert world.run(3, stopped, 10.0, 0.2, nodes=nodes) == [[], [], []]


@on_nodes
def test_a_rank_that_is_stopped_for_longer_is_named_and_gets_the_reason(world, nodes):
    texts = world.run(3, stopped, 0.5, 2.0, nodes=nodes)
    assert all(len(of_rank) == 1 for of_rank in texts), texts
    assert any("rank 1: " in texts[rank][0] for rank in (0, 2)), texts
    # With several nodes, the others may have ended the connection meanwhile.
    assert "gave up" in texts[1][0] or (nodes > 1 and "lost " in texts[1][0]), texts


def rounds(group) -> list[tuple[int, ...]]:
    """Makes, uses and destroys buffers, some with failed calls. Returns the descriptors, mappings
    and threads after 20 and after 100."""
    from uccl.ep import Buffer

    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        memories = sum("memfd:" in line for line in maps.splitlines())
        return len(os.listdir("/proc/self/fd")), memories, len(os.listdir("/proc/self/task"))

    def kept() -> tuple[int, ...]:
        """The least of several counts within a second: a leak shows in all of them, while resources
        that a peer's end frees disappear a moment later."""
        looks = []
        for _ in range(20):
            looks.append(held())
            time.sleep(0.05)
        return tuple(map(min, zip(*looks)))

    x, experts = torch.zeros(2, 512).bfloat16(), torch.tensor([[0, 2], [1, 3]])
    counts = []
    for n in range(100):
        buffer = Buffer(group, 0, 1 << 20, timeout=5, explicitly_destroy=True)
        fails = n % 10 == 9
        try:
            buffer.low_latency_dispatch(x, experts, 2, 4, use_fp8=fails and group.rank() == 1)
            assert not fails
        except RuntimeError as e:
            assert fails, e
        buffer.destroy()
        if n in (19, 99):
            torch.distributed.barrier(group)
            counts.append(kept())
    return counts


@on_nodes
def test_nothing_grows_over_a_hundred_rounds(world, nodes):
    for early, last in world.run(2, rounds, nodes=nodes):
        # Resources of an earlier test may have been freed meanwhile, so the count may fall.
        assert all(now <= then for then, now in zip(early, last)), (early, last)


def masked(group) -> list[int]:
    """Rank 1 misses the calls, and the others mask it."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, enable_shrink=True, timeout=0.5)
    status = torch.zeros(3, dtype=torch.int32)
    if group.rank() != 1:
        x = torch.full((2, 512), 1.0).bfloat16()
        experts = torch.tensor([[0, 2], [1, 4]])
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(got, experts, torch.ones(2, 2), handle)
        # Experts 2 and 3 belong to rank 1.
        assert out[:, 0].tolist() == [1.0, 2.0]
        buffer.low_latency_query_mask_buffer(status)
    torch.distributed.barrier(group)
    return status.tolist()


@on_nodes
def test_late_ranks_are_masked_where_that_was_asked_for(world, nodes):
    assert world.run(3, masked, nodes=nodes) == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def two_alive(group) -> None:
    """Two batches in flight: hooks and combines are in another order than dispatches."""
    from uccl.ep import Buffer

    ranks, hidden, most = group.size(), 512, 8
    size = Buffer.get_low_latency_rdma_size_hint(most, hidden, ranks, ranks * 2)
    buffer = Buffer(group, 0, size)
    for turn in range(20):
        torch.manual_seed(turn * 10 + group.rank())
        batches = []
        for _ in range(2):
            x = torch.randint(-3, 4, (most, hidden)).bfloat16()
            experts = torch.rand(most, ranks * 2).topk(2).indices
            got, _, handle, _, hook = buffer.low_latency_dispatch(
                x, experts, most, ranks * 2, use_fp8=False, return_recv_hook=True
            )
            batches.append((x, experts, got, handle, hook))
        combines = []
        for x, experts, got, handle, hook in reversed(batches):
            hook()
        for x, experts, got, handle, _ in batches:
            out, _, hook = buffer.low_latency_combine(
                got, experts, torch.ones(most, 2), handle, return_recv_hook=True
            )
            combines.append((x, out, hook))
        for x, out, hook in reversed(combines):
            hook()
            assert torch.equal(out, x * 2)


@on_nodes
def test_two_batches_at_a_time(world, nodes):
    world.run(3, two_alive, nodes=nodes)


def full(group, hinted_for_nodes: bool) -> tuple[int, int]:
    """The number of nodes over which a full call is relayed, and the hint that is the buffer's
    size."""
    from uccl.ep import ElasticBuffer

    tokens, hidden, top_k, ranks = 1024, 2048, 8, group.size()
    size = ElasticBuffer.get_buffer_size_hint(
        group, tokens, hidden, top_k, allow_hybrid_mode=hinted_for_nodes
    )
    buffer = ElasticBuffer(group, size, num_max_tokens_per_rank=tokens, num_cpu_timeout_secs=15)
    x = torch.full((tokens, hidden), float(group.rank()), dtype=torch.bfloat16)
    chosen = torch.arange(top_k).expand(tokens, top_k).contiguous()
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=chosen, num_experts=top_k)
    assert rows.view(ranks, tokens, hidden)[:, 0, 0].tolist() == list(range(ranks))
    combined, _, _ = buffer.combine(rows, handle)
    assert (combined == ranks * x).all()
    state: Any = handle.state
    return state.native.relays, size


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (4, 2), (4, 4)])
def test_a_buffer_of_the_hinted_size_relays_full_calls(world, ranks, nodes):
    relays = nodes if nodes < ranks else 1
    (seen, size), *others = world.run(ranks, full, True, nodes=nodes)
    assert others == [(seen, size)] * (ranks - 1) and seen == relays
    (seen, flat), *_ = world.run(ranks, full, False, nodes=nodes)
    assert seen == 1 and (flat < size) == (relays > 1)


def domains(group) -> tuple[tuple[int, int], ...]:
    """The nodes of a group as the module reports them, and then as its buffer does."""
    from uccl.ep import ElasticBuffer, get_logical_domain_size, get_physical_domain_size

    buffer = ElasticBuffer(group, 1 << 20, num_cpu_timeout_secs=15)
    return (
        get_physical_domain_size(group),
        get_logical_domain_size(group, True),
        get_logical_domain_size(group, False),
        buffer.get_physical_domain_size(),
    )


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (4, 1), (4, 2), (3, 2)])
def test_a_group_tells_its_nodes_before_there_is_a_buffer(world, ranks, nodes):
    spread = (nodes, ranks // nodes) if ranks % nodes == 0 else (1, ranks)
    assert world.run(ranks, domains, nodes=nodes) == [(spread, spread, (1, ranks), spread)] * ranks


def test_plans_of_several_nodes_are_no_larger_than_deepeps(monkeypatch):
    from uccl.ep import ElasticBuffer, _elastic

    # Bytes that DeepEP 2.1 reserves in hybrid mode for bf16, H = 7168, K = 8: 14464 and 14400 for a
    # token.
    for nodes, ranks in [(2, 2), (2, 8), (8, 2), (4, 8)]:
        monkeypatch.setattr(
            _elastic, "get_physical_domain_size", lambda group, spread=(nodes, ranks): spread
        )
        for tokens in (1, 128, 4096, 8192):
            dispatch = (nodes * ranks * tokens + tokens + nodes * (tokens + 1280)) * 14464
            rows = min(ranks, 8) * nodes * tokens + min(nodes, 8) * tokens + nodes * (tokens + 1280)
            theirs = -(-max(dispatch, rows * 14400) // (2 << 20)) * (2 << 20)
            assert ElasticBuffer.get_buffer_size_hint(None, tokens, 7168, 8) <= theirs, (
                nodes,
                ranks,
                tokens,
            )


def test_plans_are_no_larger_than_deepeps():
    from uccl.ep import Buffer, ElasticBuffer

    class Group:
        def __init__(self, ranks: int) -> None:
            self.size = lambda: ranks

    # Bytes that DeepEP 2.1 reserves for bf16, H = 7168, K = 8: the larger of ranks * T * 14464 and
    # min(ranks, 8) * T * 14400.
    for ranks in (2, 4, 8, 16):
        for tokens in (1, 128, 4096, 8192):
            theirs = max(ranks * tokens * 14464, min(ranks, 8) * tokens * 14400)
            theirs = -(-theirs // (2 << 20)) * (2 << 20)
            assert ElasticBuffer.get_buffer_size_hint(Group(ranks), tokens, 7168, 8) <= theirs
    # DeepEP's low latency mode reserves 1,908,410,496 bytes.
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) < 0.6 * 1_908_410_496
    # The additional bytes for relays, with DeepEP's nodes of eight.
    config = Buffer.get_dispatch_config(16)
    both = [
        config.get_nvl_buffer_size_hint(2 * 7168, 16),
        config.get_rdma_buffer_size_hint(2 * 7168, 16),
    ]
    assert 0 < both[1] < both[0] / 15
    assert config.get_rdma_buffer_size_hint(2 * 7168, 8) == 0


def test_a_hint_has_room_for_as_many_tokens_as_the_environment_says(monkeypatch):
    from uccl.ep import Config

    hints = []
    for said in ("2048", "4096"):
        monkeypatch.setenv("UCCL_EP_TOKENS_AT_ONCE", said)
        hints.append(Config().get_nvl_buffer_size_hint(2 * 7168, 8))
    assert 1.9 * hints[0] < hints[1] < 2 * hints[0]
    monkeypatch.delenv("UCCL_EP_TOKENS_AT_ONCE")
    # The default is 2048. On GPUs a buffer of this size has room for twice as many in one call.
    assert Config().get_nvl_buffer_size_hint(2 * 7168, 8) == hints[0]
    monkeypatch.setenv("UCCL_EP_TOKENS_AT_ONCE", "many")
    with pytest.raises(
        ValueError, match="UCCL_EP_TOKENS_AT_ONCE is a number of tokens, more than 0, not 'many'"
    ):
        Config().get_nvl_buffer_size_hint(2 * 7168, 8)


def test_a_buffer_for_a_gpu_that_is_not_there_is_refused(monkeypatch):
    from uccl.ep import Buffer, ElasticBuffer

    class Alone:
        Get_rank, Get_size = (lambda self: 0), (lambda self: 1)

        def allgather(self, mine):
            return [mine]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in (Buffer, ElasticBuffer):
        with pytest.raises(
            RuntimeError, match="the buffer's device is cuda:1, and torch finds no GPU"
        ):
            make(None, 1 << 20, comm=Alone(), device=1)
        with pytest.raises(ValueError, match="a GPU of CUDA or the CPU, not meta"):
            make(None, 1 << 20, comm=Alone(), device="meta")
        monkeypatch.setenv("UCCL_EP_DEVICE", "cuda")
        with pytest.raises(RuntimeError, match="torch finds no GPU"):
            make(None, 1 << 20, comm=Alone())
        monkeypatch.setenv("UCCL_EP_DEVICE", "cpu")
        make(None, 1 << 20, comm=Alone()).destroy()
