"""Random calls of random ranks, compared with the oracle bit for bit.

``UCCL_EP_CASES`` says how many cases each test runs, ``UCCL_EP_CASE_SEED`` runs one case again; a failure names its own.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from cases import Call, Draw, Sizes, lacks_nodes, listed, same
from few_tokens import FewTokens, bits, in_tiles, inputs_of
from oracle import elastic, formats, low_latency, normal
from oracle.elastic import Rounding
from oracle.routing import Shape

pytestmark = [pytest.mark.xdist_group("many-ranks"), pytest.mark.timeout(600)]

#: Seconds for the cases of one test, unless their number is said.
SECONDS = 6
NAN = float("nan")


def check(
    world: Any,
    size: Callable[[Draw], tuple[int, int]],
    function: Callable[..., None],
    seconds: int = SECONDS,
    transport: str = "tcp",
) -> None:
    """Runs a function on the ranks of random cases; ``size`` draws how many there are, and on how many nodes, between which
    there is ``transport``."""
    said = os.environ.get("UCCL_EP_CASE_SEED")
    most = int(os.environ.get("UCCL_EP_CASES", "0"))
    seed = int(said) if said else random.SystemRandom().randrange(2**40)
    end, done = time.monotonic() + seconds, 0
    while True:
        ranks, nodes = size(Draw(seed))
        try:
            world.run(ranks, function, seed, nodes=nodes, transport=transport)
        except AssertionError as error:
            raise AssertionError(f"UCCL_EP_CASE_SEED={seed}: {error}") from None
        done, seed = done + 1, seed + 1
        if said or (done >= most if most else time.monotonic() > end):
            break
    print(f"{done} cases, the last UCCL_EP_CASE_SEED={seed - 1}")


def one_node(draw: Draw) -> tuple[int, int]:
    """From 1 to 16 ranks of one node."""
    return draw.choice([1, 2, 2, 3, 4, 4, 5, 7, 8, 16]), 1


def several(draw: Draw) -> tuple[int, int]:
    """From 2 to 8 ranks of one node."""
    return draw.choice([2, 3, 4, 5, 8]), 1


def apart(draw: Draw) -> tuple[int, int]:
    """From 2 to 16 ranks of two to four nodes."""
    nodes = draw.choice([2, 2, 3, 4])
    return nodes * draw.choice([1, 2, 2, 3, 4]), nodes


# ---- the first interface, few tokens ----


def few_tokens(group: Any, seed: int) -> None:
    """Two calls under way at a time, ended in any order, again and again on one buffer."""
    rank = FewTokens(group, seed)
    rank.two_at_a_time()
    # Others read this rank's rows until they have called their hooks.
    torch.distributed.barrier(group)
    rank.buffer.destroy()


def masked(group: Any, seed: int) -> None:
    """One rank is left out: nothing comes from it, and its experts count for nothing."""
    rank = FewTokens(group, seed, enable_shrink=True)
    out = rank.draw.randrange(rank.shape.ranks)
    call = rank.draw.call(rank.sizes)
    if rank.rank == out:
        return
    rank.buffer.low_latency_update_mask_buffer(out, True)
    rank.without(out, call)


def packed(group: Any, seed: int) -> None:
    """LogFMT-10: blocks that are packed beside blocks that are sent as they are."""
    rank = FewTokens(group, seed)
    call = rank.call()
    returned = rank.dispatch(call, False)
    arrived = rank.check_dispatch(call, returned)
    combined, _, _ = rank.combine(call, returned[2], arrived, use_logfmt=True)
    same("sums", combined, rank.wanted(call, is_packed=True))


def rounded_once(group: Any) -> float:
    """A sum of three choices that comes out as 0 where a step is rounded twice."""
    from uccl.ep import Buffer

    # 205 * 5237765 = 2^30 + 1, so the second step is 1 + 2^-24 + 2^-54: a little more than half way to the next f32.
    answers = torch.tensor([1.0, 205.0, 1.0])
    weights = torch.tensor([[1.0, 5237765 * 2.0**-54, -1.0]])
    choices = torch.tensor([[0, 1, 2]])
    buffer = Buffer(group, 0, 1 << 20)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, choices, 1, 3, use_fp8=False)
    rows[:, 0] = answers[:, None].bfloat16()
    combined, _, _ = buffer.low_latency_combine(rows, choices, weights, handle)
    wanted = low_latency.combine(lambda token, expert: rows[expert, 0], choices, weights, 128)
    same("sum", combined, wanted)
    return combined[0, 0].item()


def test_each_step_of_a_weighted_sum_is_rounded_once(many: Any) -> None:
    assert many.run(1, rounded_once) == [2.0**-23]


def test_few_tokens_go_to_their_experts_and_come_back_weighted(many: Any) -> None:
    check(many, one_node, few_tokens)


def test_a_masked_rank_sends_nothing_and_counts_for_nothing(many: Any) -> None:
    check(many, several, masked)


def test_rows_of_ten_bits_a_value_are_the_nearest_that_there_are(many: Any) -> None:
    check(many, one_node, packed)


def narrow(group: Any, seed: int) -> None:
    """NVFP4: two values in a byte, and scales in tiles of 128 rows by 4."""
    from uccl.ep import Buffer

    draw, rank, ranks = inputs_of(seed), group.rank(), group.size()
    # Most callers have whole tiles.
    most = draw.choice([128 // ranks * draw.choice([1, 2]), draw.randint(1, 150)])
    shape = Shape(ranks, ranks * draw.choice([1, 3]))
    sizes = Sizes(shape, draw.choice([128, 384, 512]), draw.randint(1, shape.experts), most)
    call = draw.call(sizes)
    rows = draw.choice([call.xs, call.ys])
    room = Buffer.get_low_latency_rdma_size_hint(most, sizes.hidden, ranks, shape.experts)
    buffer = Buffer(group, 0, room, low_latency_mode=True)
    scale = draw.choice([1.0, 6 * formats.MOST_E4M3 / 4, draw.uniform(0.001, 10_000)])
    with_hook = draw.random() < 0.5
    (values, scales), count, _, _, hook = buffer.low_latency_dispatch(
        rows[rank],
        call.choices[rank],
        most,
        shape.experts,
        use_fp8=False,
        use_nvfp4=True,
        x_global_scale=torch.tensor(scale),
        return_recv_hook=with_hook,
    )
    if hook is not None:
        hook()
    wanted = low_latency.dispatch(rows, call.choices, shape, rank, low_latency.Format())
    values = values.permute(2, 0, 1)
    for expert, arrived in enumerate(wanted):
        m = len(arrived.tokens)
        assert count[expert] == m
        codes, of_rows = formats.to_nvfp4(arrived.rows, scale)
        same("values", values[expert, :m].contiguous(), codes)
        in_tiles("scales", scales[..., expert], of_rows, ranks * most)
    buffer.destroy()


def test_two_values_in_a_byte_have_a_scale_for_sixteen(many: Any) -> None:
    check(many, lambda draw: (draw.choice([1, 2, 4]), 1), narrow)


# ---- the first interface, many tokens ----


def scales_of(draw: Draw, count: int, hidden: int) -> torch.Tensor:
    """``[count, hidden/128]`` of four bytes each, f32 or i32, in any order of memory."""
    words = torch.randint(0, 2**30, (hidden // 128, count), generator=draw.torch, dtype=torch.int32)
    words = words if draw.random() < 0.5 else words.view(torch.float32)
    return words.T if draw.random() < 0.5 else words.T.contiguous()


class ManyTokens:
    """One rank's calls of a case of normal mode."""

    def __init__(self, group: Any, seed: int) -> None:
        from uccl.ep import Buffer

        self.draw, self.rank = inputs_of(seed), group.rank()
        self.sizes = self.draw.sizes(group.size())
        room = Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(
            self.sizes.hidden * 2, group.size()
        )
        # At times with room for a token or two of each rank, and of each node: tokens go in rounds.
        self.buffer = Buffer(group, room if self.draw.random() < 0.5 else group.size() * 60_000)
        nodes, _ = self.buffer.runtime.nodes
        self.shape = dataclasses.replace(self.sizes.shape, nodes=nodes)

    def inputs(self, call: Call) -> list[Any]:
        """``x`` of each rank: bf16, or bytes and scales."""
        if self.draw.random() < 0.5:
            return list(call.xs)
        kind = self.draw.randrange(2**30)
        pairs = []
        for x in call.xs:
            draw = Draw(kind)
            codes = torch.randint(0, 256, x.shape, generator=self.draw.torch, dtype=torch.uint8)
            pairs.append((codes.view(torch.float8_e4m3fn), scales_of(draw, *x.shape)))
        return pairs

    def check_rows(self, inputs: list[Any], arrived: normal.Arrived, seen: Any) -> None:
        """Compares rows, and scales if there are any."""
        m = len(arrived.tokens)
        for part, name in enumerate(["rows", "scales"][: 2 if isinstance(inputs[0], tuple) else 1]):
            sent = [pair[part] for pair in inputs] if isinstance(inputs[0], tuple) else inputs
            got = seen[part] if isinstance(inputs[0], tuple) else seen
            like = bits(sent[0].contiguous())
            wanted = low_latency.stacked(
                [bits(sent[source].contiguous())[token] for source, token in arrived.tokens], like
            )
            same(name, bits(got[:m].contiguous()), wanted)

    def dispatch(self, call: Call, inputs: list[Any]) -> tuple[normal.Arrived, Any, int]:
        """Dispatches and compares; returns what arrived, the handle, and how many rows there are."""
        mine, alignment = self.rank, self.draw.choice([1, 1, 8, 128])
        counts = normal.layout(call.choices[mine], self.shape)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            call.choices[mine], self.shape.experts
        )
        listed("tokens by rank", per_rank, counts.per_rank)
        listed("tokens by expert", per_expert, counts.per_expert)
        listed("token in rank", in_rank, counts.in_rank)
        worst = self.draw.choice([0, 0, self.sizes.most * self.shape.ranks])
        x, idx, weights, per_expert_list, handle, _ = self.buffer.dispatch(
            inputs[mine],
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=call.choices[mine],
            topk_weights=call.weights[mine],
            expert_alignment=alignment,
            num_worst_tokens=worst,
        )
        arrived = normal.dispatch(call.choices, call.weights, self.shape, mine, alignment)
        m = len(arrived.tokens)
        rows = worst or m
        assert (x[0] if isinstance(x, tuple) else x).shape[0] == rows
        self.check_rows(inputs, arrived, x)
        nothing = [[-1] * self.sizes.top_k] * (rows - m)
        listed("choices", idx, arrived.choices + nothing)
        same("weights", weights[:m], arrived.weights)
        assert per_expert_list == ([] if worst else arrived.per_expert)
        # Each rank knows what it receives itself.
        listed("prefixes", handle[0][:, mine], [of_source[mine] for of_source in arrived.prefix])
        listed("source tokens", handle[3][:m], [token for _, token in arrived.tokens])
        return arrived, handle, rows

    def combine(self, call: Call, arrived: normal.Arrived, handle: Any, total: int) -> None:
        """Combines and compares."""
        mine, m, hidden = self.rank, len(arrived.tokens), self.sizes.hidden
        rows = torch.full((total, hidden), NAN, dtype=torch.bfloat16)
        weights = torch.full((total, self.sizes.top_k), NAN)
        for row, (source, token) in enumerate(arrived.tokens):
            rows[row] = call.answer(source, token, mine)
        weights[:m] = arrived.weights
        biases = (
            [self.draw.rows(len(x), hidden) for x in call.xs] if self.draw.random() < 0.5 else []
        )
        more = (
            [self.draw.rows(len(x), hidden) for x in call.xs]
            if biases and self.draw.random() < 0.5
            else []
        )
        mine_of = [kind[mine] for kind in (biases, more) if kind]
        with_weights = self.draw.random() < 0.5
        combined, combined_weights, _ = self.buffer.combine(
            rows,
            handle,
            topk_weights=weights if with_weights else None,
            bias=None if not mine_of else mine_of[0] if len(mine_of) == 1 else tuple(mine_of),
        )
        wanted = normal.combine(
            lambda token, rank: call.answer(mine, token, rank),
            call.choices[mine],
            self.shape,
            mine_of,
            hidden,
        )
        same("sums", combined, wanted)
        if not with_weights:
            assert combined_weights is None
            return
        wanted = normal.combine_weights(
            lambda token, rank: self.weights_at(call, token, rank), call.choices[mine], self.shape
        )
        same("weights", combined_weights, wanted)

    def weights_at(self, call: Call, token: int, rank: int) -> torch.Tensor:
        """``[K]`` f32: the weights that a rank has of one of this rank's tokens."""
        owners = call.choices[self.rank][token].div(self.shape.local, rounding_mode="floor")
        return torch.where(owners == rank, call.weights[self.rank][token], 0.0)


