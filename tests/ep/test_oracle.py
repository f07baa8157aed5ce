"""The oracle itself, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from oracle import elastic, formats, low_latency
from oracle.elastic import Rounding
from oracle.routing import Shape


def test_e4m3_saturates_and_ties_go_to_even():
    # 448 is the largest; 17 is half way between 16 and 18, 19 between 18 and 20; the least is 2^-9.
    values = torch.tensor([448.0, 1e9, -1e9, 17.0, 19.0, 2.0**-9, 2.0**-10, -0.0])
    assert formats.to_e4m3(values).tolist() == [0x7E, 0x7E, 0xFE, 0x58, 0x5A, 1, 0, 0x80]
    assert formats.from_e4m3(torch.tensor([0x7E, 0x58, 0x5A, 0x81])).tolist() == [
        448.0,
        16.0,
        20.0,
        -(2.0**-9),
    ]


def test_scales_that_are_powers_of_two_are_rounded_up_and_packed_lowest_first():
    x = torch.zeros(1, 512).bfloat16()
    # 448 * 2^k is exact; the third block needs the next power; the last has the least amax, 1e-4.
    x[0, 0], x[0, 128], x[0, 256] = 448.0, 896.0, 450.0
    codes, scales = formats.quantise(x, True)
    assert scales.tolist() == [[1.0, 2.0, 2.0, 2.0**-22]]
    assert codes[0, [0, 128, 256]].tolist() == [0x7E, 0x7E, 0x76]
    assert formats.to_ue8m0(scales).tolist() == [[127 | 128 << 8 | 128 << 16 | 105 << 24]]


def test_a_product_and_a_sum_are_rounded_once():
    # 205 * 5237765 = 2^30 + 1: the sum is a little more than half way from 1 to the next f32.
    product = torch.tensor([205.0]), torch.tensor([5237765 * 2.0**-54])
    assert formats.fma(*product, torch.ones(1)).item() == 1 + 2.0**-23


def test_logfmt_keeps_zeros_extremes_and_blocks_that_reach_one():
    row = torch.zeros(256).bfloat16()
    row[:3] = torch.tensor([0.5, -0.5, 2.0**-40])
    row[128:130] = torch.tensor([1.0, 0.3])
    back = formats.through_logfmt(row)
    # A value more than 32 powers of two below the largest becomes 32 below it.
    assert back[:4].tolist() == [0.5, -0.5, 2.0**-33, 0.0]
    assert torch.equal(back[128:], row[128:])


def test_nvfp4_has_two_values_in_a_byte_and_a_scale_for_sixteen():
    x = torch.tensor([[6.0, -6.0, 0.25, 0.75, 5.0, 1.0] + [0.0] * 10]).bfloat16()
    codes, scales = formats.to_nvfp4(x, 1.0)
    assert scales.tolist() == [[0x38]]
    # The first is low: 6 and -6; the ties 0.25 and 0.75, to 0 and 1; the tie 5, to 4 (its fraction
    # is even), and 1.
    assert codes[0, :3].tolist() == [0xF7, 0x20, 0x26]
    tiles = low_latency.nvfp4_swizzled(torch.arange(128 * 8).view(128, 8))
    assert tiles.shape == (32, 4, 1, 4, 2)
    assert tiles[3, 1, 0, 2, 1].item() == (32 + 3) * 8 + 4 + 2


@pytest.mark.parametrize(
    ("ranks_of_parts", "multiple", "nodes", "wanted"),
    [
        # One and two halves of the next step; both halves come from one rank, from one node, or
        # from neither.
        ([0, 0, 2], False, 2, 1 + 2.0**-7),
        ([0, 0, 2], True, 1, 1.0),
        ([0, 1, 2], True, 1, 1 + 2.0**-7),
        ([0, 1, 2], True, 2, 1.0),
        ([0, 2, 2], True, 2, 1 + 2.0**-7),
    ],
)
def test_sums_are_rounded_by_rank_and_node_where_that_is_allowed(
    ranks_of_parts, multiple, nodes, wanted
):
    values = [1.0, 2.0**-8, 2.0**-8]
    parts = [
        (k, rank, torch.tensor([value]))
        for k, (rank, value) in enumerate(zip(ranks_of_parts, values))
    ]
    rounding = Rounding.of(multiple, nodes)
    out = elastic.combine(lambda token: parts, [], Shape(4, 4, nodes), rounding, (1, 1))
    assert out.item() == wanted
