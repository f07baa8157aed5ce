"""The shapes of dispatches in normal mode on a GPU, and the state that is kept for each."""

from __future__ import annotations

from typing import Any, NamedTuple

from uccl import _core
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.workspace import Workspace
from uccl.ep._row_layout import RowLayout


class CallShape(NamedTuple):
    """The properties of a dispatch that calls share; all but the number of tokens."""

    hidden: int
    """Values of a row."""
    row_bytes: int
    scales: int
    """Words of a row's scales."""
    top_k: int
    num_experts: int
    alignment: int | None
    choice_words: int
    """Words of each returned choice, or 0."""
    has_weights: bool
    zero_foreign_weights: bool
    zero_gaps: bool
    is_col_major: bool
    zero_copy: bool
    """Whether received rows may be a view of the communication buffer."""
    fills_tables: bool
    """Whether the dispatch fills the handle's tables: one that reuses a handle does not."""
    has_estimate: bool
    """Whether memory for received rows may be allocated from an estimate, before the host has
    counts."""


class ShapePlan:
    """The state that dispatches of one shape, and of about as many tokens, leave to the next."""

    def __init__(self, shape: CallShape, ranks: int) -> None:
        self.shape = shape
        #: The engine's plan, with the estimate of the next received rows.
        self.native = _core.EpCudaDispatchShape(shape, ranks)
        #: The most tokens of any rank that the pool has room for; -1 before the first check.
        self.max_tokens = -1
        #: The workspace of the next dispatch, and the number of its stream.
        self.next_workspace: tuple[Workspace, int] | None = None

    def update_estimate(self, received: RowLayout, max_tokens: int) -> None:
        """Remembers the received size as the estimate for the next call, where each rank has up to
        ``max_tokens`` tokens."""
        self.native.learn(received, max_tokens)


class ShapePlans:
    """The plans of one rank's end of a group."""

    def __init__(self, group: CudaGroup, count_timeout: float) -> None:
        """The host waits up to ``count_timeout`` seconds for counts."""
        self.group, self.count_timeout = group, count_timeout
        self.can_estimate = group.native.can_fuse
        self.plans: dict[tuple[Any, ...], ShapePlan] = {}

    def plan_for(self, *key: Any) -> ShapePlan:
        """The plan for the fields of a :class:`CallShape`, and the bits of the number of tokens."""
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = ShapePlan(CallShape(*key[:-1]), self.group.ranks)
        return plan
