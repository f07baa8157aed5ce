"""Rows that callers have quantised pass through the second interface as bytes, and their scales as
words of four bytes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from oracle import elastic, formats
from oracle.routing import Shape

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

HIDDEN, MOST, TOP_K, RANKS, EXPERTS = 384, 24, 3, 3, 12
#: The number of values with one scale in MXFP8.
NARROW = 32
#: A power of two, so that decoded values are exact in bf16.
GLOBAL_SCALE = 256.0


class MxFp8:
    """E4M3, and one byte for 32 values: the exponent of a power of two."""

    row_dtype, sf_words = torch.float8_e4m3fn, HIDDEN // 128

    @staticmethod
    def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, H]`` bf16 to rows, and scales u8 ``[n, H/32]`` viewed as i32."""
        blocks = formats.blocks_of(x.float(), NARROW)
        amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
        exponent = formats.next_power_of_two(amax / formats.MOST_E4M3)
        rows = formats.to_e4m3(torch.ldexp(blocks, -exponent[:, :, None])).view(x.shape)
        return rows.view(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8).view(torch.int32)

    @staticmethod
    def unpack(rows: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
        """Rows and scales as ``[m, H]`` bf16."""
        exponent = sf.contiguous().view(torch.uint8).int() - 127
        blocks = formats.blocks_of(rows.float(), NARROW)
        return torch.ldexp(blocks, exponent[:, :, None]).flatten(1).bfloat16()


class NvFp4:
    """Two E2M1 values in a byte, and an E4M3 scale for 16 values."""

    row_dtype, sf_words = torch.uint8, HIDDEN // 64

    @staticmethod
    def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, H]`` bf16 to rows u8 ``[n, H/2]``, and scales E4M3 ``[n, H/16]`` viewed as i32."""
        rows, scales = formats.to_nvfp4(x, GLOBAL_SCALE)
        return rows, scales.view(torch.float8_e4m3fn).view(torch.int32)

    @staticmethod
    def unpack(rows: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
        """Rows and scales as ``[m, H]`` bf16."""
        codes = torch.stack((rows & 15, rows >> 4), dim=2).flatten(1).long()
        values = torch.tensor(formats.E2M1)[codes & 7]
        values = torch.where(codes >= 8, -values, values)
        scales = sf.contiguous().view(torch.uint8)
        blocks = formats.blocks_of(values, formats.NARROW_BLOCK) / GLOBAL_SCALE
        return (blocks * formats.from_e4m3(scales)[:, :, None]).flatten(1).bfloat16()


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows and choices. One rank has no tokens."""
    generator = torch.Generator().manual_seed(rank)
    tokens = [MOST, 0, 7][rank]
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    choices = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    choices[::3, 1] = -1
    return x, choices


def packs(group: Any, form: Any, do_expand: bool, is_col_major: bool) -> None:
    """Dispatches, compares the bytes, decodes them, and combines; then repeats all with the
    handle."""
    from uccl.ep import ElasticBuffer

    rank = group.rank()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K)
    xs, choices = zip(*[inputs(source) for source in range(RANKS)])
    sent = [form.pack(x) for x in xs]
    alignment = 8 if do_expand else 1
    received = elastic.dispatch(list(choices), Shape(RANKS, EXPERTS), rank, MOST, alignment)
    tokens = received.expanded if do_expand else received.tokens
    options: dict[str, Any] = {"use_tma_aligned_col_major_sf": is_col_major}
    first = {
        "topk_idx": choices[rank],
        "num_experts": EXPERTS,
        "expert_alignment": alignment,
        "do_expand": do_expand,
    }
    handle = None
    for _ in range(2):
        how: dict[str, Any] = {"handle": handle} if handle is not None else first
        (rows, sf), _, _, handle, _ = buffer.dispatch(sent[rank], **how, **options)
        assert (rows.dtype, sf.dtype) == (form.row_dtype, torch.int32)
        assert sf.shape == (len(rows), form.sf_words) and len(rows) == len(tokens)
        if is_col_major:
            assert sf.stride(0) == 1
        ys = torch.full((len(rows), HIDDEN), float("nan")).bfloat16()
        for row, token in enumerate(tokens):
            if token is None:
                continue
            source, number = token
            wanted_rows, wanted_sf = sent[source]
            assert torch.equal(
                rows[row].view(torch.uint8), wanted_rows[number].view(torch.uint8)
            ), token
            assert torch.equal(sf[row], wanted_sf[number]), token
            ys[row] = form.unpack(rows[row : row + 1], sf[row : row + 1])[0]
        out, _, _ = buffer.combine(ys, handle)
        owners = torch.where(choices[rank] < 0, -1, choices[rank] // (EXPERTS // RANKS)).tolist()
        counted = [[who for who in row if who >= 0] for row in owners]
        copies = torch.tensor([[len(row if do_expand else set(row))] for row in counted]).view(
            -1, 1
        )
        assert torch.equal(out.float(), form.unpack(*sent[rank]).float() * copies)
    buffer.destroy()


@pytest.mark.parametrize("is_col_major", [False, True])
@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("form", [MxFp8, NvFp4])
def test_packed_rows_and_their_scales_arrive_byte_for_byte(
    world: Any, form: Any, do_expand: bool, is_col_major: bool
) -> None:
    world.run(RANKS, packs, form, do_expand, is_col_major)
