"""The layout of rows in normal mode's dispatches on a GPU, and the workspace of small parts beside
them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl import _core
from uccl.ep._group import align, align_all

#: A guess has room for one sixteenth more rows than the last call, and at least 64 more.
SPARE, LEAST_SPARE = 16, 64
#: Alignment of a part, in words of four bytes: torch has other kernels for tensors that are not so
#: aligned.
PART_WORDS = 4


class Placed(NamedTuple):
    """The layout of rows: by token, or by expert."""

    tokens: int
    """Tokens, or the most that may arrive if the host has no counts."""
    alignment: int | None = None
    """The alignment of each expert's rows; None by token."""
    rows: int | None = None
    """Rows by expert."""
    least: int = 0
    """The least rows of a combine's input, as far as the host has counts."""
    stays: bool = False
    """Whether rows stay in the buffer, at the places where they arrived."""

    @staticmethod
    def of(counts: tuple[list[int], list[int]], alignment: int | None) -> Placed:
        """The layout for these counts of tokens by rank and by expert."""
        of_ranks, per_expert = counts
        tokens = sum(of_ranks)
        if alignment is None:
            return Placed(tokens, least=tokens)
        aligned = align_all(per_expert, alignment)
        return Placed(tokens, alignment, sum(aligned), sum(aligned[:-1]) + per_expert[-1])

    @staticmethod
    def at_most(tokens: int, alignment: int | None, top_k: int, local: int) -> Placed:
        """The layout with room for so many tokens, with any choice of so many local experts."""
        rows = None if alignment is None else most_rows(tokens, top_k, local, alignment)
        return Placed(tokens, alignment, rows)

    def length(self) -> int:
        """Rows of the output."""
        return self.tokens if self.rows is None else self.rows

    def and_more(self, most: Placed) -> Placed:
        """The layout with headroom for the next call, limited to ``most``."""
        tokens = min(with_spare(self.tokens), most.tokens)
        if self.alignment is None:
            return Placed(tokens)
        rows = min(with_spare(self.length()), most.length())
        # Rounded up for the alignment behind the last expert's rows.
        return Placed(tokens, self.alignment, align(rows, self.alignment))


def words(length: int) -> int:
    """Rounds a length in bytes up to words of four bytes."""
    return align(length, 4) // 4


def with_spare(count: int) -> int:
    """Adds one sixteenth of headroom, at least 64 rows."""
    return count + max(count // SPARE, LEAST_SPARE)


def most_rows(tokens: int, top_k: int, local: int, alignment: int) -> int:
    """The most rows by expert for so many tokens."""
    return align(tokens * min(top_k, local) + (alignment - 1) * local, alignment)


class Parts(NamedTuple):
    """Parts of one piece of memory: their offsets or lengths, in words of four bytes."""

    spare: int
    """Scratch of the first combine."""
    scratch: int
    """Scratch of the dispatch."""
    starts: int
    """``[R + 1]``: the first token of each rank."""
    per_expert: int
    """``[E/R]``: how many tokens chose each expert."""
    src_info: int
    """``[m]``: numbers of tokens at their ranks."""
    origin: int
    """``[m]``: ranks of tokens, and this rank's index among the token's ranks."""
    ends: int
    """``[E/R]``: the row behind the last of each expert, where rows are by expert."""
    metadata: int
    """``[m, K + 2]``, where rows are by expert."""
    choices: int
    weights: int
    scales: int

    def cut(self) -> Cut:
        """The offsets of parts with these lengths, one behind the other."""
        at, end = [], 0
        for length in self:
            at.append(end)
            end += align(length, PART_WORDS)
        return Cut(Parts(*at), end)


class Cut:
    """Offsets of the parts in a piece of memory, and its length in words."""

    def __init__(self, at: Parts, length: int) -> None:
        self.at, self.length = at, length
        #: The engine's copy of the offsets.
        self.native = _core.EpCudaParts(at)


class Small(NamedTuple):
    """One piece of memory for all small parts of a dispatch."""

    memory: torch.Tensor
    start: int
    """The address of the memory."""
    cut: Cut

    def tensor(
        self,
        part: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.int32,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A part as a tensor that is no view for torch: autograd then allows writes in place,
        regardless of when the memory was made."""
        made = torch.empty(0, dtype=dtype, device=self.memory.device)
        return made.set_(
            self.memory.untyped_storage(),
            4 * part // dtype.itemsize,
            shape,
            strides or (*shape[1:], 1),
        )
