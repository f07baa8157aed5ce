"""The layout of received rows in normal mode: by token, or by expert."""

from __future__ import annotations

import torch

from uccl._core import EpRowLayout as RowLayout

__all__ = ["RowLayout", "rows_of_choices"]


def rows_of_choices(choices: torch.Tensor) -> torch.Tensor:
    """``[m, K]`` i32: for rows by token, the row of each choice, or -1."""
    rows = torch.arange(choices.shape[0], dtype=torch.int32, device=choices.device)
    return torch.where(choices >= 0, rows.unsqueeze(1), -1)
