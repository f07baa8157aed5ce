"""The shapes of dispatches in normal mode on a GPU, and the state that is kept for each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from uccl import _core
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.workspace import Workspace, WorkspaceLayout, WorkspaceOffsets
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
        self.shape, self._ranks = shape, ranks
        self.native = _core.EpCudaDispatchShape(shape)
        #: The most tokens of any rank that the pool has room for; -1 before the first check.
        self.max_tokens = -1
        #: The estimated layout of the next received rows.
        self.estimate: RowLayout | None = None
        #: The workspace of the next dispatch, and the number of its stream.
        self.next_workspace: tuple[Workspace, int] | None = None

    def update_estimate(self, received: RowLayout, max_tokens: int) -> None:
        """Remembers the received size as the estimate for the next call, where each rank has up to
        ``max_tokens`` tokens."""
        shape, ranks = self.shape, self._ranks
        if shape.has_estimate:
            limit = RowLayout.upper_bound(
                ranks * max_tokens, shape.alignment, shape.top_k, shape.num_experts // ranks
            )
            self.estimate = received.with_headroom(limit)


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


@lru_cache(maxsize=64)
def workspace_layout(
    shape: CallShape, ranks: int, scratch: tuple[int, int], row_layout: RowLayout | None
) -> WorkspaceLayout:
    """The layout of a workspace: words of scratch for a combine and for the dispatch, and the
    tables and small tensors for rows of ``row_layout``, if there is one."""
    if row_layout is None:
        return WorkspaceOffsets(*scratch, 0, 0, 0, 0, 0, 0, 0, 0, 0).packed()
    tokens, local_experts = row_layout.tokens, shape.num_experts // ranks
    is_by_expert = row_layout.alignment is not None
    tables = (1 + ranks, local_experts, tokens, tokens) if shape.fills_tables else (0, 0, 0, 0)
    expert_tables = (0, 0)
    if shape.fills_tables and is_by_expert:
        expert_tables = local_experts, (2 + shape.top_k) * tokens
    choices = tokens * shape.top_k * shape.choice_words
    weights = row_layout.num_rows() if is_by_expert else tokens * shape.top_k
    scales = row_layout.num_rows() * shape.scales
    if shape.is_col_major or row_layout.is_view:
        scales = 0
    return WorkspaceOffsets(
        *scratch, *tables, *expert_tables, choices, weights if shape.has_weights else 0, scales
    ).packed()
