"""The layout of received rows in normal mode: by token, or by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl.ep._tensors import align, align_all

#: Estimates of received rows have headroom for one sixteenth more rows, and at least for 64.
HEADROOM_PART, MIN_HEADROOM = 16, 64


class RowLayout(NamedTuple):
    """The layout of received rows: one for each token, or one for each token and local expert."""

    tokens: int
    """Received tokens, or an upper bound if the host has no counts."""
    alignment: int | None = None
    """The alignment of each expert's first row; None for rows by token."""
    rows: int | None = None
    """Rows by expert, with the gaps between experts; None for rows by token."""
    min_combine_rows: int = 0
    """The least rows of a combine's input, as far as the host has counts."""
    is_view: bool = False
    """Whether the rows are a view of the communication buffer."""

    @staticmethod
    def of_counts(counts: tuple[list[int], list[int]], alignment: int | None) -> RowLayout:
        """The layout for these counts of tokens by rank and by local expert."""
        per_rank, per_expert = counts
        tokens = sum(per_rank)
        if alignment is None:
            return RowLayout(tokens, min_combine_rows=tokens)
        aligned = align_all(per_expert, alignment)
        return RowLayout(tokens, alignment, sum(aligned), sum(aligned[:-1]) + per_expert[-1])

    @staticmethod
    def upper_bound(
        tokens: int, alignment: int | None, top_k: int, local_experts: int
    ) -> RowLayout:
        """The layout with room for ``tokens`` tokens, for any choices of local experts."""
        rows = (
            None if alignment is None else max_expert_rows(tokens, top_k, local_experts, alignment)
        )
        return RowLayout(tokens, alignment, rows)

    def num_rows(self) -> int:
        """Rows of the output tensor."""
        return self.tokens if self.rows is None else self.rows

    def with_headroom(self, limit: RowLayout) -> RowLayout:
        """The capacity for the next call: this size and headroom, but no more than ``limit``."""
        tokens = min(add_headroom(self.tokens), limit.tokens)
        if self.alignment is None:
            return RowLayout(tokens)
        rows = min(add_headroom(self.num_rows()), limit.num_rows())
        # The last expert's rows have a gap behind them, up to the alignment.
        return RowLayout(tokens, self.alignment, align(rows, self.alignment))


def add_headroom(count: int) -> int:
    """Adds one sixteenth of headroom, and at least 64 rows."""
    return count + max(count // HEADROOM_PART, MIN_HEADROOM)


def max_expert_rows(tokens: int, top_k: int, local_experts: int, alignment: int) -> int:
    """The most rows by expert of ``tokens`` tokens, with the gaps between experts."""
    rows = tokens * min(top_k, local_experts)
    return align(rows + (alignment - 1) * local_experts, alignment)


def rows_of_choices(choices: torch.Tensor) -> torch.Tensor:
    """``[m, K]`` i32: for rows by token, the row of each choice, or -1."""
    rows = torch.arange(choices.shape[0], dtype=torch.int32, device=choices.device)
    return torch.where(choices >= 0, rows.unsqueeze(1), -1)
