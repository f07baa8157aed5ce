"""How the rows of normal mode's dispatches lie on a GPU, and the small parts of memory that come with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl import _core
from uccl.ep._group import align, align_all

#: Rows that a guess has room for beyond those that came last: one of so many, and no fewer than these.
SPARE, LEAST_SPARE = 16, 64
#: Words of four bytes that a part of memory is aligned to: kernels of torch's that read one are others where it is not.
PART_WORDS = 4


class Placed(NamedTuple):
    """How rows lie: by token, or by expert."""

    tokens: int
    """How many there are, or, where the host does not know, may be."""
    alignment: int | None = None
    """Of the rows of each expert; None by token."""
    rows: int | None = None
    """How many there are by expert."""
    least: int = 0
    """Rows that a combine needs, as far as the host knows."""
    stays: bool = False
    """Whether they are in the buffer, where they arrived: their places are those of the buffer's rows."""

    @staticmethod
    def of(counts: tuple[list[int], list[int]], alignment: int | None) -> Placed:
        """As tokens lie of which so many are from each rank, and so many chose each expert."""
        of_ranks, per_expert = counts
        tokens = sum(of_ranks)
        if alignment is None:
            return Placed(tokens, least=tokens)
        aligned = align_all(per_expert, alignment)
        return Placed(tokens, alignment, sum(aligned), sum(aligned[:-1]) + per_expert[-1])

    @staticmethod
    def at_most(tokens: int, alignment: int | None, top_k: int, local: int) -> Placed:
        """As rows of so many tokens lie, whatever they choose of so many experts."""
        rows = None if alignment is None else most_rows(tokens, top_k, local, alignment)
        return Placed(tokens, alignment, rows)

    def length(self) -> int:
        """How many rows there are."""
        return self.tokens if self.rows is None else self.rows

    def and_more(self, most: Placed) -> Placed:
        """Room for so much, and for some more, if there is no more than ``most``."""
        tokens = min(with_spare(self.tokens), most.tokens)
        if self.alignment is None:
            return Placed(tokens)
        rows = min(with_spare(self.length()), most.length())
        # What fits then fits with the rows behind the last expert's, that alignment leaves.
        return Placed(tokens, self.alignment, align(rows, self.alignment))


def words(length: int) -> int:
    """So many bytes in words of four."""
    return align(length, 4) // 4


def with_spare(count: int) -> int:
    """Some more."""
    return count + max(count // SPARE, LEAST_SPARE)


def most_rows(tokens: int, top_k: int, local: int, alignment: int) -> int:
    """The most rows by expert of so many tokens."""
    return align(tokens * min(top_k, local) + (alignment - 1) * local, alignment)


class Parts(NamedTuple):
    """Parts of one piece of memory: where each begins, in words of four bytes, or how long it is."""

    spare: int
    """Scratch of the first combine."""
    scratch: int
    """Of the dispatch."""
    starts: int
    """``[R + 1]``: the first token of each rank."""
    per_expert: int
    """``[E/R]``: how many tokens chose each expert."""
    src_info: int
    """``[m]``: numbers of tokens at their ranks."""
    origin: int
    """``[m]``: ranks of tokens."""
    ends: int
    """``[E/R]``: behind the last row of each expert, where rows are by expert."""
    metadata: int
    """``[m, K + 2]``, where rows are by expert."""
    choices: int
    weights: int
    scales: int

    def cut(self) -> Cut:
        """Parts of these lengths, one behind the other."""
        at, end = [], 0
        for length in self:
            at.append(end)
            end += align(length, PART_WORDS)
        return Cut(Parts(*at), end)


class Cut:
    """How a piece of memory of so many words is cut into parts."""

    def __init__(self, at: Parts, length: int) -> None:
        self.at, self.length = at, length
        #: What the engine knows of it.
        self.native = _core.EpCudaParts(at)


class Small(NamedTuple):
    """One piece of memory for all small parts of a dispatch."""

    memory: torch.Tensor
    start: int
    """Its address."""
    cut: Cut

    def tensor(
        self, part: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A part, as a tensor that to torch is no view of another one: it may be written to in place where autograd looks, whenever the memory
        was made."""
        made = torch.empty(0, dtype=dtype, device=self.memory.device)
        return made.set_(self.memory.untyped_storage(), 4 * part // dtype.itemsize, shape, strides or (*shape[1:], 1))
