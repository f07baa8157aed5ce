"""Random calls of random ranks, compared with the oracle bit for bit.

``UCCL_EP_CASES`` is the number of cases of each test, ``UCCL_EP_CASE_SEED`` repeats one case; a
failure names its seed.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from cases import Draw, Sizes, lacks_nodes, same
from elastic_calls import elastic_calls
from few_tokens import FewTokens, in_tiles
from many_tokens import many_tokens
from on_device import inputs_of
from oracle import formats, low_latency
from oracle.routing import Shape

pytestmark = [pytest.mark.xdist_group("many-ranks"), pytest.mark.timeout(600)]

#: Seconds for the cases of one test, unless their number is set.
SECONDS = 6


def check(
    world: Any,
    size: Callable[[Draw], tuple[int, int]],
    function: Callable[..., None],
    seconds: int = SECONDS,
    transport: str = "tcp",
) -> None:
    """Runs a function on the ranks of random cases. ``size`` draws the numbers of ranks and nodes,
    and ``transport`` connects the nodes."""
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
    """Two calls in flight at a time, ended in any order, several times on one buffer."""
    rank = FewTokens(group, seed)
    rank.two_at_a_time()
    # Other ranks read this rank's rows until they have called their hooks.
    torch.distributed.barrier(group)
    rank.buffer.destroy()


def masked(group: Any, seed: int) -> None:
    """One rank is masked: it sends nothing, and its experts add nothing."""
    rank = FewTokens(group, seed, enable_shrink=True)
    out = rank.draw.randrange(rank.shape.ranks)
    call = rank.draw.call(rank.sizes)
    if rank.rank == out:
        return
    rank.buffer.low_latency_update_mask_buffer(out, True)
    rank.without([out], call)


def packed(group: Any, seed: int) -> None:
    """LogFMT-10: packed blocks beside blocks that are sent unpacked."""
    rank = FewTokens(group, seed)
    call = rank.call()
    returned = rank.dispatch(call, False)
    received = rank.check_dispatch(call, returned)
    combined, _, _ = rank.combine(call, returned[2], received, use_logfmt=True)
    same("sums", combined, rank.wanted(call, is_packed=True))


def rounded_once(group: Any) -> float:
    """A sum of three choices that is 0 if a step is rounded twice."""
    from uccl.ep import Buffer

    # 205 * 5237765 = 2^30 + 1, so the second step is 1 + 2^-24 + 2^-54: a little more than half way
    # to the next f32.
    answers = torch.tensor([1.0, 205.0, 1.0])
    weights = torch.tensor([[1.0, 5237765 * 2.0**-54, -1.0]])
    choices = torch.tensor([[0, 1, 2]])
    buffer = Buffer(group, 0, 1 << 20)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, choices, 1, 3, use_fp8=False)
    rows[:, 0] = answers[:, None].bfloat16()
    combined, _, _ = buffer.low_latency_combine(rows, choices, weights, handle)
    wanted = low_latency.combine(
        lambda token, expert: rows[expert, 0], choices, weights, lambda expert: 0, 128
    )
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
    # Most callers use whole tiles.
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
    for expert, received in enumerate(wanted):
        m = len(received.tokens)
        assert count[expert] == m
        codes, of_rows = formats.to_nvfp4(received.rows, scale)
        same("values", values[expert, :m].contiguous(), codes)
        in_tiles("scales", scales[..., expert], of_rows, ranks * most)
    buffer.destroy()


def test_two_values_in_a_byte_have_a_scale_for_sixteen(many: Any) -> None:
    check(many, lambda draw: (draw.choice([1, 2, 4]), 1), narrow)


# ---- the first interface, many tokens ----


def test_many_tokens_go_to_their_ranks_and_come_back_summed(many: Any) -> None:
    check(many, one_node, many_tokens)


# ---- the second interface ----


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
