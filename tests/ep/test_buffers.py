"""Random calls of both interfaces, compared with the reference, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import reference as ref  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]


class Case:
    """The inputs of all ranks, which follow from a seed."""

    def __init__(self, seed: int, ranks: int, hidden: int) -> None:
        dice = random.Random(seed)
        torch.manual_seed(seed)
        self.ranks, self.hidden = ranks, hidden
        self.local = dice.choice([1, 3, 8, 11])
        self.num_experts = ranks * self.local
        self.top_k = dice.randint(1, min(32, self.num_experts))
        self.most = dice.choice([1, 7, 40])
        # Zero tokens on some ranks, or on all.
        self.tokens = [dice.choice([0, self.most, dice.randint(0, self.most)]) for _ in range(ranks)]
        scale = dice.choice([0.05, 1.0, 300.0])
        self.x = [(torch.randn(n, hidden) * scale).bfloat16() for n in self.tokens]
        self.weights = [torch.rand(n, self.top_k) for n in self.tokens]
        none = dice.choice([0.0, 0.3, 1.0]) if dice.random() < 0.5 else 0.1
        self.experts = [self._choices(n, none) for n in self.tokens]
        self.alignment = dice.choice([1, 4, 16])
        self.bias = [torch.randn(n, hidden).bfloat16() for n in self.tokens]

    def _choices(self, tokens: int, none: float):
        chosen = torch.rand(tokens, self.num_experts).topk(self.top_k).indices
        return torch.where(torch.rand(chosen.shape) < none, -1, chosen)

    def made(self, rank: int, token: int, expert: int):
        """What an expert makes of a token: another row for each."""
        return (self.x[rank][token].float() * (1 + expert % 5 / 4)).bfloat16()

    def rows_at(self, me: int):
        """What arrives at a rank, and its row of the source."""
        return ref.sent(self.experts, self.num_experts, me)


def equal(have, want, what: str) -> None:
    """Bit for bit; NaN is not expected anywhere."""
    assert have.shape == want.shape and have.dtype == want.dtype, (what, have.shape, want.shape)
    packed = [torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1).view(torch.uint8) for t in (have, want)]
    assert torch.equal(*packed), (what, have, want)


def low_latency(group, seeds: list[int], hidden: int) -> None:
    """Dispatch in each format, and combine, plain, packed and with hooks."""
    from uccl.ep import Buffer

    me, ranks = group.rank(), group.size()
    most = max(Case(seed, ranks, hidden).most for seed in seeds)
    hint = max(
        Buffer.get_low_latency_rdma_size_hint(case.most, hidden, ranks, case.num_experts)
        for case in (Case(seed, ranks, hidden) for seed in seeds)
    )
    assert most
    buffer = Buffer(group, 0, hint, low_latency_mode=True)
    for seed in seeds:
        case = Case(seed, ranks, hidden)
        mine, weights = case.experts[me], case.weights[me]
        rows_of = ref.by_expert(case.experts, case.num_experts, me)
        for kind in (None, "exact", "power", "exponent"):
            stats = torch.zeros(case.local, dtype=torch.int32)
            with_hook = seed % 2 == 0
            got, count, handle, event, hook = buffer.low_latency_dispatch(
                case.x[me],
                mine,
                case.most,
                case.num_experts,
                cumulative_local_expert_recv_stats=stats,
                use_fp8=kind is not None,
                round_scale=kind in ("power", "exponent"),
                use_ue8m0=kind == "exponent",
                async_finish=not with_hook,
                return_recv_hook=with_hook,
            )
            if hook is not None:
                hook()
            assert (event.event is None) == with_hook
            assert count.tolist() == [len(rows) for rows in rows_of] == stats.tolist()
            src_info, layout_range = handle[:2]
            for expert, rows in enumerate(rows_of):
                have = src_info[expert, : len(rows)].tolist()
                assert have == [token for _, token, _ in rows], f"seed {seed}"
                begin = 0
                for rank in range(ranks):
                    number = sum(row[0] == rank for row in rows)
                    assert layout_range[expert, rank].item() == begin << 32 | number
                    begin += number
                if not rows:
                    continue
                want = torch.stack([case.x[rank][token] for rank, token, _ in rows])
                if kind is None:
                    equal(got[expert, : len(rows)], want, f"seed {seed}")
                    continue
                payload, scales = ref.quantise(want, kind)
                equal(got[0][expert, : len(rows)], payload, kind)
                equal(got[1][expert, : len(rows)], scales, f"{kind} scales, seed {seed}")
            # NaN in all that is no row: nothing of it may be read.
            made = torch.full((case.local, ranks * case.most, hidden), float("nan")).bfloat16()
            for expert, rows in enumerate(rows_of):
                for row, (rank, token, _) in enumerate(rows):
                    made[expert, row] = case.made(rank, token, me * case.local + expert)
            packed = kind == "power"
            out, _, hook = buffer.low_latency_combine(
                made, mine, weights, handle, use_logfmt=packed, return_recv_hook=with_hook
            )
            if hook is not None:
                hook()
            back = {
                (token, k): case.made(me, token, expert)
                for token, row in enumerate(mine.tolist())
                for k, expert in enumerate(row)
                if expert >= 0
            }
            if packed:
                back = {key: ref.log_format(row[None])[0] for key, row in back.items()}
            equal(out, ref.combine_weighted(back, mine, weights, hidden), f"seed {seed} {kind}")


def normal(group, seeds: list[int], hidden: int) -> None:
    """Dispatch with and without worst-case rows, cached, with little room; combine with weights and biases."""
    from uccl.ep import Buffer

    me, ranks = group.rank(), group.size()
    for seed in seeds:
        case = Case(seed, ranks, hidden)
        # A few tokens at once: the others go in rounds.
        buffer = Buffer(group, ranks * 40_000, 0)
        layout = buffer.get_dispatch_layout(case.experts[me], case.num_experts)
        per_rank, _, per_expert, goes, _ = layout
        arrives = [ref.sent(case.experts, case.num_experts, rank) for rank in range(ranks)]
        assert per_rank.tolist() == [sum(rank == me for rank, _ in rows) for rows in arrives]
        assert goes.sum(0).tolist() == per_rank.tolist()
        assert per_expert.sum().item() == (case.experts[me] >= 0).sum().item()
        rows = arrives[me]
        choices = [case.experts[rank][token] for rank, token in rows]
        for worst in (0, sum(case.tokens) + 3):
            x = (case.x[me], case.x[me][:, : hidden // 128].float())
            got, idx, weights, counts, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=goes,
                num_tokens_per_expert=per_expert,
                topk_idx=case.experts[me],
                topk_weights=case.weights[me],
                expert_alignment=case.alignment,
                num_worst_tokens=worst,
            )
            assert len(got[0]) == (worst or len(rows))
            local = [[e - me * case.local if e // case.local == me else -1 for e in row.tolist()] for row in choices]
            assert idx[: len(rows)].tolist() == local
            assert (idx[len(rows) :] == -1).all()
            for at, (rank, token) in enumerate(rows):
                equal(got[0][at], case.x[rank][token], f"seed {seed}")
                equal(got[1][at], case.x[rank][token, : hidden // 128].float(), "scales")
                want = torch.where(idx[at] >= 0, case.weights[rank][token], 0.0)
                equal(weights[at], want, "weights")
            if worst:
                assert counts == []
            else:
                real = [len(of) for of in ref.by_expert(case.experts, case.num_experts, me)]
                assert counts == [-(-count // case.alignment) * case.alignment for count in real]
            again, *_, event = buffer.dispatch(case.x[me], handle=handle)
            equal(again, torch.stack([case.x[r][t] for r, t in rows]) if rows else again, "cached")
            made = torch.full((len(rows) + 2, hidden), float("nan")).bfloat16()
            for at, (rank, token) in enumerate(rows):
                made[at] = case.made(rank, token, me)
            grads = torch.rand(len(rows) + 2, case.top_k)
            biases = (case.bias[me], case.x[me])
            out, out_weights, _ = buffer.combine(made, handle, topk_weights=grads, bias=biases)
            for token, row in enumerate(case.experts[me].tolist()):
                at = sorted({ref.owner(e, case.num_experts, ranks) for e in row if e >= 0})
                terms = [case.made(me, token, rank) for rank in at]
                want = ref.in_order(terms, [biases[0][token], biases[1][token]], hidden)
                equal(out[token], want, f"seed {seed} token {token}")
            assert out_weights.shape == case.weights[me].shape


def elastic(group, seeds: list[int], hidden: int) -> None:
    """Rows by token and by expert, counted and not, again with a handle; combine in each order of rounding."""
    from uccl.ep import ElasticBuffer

    me, ranks = group.rank(), group.size()
    for seed in seeds:
        case = Case(seed, ranks, hidden)
        rows = case.rows_at(me)
        of_experts = ref.by_expert(case.experts, case.num_experts, me)
        aligned = [-(-len(of) // case.alignment) * case.alignment for of in of_experts]
        for several in (True, False):
            buffer = ElasticBuffer(
                group,
                num_max_tokens_per_rank=case.most,
                hidden=hidden,
                num_topk=case.top_k,
                allow_multiple_reduction=several,
                num_cpu_timeout_secs=15,
            )
            for expand in (True, False):
                packs = case.x[me][:, :8].contiguous().view(torch.int32)
                got, idx, weights, handle, event = buffer.dispatch(
                    (case.x[me], packs),
                    topk_idx=case.experts[me],
                    topk_weights=case.weights[me],
                    num_experts=case.num_experts,
                    expert_alignment=case.alignment,
                    do_expand=expand,
                    do_cpu_sync=several,
                    do_zero_padding=expand,
                    use_tma_aligned_col_major_sf=expand,
                )
                assert handle.num_recv_tokens_per_expert_list == (aligned if several else [])
                real = [len(of) for of in of_experts]
                assert handle.num_unaligned_recv_tokens_per_expert.tolist() == real
                assert handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == len(rows)
                made = torch.full((len(got[0]), hidden), float("nan")).bfloat16()
                if expand:
                    start, filled = 0, []
                    for expert, of in enumerate(of_experts):
                        filled.extend(range(start, start + len(of)))
                        for at, (rank, token, k) in enumerate(of, start):
                            equal(got[0][at], case.x[rank][token], f"seed {seed}")
                            equal(got[1][at], case.x[rank][token, :8].contiguous().view(torch.int32), "packs")
                            assert weights[at] == case.weights[rank][token, k]
                            made[at] = case.made(rank, token, me * case.local + expert)
                        assert not got[0][start + len(of) : start + aligned[expert]].any()
                        assert handle.psum_num_recv_tokens_per_expert[expert].item() == start + len(of)
                        start += aligned[expert]
                else:
                    assert (idx[len(rows) :] == -1).all()
                    for at, (rank, token) in enumerate(rows):
                        equal(got[0][at], case.x[rank][token], f"seed {seed}")
                        equal(weights[at], case.weights[rank][token], "weights")
                        made[at] = case.made(rank, token, me)
                        assert handle.recv_src_metadata[at, 0].item() == rank * case.most + token
                given = weights if several or not expand else None
                out, out_weights, _ = buffer.combine(made, handle, topk_weights=given, bias=case.bias[me])
                want_weights = torch.where(case.experts[me] >= 0, case.weights[me], 0.0)
                if given is not None:
                    equal(out_weights, want_weights, f"weights, seed {seed} expand {expand}")
                for token, row in enumerate(case.experts[me].tolist()):
                    terms = elastic_terms(case, me, token, row, expand, several)
                    want = ref.in_order(terms, [case.bias[me][token]], hidden)
                    equal(out[token], want, f"seed {seed} token {token} {expand} {several}")
                again, _, _, same, _ = buffer.dispatch((case.x[me], packs), handle=handle)
                assert same is handle
                if expand:
                    equal(again[0][filled], got[0][filled], "the same rows again")


def elastic_terms(case: Case, me: int, token: int, row: list[int], expand: bool, several: bool):
    """A token's terms, in the order of the last choice of each rank; or choice by choice."""
    if expand and not several:
        return [case.made(me, token, e) for e in row if e >= 0]
    last = {ref.owner(e, case.num_experts, case.ranks): k for k, e in enumerate(row) if e >= 0}
    terms = []
    for rank in sorted(last, key=last.__getitem__):
        if not expand:
            terms.append(case.made(me, token, rank))
            continue
        own = [e for e in row if e >= 0 and ref.owner(e, case.num_experts, case.ranks) == rank]
        terms.append(ref.in_order([case.made(me, token, e) for e in own], [], case.hidden))
    return terms


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("what", [low_latency, normal, elastic])
def test_calls_are_what_the_reference_says(world, what, ranks):
    first = ranks * 1000
    world.run(ranks, what, list(range(first, first + 12)), 512)


