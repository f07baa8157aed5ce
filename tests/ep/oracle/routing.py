"""The receivers of tokens. A token is named by its rank and its number there."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes that all ranks share: experts are numbered rank by rank, ranks node by node."""

    ranks: int
    experts: int
    nodes: int = 1

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes

    def owner(self, expert: int) -> int:
        """The rank of an expert."""
        return expert // self.local


#: A rank and the number of a token there.
Token = tuple


def tokens_of_expert(choices: list[torch.Tensor], expert: int) -> list[Token]:
    """The tokens that chose an expert, once or several times, by rank and number. ``choices``:
    ``[n, K]`` of each rank, -1 for none."""
    found = []
    for rank, of_rank in enumerate(choices):
        for token, row in enumerate(of_rank.tolist()):
            if expert in row:
                found.append((rank, token))
    return found


def tokens_of_rank(choices: list[torch.Tensor], shape: Shape, rank: int) -> list[Token]:
    """The tokens that chose any expert of a rank, each once, by rank and number."""
    found = []
    for source, of_source in enumerate(choices):
        for token, row in enumerate(of_source.tolist()):
            if places_on_rank(row, shape, rank):
                found.append((source, token))
    return found


def places_on_rank(row: list[int], shape: Shape, rank: int) -> list[int]:
    """The indices of a token's choices that are experts of a rank, ascending."""
    return [k for k, expert in enumerate(row) if expert >= 0 and shape.owner(expert) == rank]


def local_choices(row: list[int], shape: Shape, rank: int) -> list[int]:
    """A token's choices as numbers of one rank's experts; -1 for those of others."""
    places = places_on_rank(row, shape, rank)
    return [expert - rank * shape.local if k in places else -1 for k, expert in enumerate(row)]


def align(count: int, to: int) -> int:
    """The next multiple of ``to``."""
    while count % to:
        count += 1
    return count
