"""Inputs of the benches of expert parallelism: drawn from a rank's number, so that every process
draws the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

#: Values of FP8 that share a scale.
GROUP = 128


@dataclass(frozen=True)
class Shape:
    """The shape of a call."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int

    @property
    def local_experts(self) -> int:
        """Experts of each rank."""
        return self.experts // self.ranks

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def row_bytes(form: str, hidden: int) -> int:
    """Bytes of a row on its way, with its scales."""
    by_form = {
        "fp8": hidden + hidden // 32,
        "nvfp4": hidden // 2 + hidden // 16,
        "logfmt": hidden // GROUP * 164,
    }
    return by_form.get(form, 2 * hidden)


def choices(shape: Shape, rank: int) -> torch.Tensor:
    """``[n, K]`` i64: the experts of a rank's tokens."""
    draw = torch.Generator().manual_seed(rank)
    return torch.rand(shape.tokens, shape.experts, generator=draw).topk(shape.top_k).indices


def ranks_of(shape: Shape, ids: torch.Tensor) -> torch.Tensor:
    """``[n, R]`` bool: the ranks that have experts of a token."""
    owners = ids // shape.local_experts
    return torch.stack([(owners == rank).any(1) for rank in range(shape.ranks)], 1)


@cache
def rows_between(shape: Shape) -> list[list[int]]:
    """Rows from each rank to each in normal mode, which sends a token once to a rank."""
    return [ranks_of(shape, choices(shape, rank)).sum(0).tolist() for rank in range(shape.ranks)]


def rows_by_choice(shape: Shape) -> list[list[int]]:
    """Rows from each rank to each in low latency mode, which sends a token once for each of its
    experts."""
    owners = [choices(shape, rank).flatten() // shape.local_experts for rank in range(shape.ranks)]
    return [torch.bincount(each, minlength=shape.ranks).tolist() for each in owners]


class Routing:
    """A rank's tokens, and the ranks that each is sent to."""

    def __init__(self, shape: Shape, rank: int, device: str = "cuda") -> None:
        self.shape, self.rank = shape, rank
        draw = torch.Generator().manual_seed(1000 + rank)
        ids = choices(shape, rank)
        x = torch.randn(shape.tokens, shape.hidden, generator=draw).bfloat16()
        scales = torch.rand(shape.tokens, shape.hidden // GROUP, generator=draw)
        weights = torch.rand(shape.tokens, shape.top_k, generator=draw)
        self.ids, self.token_in_rank = ids.to(device), ranks_of(shape, ids).to(device)
        self.x, self.weights = x.to(device), weights.to(device)
        self.quantised = self.x.to(torch.float8_e4m3fn), scales.to(device)

    def integers(self) -> torch.Tensor:
        """``[n, H]`` bf16 of small integers: sums of them are exact in any order."""
        tokens, hidden = self.x.shape
        column = torch.arange(hidden, device=self.x.device)
        row = torch.arange(self.rank, self.rank + tokens, device=self.x.device)
        return ((row[:, None] + column) % 9 - 4).bfloat16()


def shape_of(args: Any) -> Shape:
    """The shape that a bench's options describe."""
    return Shape(args.ranks, args.num_tokens, args.hidden, args.num_topk, args.num_experts)