def sizes(group) -> None:
    """Sizes that users have: one call each."""
    from uccl.ep import Buffer

    for hidden, num_experts, top_k in [(3584, 384, 10), (8192, 64, 32), (7168, 288, 8)]:
        tokens, ranks = 3, group.size()
        size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, num_experts)
        buffer = Buffer(group, 0, size)
        torch.manual_seed(group.rank())
        x = torch.randn(tokens, hidden).bfloat16()
        experts = torch.rand(tokens, num_experts).topk(top_k).indices
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, tokens, num_experts, use_fp8=False)
        ones = torch.ones(tokens, top_k) / top_k
        out, _, _ = buffer.low_latency_combine(got, experts, ones, handle)
        torch.testing.assert_close(out, x, rtol=2e-2, atol=2e-2)


def test_sizes_that_users_have(world):
    world.run(2, sizes)


def in_place(group, with_hook: bool) -> None:
    """Combines of what experts wrote to the buffer's own memory, again and again; and one of other memory is refused."""
    from uccl.ep import Buffer

    hidden, tokens, num_experts, ranks = 512, 9, 4 * group.size(), group.size()
    buffer = Buffer(group, 0, Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, num_experts))
    torch.manual_seed(group.rank())
    for call in range(12):
        x = torch.randint(-4, 5, (tokens, hidden)).bfloat16()
        experts = torch.rand(tokens, num_experts).topk(2).indices
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, tokens, num_experts, use_fp8=False)
        made = buffer.get_next_low_latency_combine_buffer(handle)
        made.copy_(got * (call + 1))
        out, _, hook = buffer.low_latency_combine(
            made, experts, torch.ones(tokens, 2), handle, zero_copy=True, return_recv_hook=with_hook
        )
        # Peers may read it yet: the next call's is another one, or waits for their end.
        del made
        if hook is not None:
            hook()
        assert torch.equal(out, (x.float() * (call + 1) * 2).bfloat16()), call
    with pytest.raises(ValueError, match="get_next_low_latency_combine_buffer"):
        other = torch.zeros_like(got)
        buffer.low_latency_combine(other, experts, torch.ones(tokens, 2), handle, zero_copy=True)


