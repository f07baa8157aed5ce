"""Reductions on CPUs, in a fixed order, so that every run and every rank has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_STEPS: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: lambda total, one: total.add_(one),
    dist.ReduceOp.AVG: lambda total, one: total.add_(one),
    dist.ReduceOp.PRODUCT: lambda total, one: total.mul_(one),
    dist.ReduceOp.MIN: lambda total, one: torch.minimum(total, one, out=total),
    dist.ReduceOp.MAX: lambda total, one: torch.maximum(total, one, out=total),
    dist.ReduceOp.BAND: lambda total, one: total.bitwise_and_(one),
    dist.ReduceOp.BOR: lambda total, one: total.bitwise_or_(one),
    dist.ReduceOp.BXOR: lambda total, one: total.bitwise_xor_(one),
}


class Reduction:
    """A reduction of tensors like ``tensor``. Refused before a byte moves: on GPUs, and where there is no such
    reduction."""

    def __init__(self, op: Any, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise RuntimeError(
                "the backend uccl copies and does not reduce on GPUs: use the backend nccl for this group, "
                'or one of dist.new_group(backend="nccl")'
            )
        # A ReduceOp compares as its kind does, and has no hash of its own.
        steps = [(kind, step) for kind, step in _STEPS.items() if op == kind]
        if not steps:
            raise RuntimeError(f"the backend uccl does not have the reduction {op}")
        if tensor.is_sparse:
            raise RuntimeError("the backend uccl does not reduce sparse tensors: use gloo")
        self._kind, self._step = steps[0]

    def into(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Reduces the ranks' parts, beginning with rank 0's."""
        total = parts[0]
        for part in parts[1:]:
            self._step(total, part)
        if self._kind == dist.ReduceOp.AVG:
            is_exact = not (total.is_floating_point() or total.is_complex())
            total.div_(len(parts), rounding_mode="trunc" if is_exact else None)
        output.copy_(total.view(output.shape))
