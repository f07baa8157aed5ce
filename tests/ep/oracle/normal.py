"""The first interface, many tokens: rows by rank, sums without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from .routing import Shape, Token, align, local_choices, places_on_rank, tokens_of_rank


@dataclass
class Layout:
    """The numbers of one rank's tokens by receiver."""

    per_rank: list[int]
    per_expert: list[int]
    in_rank: list[list[bool]]
    """Whether a token is sent to a rank, by token and rank."""


def layout(choices: torch.Tensor, shape: Shape) -> Layout:
    """Counts one rank's tokens, ``[n, K]``; a token counts once for a rank, and for each expert
    that it chose."""
    rows = choices.tolist()
    in_rank = [
        [bool(places_on_rank(row, shape, rank)) for rank in range(shape.ranks)] for row in rows
    ]
    per_rank = [sum(row[rank] for row in in_rank) for rank in range(shape.ranks)]
    per_expert = [sum(expert in row for row in rows) for expert in range(shape.experts)]
    return Layout(per_rank, per_expert, in_rank)


@dataclass
class Received:
    """The rows that one rank receives, in order of rank and token."""

    tokens: list[Token]
    choices: list[list[int]]
    """``[m][K]``: numbers of this rank's experts, -1 for those of others."""
    weights: torch.Tensor
    """``[m, K]`` f32: 0 for experts of others."""
    per_expert: list[int]
    """Tokens of each expert of this rank, aligned up."""
    prefix: list[list[int]]
    """``[R][R]``: tokens that the ranks up to and including the first send to the second."""


def dispatch(
    choices: list[torch.Tensor],
    weights: list[torch.Tensor],
    shape: Shape,
    rank: int,
    alignment: int,
) -> Received:
    """The rows that a rank receives; each belongs to one of ``tokens``. ``choices`` and
    ``weights``: ``[n, K]`` of each rank."""
    tokens = tokens_of_rank(choices, shape, rank)
    local = [
        local_choices(choices[source][token].tolist(), shape, rank) for source, token in tokens
    ]
    sent = torch.zeros((len(tokens), choices[0].shape[1]))
    for row, (source, token) in enumerate(tokens):
        for k, expert in enumerate(local[row]):
            if expert >= 0:
                sent[row, k] = weights[source][token, k]
    counts = [sum(expert in row for row in local) for expert in range(shape.local)]
    prefix = [[0] * shape.ranks for _ in range(shape.ranks)]
    for target in range(shape.ranks):
        sources = [source for source, _ in tokens_of_rank(choices, shape, target)]
        for source in range(shape.ranks):
            prefix[source][target] = sum(other <= source for other in sources)
    return Received(tokens, local, sent, [align(count, alignment) for count in counts], prefix)


def combine(
    answer: Callable[[int, int], torch.Tensor],
    choices: torch.Tensor,
    shape: Shape,
    biases: list[torch.Tensor],
    hidden: int,
) -> torch.Tensor:
    """``[n, H]`` bf16: for each token the biases, then the answers of its ranks, ascending, summed
    in f32.

    With several nodes, each node first sums the answers of its ranks and rounds the sum to bf16.
    ``answer(token, rank)`` is ``[H]`` bf16; ``biases`` are up to two ``[n, H]`` bf16.
    """
    out = torch.zeros((choices.shape[0], hidden), dtype=torch.bfloat16)
    for token, row in enumerate(choices.tolist()):
        total = torch.zeros(hidden)
        for bias in biases:
            total = total + bias[token].float()
        ranks = [rank for rank in range(shape.ranks) if places_on_rank(row, shape, rank)]
        answers = [(rank // shape.node_ranks, answer(token, rank).float()) for rank in ranks]
        if shape.nodes > 1:
            answers = rounded_by_node(answers, hidden)
        for _, values in answers:
            total = total + values
        out[token] = total.bfloat16()
    return out


def rounded_by_node(
    answers: list[tuple[int, torch.Tensor]], hidden: int
) -> list[tuple[int, torch.Tensor]]:
    """The sum of each node that answers, ascending, rounded to bf16."""
    sums: dict[int, torch.Tensor] = {}
    for node, values in answers:
        sums[node] = sums.get(node, torch.zeros(hidden)) + values
    return [(node, values.bfloat16().float()) for node, values in sums.items()]


def combine_weights(
    answer: Callable[[int, int], torch.Tensor], choices: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """``[n, K]`` f32: for each token the answers of its ranks, ``answer(token, rank)`` ``[K]`` f32,
    summed ascending."""
    out = torch.zeros(tuple(choices.shape))
    for token, row in enumerate(choices.tolist()):
        for rank in range(shape.ranks):
            if places_on_rank(row, shape, rank):
                out[token] = out[token] + answer(token, rank)
    return out