@pytest.mark.parametrize("with_hook", [False, True])
def test_a_combine_in_place_is_what_a_copied_one_is(world, with_hook):
    world.run(3, in_place, with_hook)


def refusals(group) -> list[str]:
    """What wrong arguments are answered with."""
    from uccl.ep import Buffer, ElasticBuffer

    buffer = Buffer(group, 1 << 20, 0, unknown=False, other=None)
    x = torch.zeros(4, 512).bfloat16()
    experts = torch.zeros(4, 1, dtype=torch.int64)
    calls = [
        lambda: Buffer(group, 1 << 20, 0, use_magic=True),
        lambda: buffer.low_latency_dispatch(x, experts, 3, 4),
        lambda: buffer.low_latency_dispatch(x, experts + 9, 4, 4),
        lambda: buffer.low_latency_dispatch(x, experts, 4, 4, use_nvfp4=True),
        lambda: buffer.low_latency_dispatch(x.float(), experts, 4, 4),
        lambda: buffer.low_latency_dispatch(x, experts, 4, 4, use_ue8m0=True),
        lambda: buffer.dispatch(x, topk_idx=experts),
        lambda: ElasticBuffer(group),
        lambda: ElasticBuffer(group, num_bytes=1 << 20).engram_write,
        lambda: ElasticBuffer(group, num_bytes=4096).dispatch(
            x, topk_idx=experts, num_experts=4, num_max_tokens_per_rank=4096
        ),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except Exception as e:
            texts.append(f"{type(e).__name__}: {e}")
        else:
            texts.append("nothing")
    return texts


def test_refusals_name_value_and_limit(world):
    for texts in world.run(2, refusals):
        for text, words in zip(
            texts,
            ["use_magic", "room for 3", "expert 9 of 4", "use_nvfp4", "torch.float32", "round_scale"]
            + ["num_tokens_per_expert", "num_bytes", "experimental", "bytes of the buffer"],
        ):
            assert words in text, texts


def late(group) -> str:
    """Rank 1 does not come."""
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


def test_a_rank_that_does_not_come_is_named(world):
    texts = world.run(3, late)
    for rank in (0, 2):
        assert texts[rank].startswith(f"dispatch on rank {rank}"), texts
    assert any("rank 1: data of call 1 round 0 expected, nothing seen" in text for text in texts), texts


def different(group) -> str:
    """Ranks that do not dispatch alike."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=5)
    x, experts = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    try:
        buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=group.rank() == 1)
    except RuntimeError as e:
        return str(e)
    return "nothing"


def test_ranks_that_differ_are_told_in_what(world):
    texts = world.run(2, different)
    words = ["rank 1 has bytes of payload 512, this rank 1024", "rank 0 has bytes of payload 1024, this rank 512"]
    assert any(text.endswith(of) for text, of in zip(texts, words)), texts
    assert all(text.endswith(of) or "gave up" in text for text, of in zip(texts, words)), texts


def killed(group) -> str:
    """Rank 1 dies in the middle of a call."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=40)
    x, experts = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    if group.rank() == 1:
        buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=False, return_recv_hook=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=False)
        buffer.low_latency_combine(got, experts, torch.ones(2, 1), handle)
    except RuntimeError as e:
        return str(e)
    return "nothing"