def many_tokens(group: Any, seed: int) -> None:
    """Two handles alive, each used twice: for a combine, and for a dispatch of other rows to the same places."""
    rank = ManyTokens(group, seed)
    calls = [rank.draw.call(rank.sizes) for _ in range(2)]
    returned = [rank.dispatch(call, rank.inputs(call)) for call in calls]
    for number in rank.draw.sample([0, 1], 2):
        call, (arrived, handle, total) = calls[number], returned[number]
        rank.combine(call, arrived, handle, total)
        others = [rank.draw.rows(len(x), rank.sizes.hidden) for x in call.xs]
        x, *between, again, _ = rank.buffer.dispatch(others[rank.rank], handle=handle)
        assert between == [None] * 3 and again is None
        rank.check_rows(others, arrived, x)
        rank.combine(call, arrived, handle, total)
    rank.buffer.destroy()


def test_many_tokens_go_to_their_ranks_and_come_back_summed(many: Any) -> None:
    check(many, one_node, many_tokens)


# ---- the second interface ----


class Elastic:
    """One rank's calls of a case of the second interface."""

    def __init__(self, group: Any, seed: int) -> None:
        from uccl.ep import ElasticBuffer

        self.draw, self.rank = inputs_of(seed), group.rank()
        self.sizes: Sizes = self.draw.sizes(group.size())
        self.multiple = self.draw.random() < 0.6
        self.expand = self.draw.random() < 0.5
        self.alignment = self.draw.choice([1, 1, 8, 128])
        self.buffer = ElasticBuffer(
            group,
            num_max_tokens_per_rank=self.sizes.most,
            hidden=self.sizes.hidden,
            num_topk=self.sizes.top_k,
            allow_multiple_reduction=self.multiple,
            allow_hybrid_mode=self.draw.random() < 0.7,
            num_cpu_timeout_secs=15,
        )
        nodes, _ = self.buffer.get_logical_domain_size()
        self.shape = dataclasses.replace(self.sizes.shape, nodes=nodes)
        self.stats = torch.zeros(self.shape.local, dtype=torch.int32)
        self.counted = [0] * self.shape.local

    def inputs(self, call: Call) -> list[Any]:
        """``x`` of each rank: bf16, or bytes and packs that mean nothing to the engine."""
        kind = self.draw.choice(["bf16", "fp8", "half bytes"])
        if kind == "bf16":
            return [(x, None) for x in call.xs]
        packs = self.draw.randrange(2**30)
        width = self.sizes.hidden if kind == "fp8" else self.sizes.hidden // 2
        inputs = []
        for x in call.xs:
            codes = torch.randint(
                0, 256, (x.shape[0], width), generator=self.draw.torch, dtype=torch.uint8
            )
            inputs.append((codes, scales_of(Draw(packs), *x.shape)))
        return inputs

    def dispatch(self, call: Call, inputs: list[Any], sync: bool, handle: Any = None) -> Any:
        """Dispatches and compares; returns what arrived, the handle, and how many rows there are."""
        mine = self.rank
        x, scales = inputs[mine]
        column_major = self.draw.random() < 0.5
        zero_padding = self.expand and self.draw.random() < 0.5
        first = {
            "topk_idx": call.choices[mine],
            "num_experts": self.shape.experts,
            "expert_alignment": self.alignment,
            "cumulative_local_expert_recv_stats": self.stats,
            "do_cpu_sync": sync,
        }
        rows, idx, weights, made, _ = self.buffer.dispatch(
            x if scales is None else (x, scales),
            topk_weights=call.weights[mine],
            do_expand=self.expand,
            do_zero_padding=zero_padding,
            use_tma_aligned_col_major_sf=column_major,
            **(first if handle is None else {"handle": handle}),
        )
        arrived = elastic.dispatch(call.choices, self.shape, mine, self.sizes.most, self.alignment)
        if handle is None:
            self.counted = [a + b for a, b in zip(self.counted, arrived.counts)]
            listed("statistics", self.stats, self.counted)
            self.check_handle(call, arrived, made, sync)
        else:
            assert made is handle
        values, packs = rows if scales is not None else (rows, None)
        if sync:
            total = len(arrived.expanded) if self.expand else len(arrived.tokens)
        elif self.expand:
            total = elastic.worst_expanded_rows(
                self.shape, self.sizes.most, self.sizes.top_k, self.alignment
            )
        else:
            total = self.shape.ranks * self.sizes.most
        assert values.shape == (total, x.shape[1]), f"{tuple(values.shape)}, not {total} rows"
        if packs is not None and column_major and total:
            assert packs.stride() == (1, -(-total // 4) * 4), f"strides {packs.stride()}"
        named: list[Any] = arrived.expanded if self.expand else arrived.tokens
        where = [row for row, token in enumerate(named) if token is not None]
        for name, seen, part in (("rows", values, 0), ("packs", packs, 1)):
            if seen is None:
                continue
            wanted = low_latency.stacked(
                [bits(inputs[named[row][0]][part].contiguous())[named[row][1]] for row in where],
                bits(x.contiguous() if part == 0 else scales.contiguous()),
            )
            same(name, bits(seen[where].contiguous()), wanted)
        self.check_choices(call, arrived, (idx, weights), total)
        if zero_padding:
            last = max(where, default=-1)
            gaps = [row for row, token in enumerate(named) if token is None and row < last]
            for seen in (values, packs, weights):
                assert seen is None or not bits(seen[gaps].contiguous()).any(), "gaps are not zero"
        return arrived, made, total

    def check_choices(self, call: Call, arrived: elastic.Arrived, seen: Any, total: int) -> None:
        """Compares choices and weights, as rows by rank or by expert have them."""
        idx, weights = seen
        if not self.expand:
            nothing = [[-1] * self.sizes.top_k] * (total - len(arrived.tokens))
            listed("choices", idx, arrived.choices + nothing)
            wanted = [call.weights[source][token] for source, token in arrived.tokens]
            like = call.weights[self.rank]
            same("weights", weights[: len(wanted)], low_latency.stacked(wanted, like))
            return
        assert idx is None
        assert weights.shape == (total,)
        for row, token in enumerate(arrived.expanded):
            if token is not None:
                k = self.choice_of(call, arrived, row)
                assert weights[row] == call.weights[token[0]][token[1], k], f"weight of row {row}"

    def choice_of(self, call: Call, arrived: elastic.Arrived, row: int) -> int:
        """Which choice of its token an expanded row is."""
        source, token = arrived.expanded[row]
        starts = [sum(arrived.aligned[:expert]) for expert in range(self.shape.local)]
        local = max(expert for expert, start in enumerate(starts) if start <= row)
        while not arrived.aligned[local]:
            local -= 1
        chosen = call.choices[source][token].tolist()
        return chosen.index(self.rank * self.shape.local + local)

    def check_handle(self, call: Call, arrived: elastic.Arrived, handle: Any, sync: bool) -> None:
        """Compares what a handle tells of a dispatch."""
        assert handle.num_recv_tokens_per_expert_list == (arrived.aligned if sync else [])
        same("choices", handle.topk_idx, call.choices[self.rank])
        listed(
            "tokens by scale-up rank",
            handle.psum_num_recv_tokens_per_scaleup_rank,
            arrived.per_scaleup_rank,
        )
        listed(
            "tokens by expert",
            handle.psum_num_recv_tokens_per_expert,
            arrived.psum_per_expert(self.expand),
        )
        listed("real tokens", handle.num_unaligned_recv_tokens_per_expert, arrived.counts)
        m = len(arrived.tokens)
        if sync:
            assert handle.num_recv_tokens == m
            assert not self.expand or handle.num_expanded_tokens == len(arrived.expanded)
        wanted = []
        for names, (source, token) in zip(arrived.metadata, arrived.tokens):
            row = call.choices[source][token].tolist()
            master = {rank: k for k, rank in elastic.masters(row, self.shape)}[self.rank]
            wanted.append([names[0], source * self.sizes.top_k + master, *names[1:]])
        seen = handle.recv_src_metadata[:m]
        if not self.expand:
            seen, wanted = seen[:, :2], [row[:2] for row in wanted]
        if self.shape.nodes > 1:
            # The second names a slot.
            seen, wanted = seen[:, [0, *range(2, seen.shape[1])]], [[a, *b] for a, _, *b in wanted]
        listed("metadata", seen, wanted)

    def parts(self, call: Call, token: int) -> list[elastic.Part]:
        """What comes back of one of this rank's tokens."""
        row = call.choices[self.rank][token].tolist()
        if not self.expand:
            return [
                (k, rank, call.answer(self.rank, token, rank).float())
                for k, rank in elastic.masters(row, self.shape)
            ]
        return [
            (k, self.shape.owner(expert), call.answer(self.rank, token, expert).float())
            for k, expert in enumerate(row)
            if expert >= 0
        ]

    def combine(self, call: Call, arrived: elastic.Arrived, handle: Any, total: int) -> None:
        """Combines and compares."""
        mine, hidden = self.rank, self.sizes.hidden
        rows = torch.full((total, hidden), NAN, dtype=torch.bfloat16)
        back = torch.full((total,) if self.expand else (total, self.sizes.top_k), NAN)
        named: list[Any] = arrived.expanded if self.expand else arrived.tokens
        for row, token in enumerate(named):
            if token is None:
                continue
            by = mine
            if self.expand:
                k = self.choice_of(call, arrived, row)
                by = int(call.choices[token[0]][token[1], k])
                back[row] = call.weights[token[0]][token[1], k] * (1 + by)
            else:
                back[row] = call.weights[token[0]][token[1]] * (1 + by)
            rows[row] = call.answer(token[0], token[1], by)
        count = self.draw.choice([0, 0, 1, 2])
        drawn = [[self.draw.rows(len(x), hidden) for x in call.xs] for _ in range(count)]
        biases = [of_ranks[mine] for of_ranks in drawn]
        with_weights = self.draw.random() < 0.5 and not (self.expand and not self.multiple)
        combined, weights, _ = self.buffer.combine(
            rows,
            handle,
            topk_weights=back if with_weights else None,
            bias=None if not biases else biases[0] if count == 1 else tuple(biases),
        )
        wanted = elastic.combine(
            lambda token: self.parts(call, token),
            biases,
            self.shape,
            Rounding.of(self.multiple, self.shape.nodes),
            (len(call.xs[mine]), hidden),
        )
        same("sums", combined, wanted)
        if with_weights:
            same("weights", weights, self.weights_back(call))
        else:
            assert weights is None

    def weights_back(self, call: Call) -> torch.Tensor:
        """``[n, K]`` f32: what the owners give back for each choice, 0 for none."""
        chosen = call.choices[self.rank]
        by = chosen if self.expand else chosen.div(self.shape.local, rounding_mode="floor")
        given = call.weights[self.rank] * (1 + by)
        return torch.where(chosen >= 0, given, torch.zeros_like(given))


def elastic_calls(group: Any, seed: int) -> None:
    """Two handles alive, each combined, used again for other rows, and combined again."""
    rank = Elastic(group, seed)
    calls = [rank.draw.call(rank.sizes) for _ in range(2)]
    returned = []
    for call in calls:
        sync = rank.draw.random() < 0.5
        returned.append(rank.dispatch(call, rank.inputs(call), sync))
    for number in rank.draw.sample([0, 1], 2):
        call, (arrived, handle, total) = calls[number], returned[number]
        rank.combine(call, arrived, handle, total)
        arrived, handle, total = again(rank, call, handle, total)
        rank.combine(call, arrived, handle, total)
    rank.buffer.destroy()


def again(rank: Elastic, call: Call, handle: Any, total: int) -> Any:
    """Dispatches other rows with a handle."""
    sync = bool(handle.num_recv_tokens_per_expert_list)
    return rank.dispatch(call, rank.inputs(call), sync, handle)


def test_the_second_interface_gives_rows_by_rank_or_expert_and_rounds_where_it_says(
    many: Any,
) -> None:
    check(many, one_node, elastic_calls)


# ---- several nodes ----


@pytest.mark.rails
@pytest.mark.parametrize("function", [few_tokens, many_tokens, elastic_calls])
def test_ranks_of_several_nodes_get_the_same(
    many: Any, function: Callable[..., None], transport: str
) -> None:
    if lacks_nodes():
        pytest.skip("lacks nodes on one host (UCCL_EP_NODE)")
    check(many, apart, function, SECONDS // 3, transport)


@pytest.mark.parametrize("function", [few_tokens, masked, many_tokens, elastic_calls])
def test_streams_between_nodes_may_be_delayed_split_and_cut(
    many: Any, function: Callable[..., None]
) -> None:
    if lacks_nodes():
        pytest.skip("lacks nodes on one host (UCCL_EP_NODE)")
    check(many, apart, function, SECONDS // 3, "chaos")


@pytest.mark.parametrize("function", [masked, packed])
def test_masks_and_packed_rows_are_the_same_between_nodes(
    many: Any, function: Callable[..., None]
) -> None:
    if lacks_nodes():
        pytest.skip("lacks nodes on one host (UCCL_EP_NODE)")
    check(many, apart, function, SECONDS // 3)
