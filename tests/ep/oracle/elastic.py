"""The second interface: rows by rank or by expert, sums that are rounded once, twice or three
times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from .routing import (
    Shape,
    Token,
    align,
    local_choices,
    places_on_rank,
    tokens_of_expert,
    tokens_of_rank,
)


@dataclass
class Received:
    """The tokens that one rank receives, in order of rank and number."""

    tokens: list[Token]
    """The token of each row without ``do_expand``."""
    choices: list[list[int]]
    """``[m][K]``: numbers of this rank's experts, -1 for those of others."""
    counts: list[int]
    """Tokens of each expert."""
    aligned: list[int]
    """The counts, aligned up: the rows that an expert has with ``do_expand``."""
    per_scaleup_rank: list[int]
    """Running sums of tokens, by the number of their source within its node."""
    expanded: list[Token | None]
    """With ``do_expand``: the token of each row; None between experts and behind the last."""
    metadata: list[list[int]]
    """``[m][1 + K]``: ``rank * T + token``, and with ``do_expand`` the row of each choice, or
    -1."""

    def psum_per_expert(self, do_expand: bool) -> list[int]:
        """Sums of aligned counts; with ``do_expand`` where an expert's rows begin, and its real
        count."""
        starts = [sum(self.aligned[:expert]) for expert in range(len(self.aligned))]
        ends = self.counts if do_expand else self.aligned
        return [start + end for start, end in zip(starts, ends)]


def dispatch(
    choices: list[torch.Tensor], shape: Shape, rank: int, most: int, alignment: int
) -> Received:
    """The tokens that a rank receives. ``choices``: ``[n, K]`` of each rank; ``most``: T."""
    tokens = tokens_of_rank(choices, shape, rank)
    local = [
        local_choices(choices[source][token].tolist(), shape, rank) for source, token in tokens
    ]
    by_expert = [
        tokens_of_expert(choices, expert)
        for expert in range(rank * shape.local, (rank + 1) * shape.local)
    ]
    counts = [len(of_expert) for of_expert in by_expert]
    aligned = [align(count, alignment) for count in counts]
    expanded: list[Token | None] = []
    for of_expert, count in zip(by_expert, aligned):
        expanded += of_expert + [None] * (count - len(of_expert))
    metadata = []
    for (source, token), row in zip(tokens, local):
        rows = [
            # A choice that names an expert a second time has no row.
            -1
            if expert < 0 or expert in row[:k]
            else sum(aligned[:expert]) + by_expert[expert].index((source, token))
            for k, expert in enumerate(row)
        ]
        metadata.append([source * most + token, *rows])
    local_numbers = [source % shape.node_ranks for source, _ in tokens]
    per_scaleup_rank = [
        sum(number <= last for number in local_numbers) for last in range(shape.node_ranks)
    ]
    return Received(tokens, local, counts, aligned, per_scaleup_rank, expanded, metadata)


def worst_expanded_rows(shape: Shape, most: int, top_k: int, alignment: int) -> int:
    """The number of rows with ``do_expand`` if the host does not wait for counts."""
    rows = shape.ranks * most * min(top_k, shape.local)
    return align(rows + (alignment - 1) * shape.local, alignment)


@dataclass(frozen=True)
class Rounding:
    """Which sums are rounded to bf16 before they travel."""

    local: bool
    """Sums of the expanded rows of one rank."""
    node: bool
    """Sums of the ranks of one node."""

    @staticmethod
    def of(multiple_reduction: bool, nodes: int) -> Rounding:
        """The roundings of a buffer, with or without multiple reductions."""
        return Rounding(multiple_reduction, multiple_reduction and nodes > 1)


#: A summand: the highest choice that it stands for, the rank that it comes from, and its values in
#: f32.
Part = tuple


def combine(
    parts: Callable[[int], list[Part]],
    biases: list[torch.Tensor],
    shape: Shape,
    rounding: Rounding,
    size: tuple[int, int],
) -> torch.Tensor:
    """``[n, H]`` bf16, of ``size``: of each token the biases, then its parts, summed in f32.

    ``parts(token)`` are the returned rows: one from each rank, or with ``do_expand`` one for each
    choice. Sums are in ascending order of the choices.
    """
    out = torch.zeros(size, dtype=torch.bfloat16)
    for token in range(size[0]):
        of_token = parts(token)
        if rounding.local:
            of_token = rounded_by(of_token, lambda rank: rank)
        if rounding.node:
            of_token = rounded_by(of_token, lambda rank: rank // shape.node_ranks)
        total = torch.zeros(size[1])
        for bias in biases:
            total = total + bias[token].float()
        for _, _, values in sorted(of_token, key=lambda part: part[0]):
            total = total + values
        out[token] = total.bfloat16()
    return out


def rounded_by(parts: list[Part], place: Callable[[int], int]) -> list[Part]:
    """Sums the parts of each place, a rank or a node, and rounds to bf16. A sum stands for its
    highest choice."""
    sums = []
    for here in {place(rank) for _, rank, _ in parts}:
        of_place = sorted(
            (part for part in parts if place(part[1]) == here), key=lambda part: part[0]
        )
        total = of_place[0][2]
        for _, _, values in of_place[1:]:
            total = total + values
        sums.append((of_place[-1][0], of_place[-1][1], total.bfloat16().float()))
    return sums


def masters(row: list[int], shape: Shape) -> list[tuple[int, int]]:
    """For each rank of a token: the highest of the token's choices there, and the rank."""
    found = []
    for rank in range(shape.ranks):
        places = places_on_rank(row, shape, rank)
        if places:
            found.append((places[-1], rank))
    return found