def test_a_rank_that_dies_is_seen():
    from world import World

    # Of its own: what is left of it is of no use.
    world = World()
    try:
        texts = world.run(3, killed, lost=(1,))
    finally:
        world.end()
    assert any("rank 1 has ended" in str(text) for text in texts), texts
    assert all("rank 1 has ended" in text or "gave up" in text for text in (texts[0], texts[2])), texts


def stopped(group, timeout: float, pause: float) -> list[str]:
    """Rank 0 stops rank 1 for a while, each time a little later in a call."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=timeout)
    x, experts = torch.full((4, 512), 3.0).bfloat16(), torch.tensor([[0, 2], [1, 4], [3, 5], [2, 3]])
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
                out, _, _ = buffer.low_latency_combine(got, experts, torch.full((4, 2), 0.5), handle)
                assert torch.equal(out, x), out
        except (TimeoutError, RuntimeError) as e:
            ends.append(str(e))
            break
        finally:
            for timer in timers:
                timer.join()
    torch.distributed.barrier(group)
    return ends


def test_a_rank_that_is_stopped_for_less_than_the_deadline_is_waited_for(world):
    assert world.run(3, stopped, 10.0, 0.2) == [[], [], []]


def test_a_rank_that_is_stopped_for_longer_is_named_and_told(world):
    texts = world.run(3, stopped, 0.5, 2.0)
    assert all(len(of_rank) == 1 for of_rank in texts), texts
    assert any("rank 1: " in texts[rank][0] for rank in (0, 2)), texts
    assert "gave up" in texts[1][0], texts


def rounds(group) -> list[tuple[int, int, int]]:
    """Makes, uses and destroys buffers, some in vain; the descriptors, mappings and threads after 20 and after 100."""
    from uccl.ep import Buffer

    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        memories = sum("memfd:" in line for line in maps.splitlines())
        return len(os.listdir("/proc/self/fd")), memories, len(os.listdir("/proc/self/task"))

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
            counts.append(held())
    return counts


def test_nothing_grows_over_a_hundred_rounds(world):
    for early, last in world.run(2, rounds):
        assert early == last


def masked(group) -> list[int]:
    """Rank 1 does not come, and the others go on without it; later it takes part again."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, enable_shrink=True, timeout=0.5)
    status = torch.zeros(3, dtype=torch.int32)
    if group.rank() != 1:
        x = torch.full((2, 512), 1.0).bfloat16()
        experts = torch.tensor([[0, 2], [1, 4]])
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 2, 6, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(got, experts, torch.ones(2, 2), handle)
        # Experts 2 and 3 are rank 1's.
        assert out[:, 0].tolist() == [1.0, 2.0]
        buffer.low_latency_query_mask_buffer(status)
    torch.distributed.barrier(group)
    return status.tolist()


def test_late_ranks_are_masked_where_that_was_asked_for(world):
    assert world.run(3, masked) == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def two_alive(group) -> None:
    """Two batches at a time: hooks and combines in another order than dispatches."""
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


def test_two_batches_at_a_time(world):
    world.run(3, two_alive)


def test_plans_are_no_larger_than_deepeps():
    from uccl.ep import Buffer, ElasticBuffer

    class Group:
        def __init__(self, ranks: int) -> None:
            self.size = lambda: ranks

    # Bytes that DeepEP 2.1 reserves for bf16, H = 7168, K = 8: the larger of ranks * T * 14464 and min(ranks, 8) * T * 14400.
    for ranks in (2, 4, 8, 16):
        for tokens in (1, 128, 4096, 8192):
            theirs = max(ranks * tokens * 14464, min(ranks, 8) * tokens * 14400)
            theirs = -(-theirs // (2 << 20)) * (2 << 20)
            assert ElasticBuffer.get_buffer_size_hint(Group(ranks), tokens, 7168, 8) <= theirs
    # DeepEP's low latency mode reserves 1,908,410,496 bytes.
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) < 0.6 * 1_908_410_496
