"""DeepEP's acceptance tests, with its inputs and tolerances: the rows name their origin."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cases import lacks_nodes
from oracle import elastic, low_latency
from oracle.elastic import Rounding
from oracle.routing import Shape

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

RANKS = 4
EXPERTS = 32
TOP_K = 6
TOKENS = 40
HIDDEN = 1024
#: The last columns of a row, which hold its token.
TAIL = 128
#: The other columns hold the rank less this, an integer that bf16 represents.
OFFSET = 128


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2), over all elements and with 1 added to each: 0 for equal
    tensors."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def digest(*tensors: torch.Tensor) -> str:
    """The digest of the tensors' bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def choices_of(rank: int, masks: int = 0) -> torch.Tensor:
    """``[TOKENS, TOP_K]``: the choices of the highest scores, some of them -1."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator).abs() + 1
    choices = scores.topk(TOP_K, sorted=False).indices
    for _ in range(masks):
        token, k = (
            torch.randint(0, TOKENS, (1,), generator=generator),
            torch.randint(0, TOP_K, (1,), generator=generator),
        )
        choices[token, k] = -1
    return choices


def telling_rows(rank: int) -> torch.Tensor:
    """``[TOKENS, HIDDEN]`` bf16: the rank in most columns, the token in the last ones."""
    rows = torch.full((TOKENS, HIDDEN), float(rank - OFFSET), dtype=torch.bfloat16)
    rows[:, -TAIL:] = torch.arange(TOKENS)[:, None].bfloat16()
    return rows


FORMATS = [
    low_latency.Format(),
    low_latency.Format(use_fp8=True),
    low_latency.Format(use_fp8=True, round_scale=True),
    low_latency.Format(use_fp8=True, round_scale=True, use_ue8m0=True),
]


def few_tokens(
    group: Any, form: low_latency.Format, hook: bool, zero_copy: bool, logfmt: bool
) -> str:
    """Dispatches rows that name their origin, returns them, and compares with the sum of
    weights."""
    from deep_ep import Buffer

    rank, ranks, local = group.rank(), group.size(), EXPERTS // RANKS
    room = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, EXPERTS)
    buffer = Buffer(group, num_rdma_bytes=room, low_latency_mode=True, num_qps_per_rank=local)
    x, choices = telling_rows(rank), choices_of(rank, masks=10)
    weights = torch.randn(TOKENS, TOP_K, generator=torch.Generator().manual_seed(rank)).abs()
    stats = torch.zeros(local, dtype=torch.int32)
    packed, count, handle, event, ended = buffer.low_latency_dispatch(
        x,
        choices,
        TOKENS,
        EXPERTS,
        cumulative_local_expert_recv_stats=stats,
        use_fp8=form.use_fp8,
        round_scale=form.round_scale,
        use_ue8m0=form.use_ue8m0,
        async_finish=not hook,
        return_recv_hook=hook,
    )
    ended() if hook else event.current_stream_wait()
    assert torch.equal(stats, count)
    chosen = torch.cat([choices_of(source, masks=10) for source in range(ranks)])
    answers = torch.zeros((local, ranks * TOKENS, HIDDEN), dtype=torch.bfloat16)
    src_info, layout_range = handle[:2]
    for expert in range(local):
        m = int(count[expert])
        assert m == int((chosen == rank * local + expert).sum())
        assert m == int((layout_range[expert] & 0xFFFFFFFF).sum())
        if form.use_fp8:
            rows = packed[0][expert, :m].view(torch.uint8)
            values = low_latency.decoded(rows, packed[1][expert, :m], form.use_ue8m0)
        else:
            values = packed[expert, :m].float()
        head = values[:, :-TAIL]
        assert torch.equal(head.amin(1), head.amax(1))
        # A scale that is a power of two leaves three bits of fraction to a row.
        is_exact = not form.round_scale
        if is_exact:
            assert torch.equal(values[:, -1].round(), src_info[expert, :m].float())
        for source in range(ranks):
            word = int(layout_range[expert, source])
            begin, length = word >> 32, word & 0xFFFFFFFF
            of_source = head[begin : begin + length, 0]
            assert not is_exact or (of_source.round() == source - OFFSET).all()
            assert length == int((choices_of(source, masks=10) == rank * local + expert).sum())
        answers[expert, :m] = values.bfloat16()
    given = answers
    if zero_copy:
        given = buffer.get_next_low_latency_combine_buffer(handle)
        given.copy_(answers)
    out = torch.empty_like(x)
    combined, event, ended = buffer.low_latency_combine(
        given,
        choices,
        weights,
        handle,
        use_logfmt=logfmt,
        zero_copy=zero_copy,
        async_finish=not hook,
        return_recv_hook=hook,
        out=out,
    )
    ended() if hook else event.current_stream_wait()
    # Other ranks read `given` until they have called their hooks.
    torch.distributed.barrier(group)
    assert combined is out and not out.isnan().any()
    total = weights.masked_fill(choices == -1, 0).sum(1, keepdim=True)
    seen = difference(x.float() * total, combined.float())
    assert seen < (9e-4 if form.use_fp8 else 1e-5), seen
    return digest(out, count)


@pytest.mark.parametrize("form", FORMATS)
def test_low_latency_rows_tell_where_they_come_from_and_come_back_within_tolerance(
    world, form
) -> None:
    for hook in (False, True):
        digests = [
            world.run(RANKS, few_tokens, form, hook, zero_copy, logfmt)
            for zero_copy, logfmt in ((False, False), (True, False), (False, True))
        ]
        # All magnitudes are 0 or at least 1, so packing changes nothing.
        assert digests[0] == digests[1] == digests[2]


def test_twenty_repeats_of_low_latency_have_one_digest(world) -> None:
    runs = [
        world.run(RANKS, few_tokens, FORMATS[1], turn % 2 == 1, False, False) for turn in range(20)
    ]
    assert all(run == runs[0] for run in runs)


def many_tokens(group: Any, kind: str, with_choices: bool, worst: bool) -> None:
    """Dispatches rows that all hold the rank, or random rows, and returns them; a sum has as many
    copies as its token has ranks."""
    from deep_ep import Buffer

    rank, ranks, local = group.rank(), group.size(), EXPERTS // RANKS
    buffer = Buffer(group, int(2e7), 0, num_qps_per_rank=1, explicitly_destroy=True)
    choices = choices_of(rank)
    owners = choices // local
    in_rank = torch.stack([(owners == other).any(1) for other in range(ranks)], dim=1)
    config = Buffer.get_dispatch_config(ranks)
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
    assert torch.equal(is_in_rank, in_rank)
    if per_node is not None:
        on_node = in_rank.unflatten(1, (len(per_node), -1)).any(2)
        assert torch.equal(per_node, on_node.sum(0).int())
    assert torch.equal(per_rank, in_rank.sum(0).int())
    assert per_expert.tolist() == [int((choices == expert).sum()) for expert in range(EXPERTS)]
    x = torch.full((TOKENS, HIDDEN), float(rank), dtype=torch.bfloat16)
    if kind == "random":
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    sent = low_latency.quantised(x, FORMATS[1]) if kind == "fp8" else x
    if kind == "fp8":
        sent = (sent[0].view(torch.float8_e4m3fn), sent[1])
    options: dict[str, Any] = {"num_worst_tokens": ranks * TOKENS} if worst else {}
    if with_choices:
        options |= {
            "topk_idx": choices,
            "topk_weights": torch.full((TOKENS, TOP_K), float(rank + 1)),
        }
    received, idx, weights, counts, handle, _ = buffer.dispatch(
        sent,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        config=config,
        async_finish=False,
        **options,
    )
    if kind == "fp8":
        received = low_latency.decoded(received[0].view(torch.uint8), received[1], False).bfloat16()
    prefix = handle[0][:, rank].tolist()
    m = prefix[-1]
    assert len(received) == (ranks * TOKENS if worst else m)
    every = [choices_of(source) for source in range(ranks)]
    if not worst:
        assert counts == [
            sum(int((c == rank * local + e).sum()) for c in every) for e in range(local)
        ]
    for source, (begin, end) in enumerate(zip([0, *prefix], prefix)):
        if kind != "random":
            assert (received[begin:end] == source).all()
        if with_choices:
            mine = idx[begin:end] >= 0
            assert (idx[begin:end][mine] < local).all() and mine.any(1).all()
            assert torch.equal(weights[begin:end], mine.float() * (source + 1))
    if with_choices and worst:
        assert (idx[m:] == -1).all()
    if with_choices and kind != "fp8":
        again, none, _, _, _, _ = buffer.dispatch(x, handle=handle, config=config)
        assert none is None and torch.equal(again[:m], received[:m])
    bias = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    combined, back, _ = buffer.combine(
        received, handle, topk_weights=weights if with_choices else None, bias=bias, config=config
    )
    times = in_rank.sum(1, keepdim=True)
    seen = difference((combined.float() - bias[0].float() - bias[1].float()) / times, x.float())
    assert seen < 5e-6, seen
    combined, back, _ = buffer.combine(
        received, handle, topk_weights=weights if with_choices else None
    )
    seen = difference(combined.float() / times, x.float())
    assert seen < 5e-6, seen
    if with_choices:
        # One rank returns each weight, and the others return 0.
        seen = difference(back, torch.full((TOKENS, TOP_K), float(rank + 1)))
        assert seen < 1e-9, seen
    buffer.destroy()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["telling", "random", "fp8"])
def test_many_tokens_arrive_by_rank_and_come_back_within_tolerance(world, kind, nodes) -> None:
    if nodes > 1 and lacks_nodes():
        pytest.skip("lacks nodes on one host (UCCL_EP_NODE)")
    for with_choices in (True, False):
        for worst in (False, True):
            world.run(RANKS, many_tokens, kind, with_choices, worst, nodes=nodes)


def second(group: Any, multiple: bool, expand: bool, sync: bool) -> str:
    """A dispatch and a combine; the sums equal the reference's bit for bit."""
    from deep_ep import ElasticBuffer

    rank, ranks = group.rank(), group.size()
    shape = Shape(ranks, EXPERTS)
    buffer = ElasticBuffer(
        group,
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=TOP_K,
        allow_multiple_reduction=multiple,
        deterministic=True,
        explicitly_destroy=True,
    )
    every = [choices_of(source, masks=10) for source in range(ranks)]
    xs = [
        torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(source)).bfloat16()
        for source in range(ranks)
    ]
    rows, _, _, handle, _ = buffer.dispatch(
        xs[rank],
        topk_idx=every[rank],
        topk_weights=torch.ones(TOKENS, TOP_K),
        num_experts=EXPERTS,
        expert_alignment=16,
        do_expand=expand,
        do_cpu_sync=sync,
    )
    arrived = elastic.dispatch(every, shape, rank, TOKENS, 16)
    named: list[Any] = arrived.expanded if expand else arrived.tokens
    for row, token in enumerate(named):
        if token is not None:
            assert torch.equal(rows[row], xs[token[0]][token[1]]), f"row {row} is not token {token}"
    combined, _, _ = buffer.combine(rows, handle)
    parts = []
    for token, row in enumerate(every[rank].tolist()):
        owners = [(k, shape.owner(expert)) for k, expert in enumerate(row) if expert >= 0]
        owners = owners if expand else elastic.masters(row, shape)
        parts.append([(k, owner, xs[rank][token].float()) for k, owner in owners])
    wanted = elastic.combine(
        lambda token: parts[token], [], shape, Rounding.of(multiple, 1), (TOKENS, HIDDEN)
    )
    assert torch.equal(combined, wanted)
    buffer.destroy()
    return digest(combined)


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_the_second_interface_sums_to_the_last_bit(world, multiple, expand) -> None:
    synced, not_synced = (
        world.run(RANKS, second, multiple, expand, sync) for sync in (True, False)
    )
    assert synced == not_synced
