"""The plans of dispatches in normal mode on a GPU, one for each shape of calls."""

from __future__ import annotations

from typing import Any

from uccl import _core
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.workspace import Workspace


class ShapePlan:
    """The state that dispatches of one shape, and of about as many tokens, leave to the next."""

    def __init__(self, group: CudaGroup, shape: Any) -> None:
        """``shape`` is a :class:`uccl.ep._cuda.normal_dispatch.CallShape`."""
        self.shape = shape
        #: The engine's plan, with the estimate of the next received rows.
        self.native = _core.EpCudaDispatchPlan(group.native, shape)
        #: The workspace of the next dispatch, and the number of its stream.
        self.next_workspace: tuple[Workspace, int] | None = None


class ShapePlans:
    """The plans of one rank's end of a group."""

    def __init__(self, group: CudaGroup, count_timeout: float) -> None:
        """The host waits up to ``count_timeout`` seconds for counts."""
        self.group, self.count_timeout = group, count_timeout
        #: By the fields of a shape, and the bits of the number of tokens.
        self.plans: dict[tuple[Any, ...], ShapePlan] = {}
