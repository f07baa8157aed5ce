"""The first interface, few tokens: rows by expert, weighted sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from . import formats
from .routing import Shape, Token, tokens_of_expert


@dataclass
class Received:
    """The rows that one expert of a rank receives, in order of rank and token."""

    tokens: list[Token]
    rows: torch.Tensor
    """``[count, H]`` bf16, or bytes of E4M3; or ``[count, H/2]`` bytes of NVFP4."""
    scales: torch.Tensor | None
    """None, ``[count, H/128]`` f32, or ``[count, H/512]`` i32; or ``[count, H/16]`` bytes of
    NVFP4."""


@dataclass(frozen=True)
class Format:
    """The format of rows in transit."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    global_scale: float | None = None
    """NVFP4, with this global scale."""

    @property
    def has_scales(self) -> bool:
        """Whether rows have scales."""
        return self.use_fp8 or self.global_scale is not None


def quantised(x: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[n, H]`` bf16 as it is sent: rows, and scales if there are any."""
    if form.global_scale is not None:
        return formats.to_nvfp4(x, form.global_scale)
    if not form.use_fp8:
        return x, None
    rows, scales = formats.quantise(x, form.round_scale)
    return rows, formats.to_ue8m0(scales) if form.use_ue8m0 else scales


def dispatch(
    xs: list[torch.Tensor], choices: list[torch.Tensor], shape: Shape, rank: int, form: Format
) -> list[Received]:
    """The rows that each expert of a rank receives. ``xs``: ``[n, H]`` bf16 of each rank;
    ``choices``: ``[n, K]``."""
    sent = [quantised(x, form) for x in xs]
    received = []
    for expert in range(rank * shape.local, (rank + 1) * shape.local):
        tokens = tokens_of_expert(choices, expert)
        rows = [sent[source][0][token] for source, token in tokens]
        scales = None
        if form.has_scales:
            scales = stacked([sent[source][1][token] for source, token in tokens], sent[0][1])
        received.append(Received(tokens, stacked(rows, sent[0][0]), scales))
    return received


def stacked(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows as a matrix, which may have none."""
    return torch.stack(rows) if rows else like.new_empty((0, like.shape[1]))


def decoded(rows: torch.Tensor, scales: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """Bytes of E4M3 and their scales as ``[m, H]`` f32."""
    if use_ue8m0:
        exponents = torch.stack([(scales >> (8 * place)) & 255 for place in range(4)], dim=2)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents - 127).flatten(1)
    blocks = formats.blocks_of(formats.from_e4m3(rows), formats.BLOCK)
    return (blocks * scales[:, :, None]).view(rows.shape)


def layout_range(
    choices: list[torch.Tensor], shape: Shape, rank: int
) -> list[list[tuple[int, int]]]:
    """For each expert of a rank and each source: the first row and the number of rows."""
    ranges = []
    for expert in range(rank * shape.local, (rank + 1) * shape.local):
        sources = [source for source, _ in tokens_of_expert(choices, expert)]
        counts = [sources.count(source) for source in range(shape.ranks)]
        ranges.append([(sum(counts[:source]), count) for source, count in enumerate(counts)])
    return ranges


def combine(
    answer: Callable[[int, int], torch.Tensor],
    choices: torch.Tensor,
    weights: torch.Tensor,
    owner: Callable[[int], int],
    hidden: int,
    left_out: Callable[[int], bool] = lambda expert: False,
) -> torch.Tensor:
    """``[n, H]`` bf16: for each token the weighted sum of its experts' answers.

    ``answer(token, expert)`` is ``[H]`` bf16. ``owner`` returns the rank of an expert. Each rank
    computes ``part = fma(weight, row, part)`` in f32, choice by choice; parts are rounded to 24
    bits, and added in the order of the ranks' first choices. Experts for which ``left_out`` is true
    add nothing.
    """
    out = torch.zeros((choices.shape[0], hidden), dtype=torch.bfloat16)
    for token, row in enumerate(choices.tolist()):
        parts: dict[int, torch.Tensor] = {}
        for k, expert in enumerate(row):
            if expert < 0 or left_out(expert):
                continue
            weight, part = (
                weights[token, k].expand(hidden),
                parts.get(owner(expert), torch.zeros(hidden)),
            )
            parts[owner(expert)] = formats.fma(weight, answer(token, expert).float(), part)
        total = torch.zeros(hidden)
        for part in parts.values():
            total += formats.nearest_of_24_bits(part)
        out[token] = total.bfloat16()
    return out


def nvfp4_swizzled(scales: torch.Tensor) -> torch.Tensor:
    """``[m, H/16]`` bytes of one expert, ``m`` a multiple of 128, as ``[32, 4, m/128, 4, H/64]``:
    the 128x4 tiles."""
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).permute(2, 1, 0, 4, 3).contiguous()
