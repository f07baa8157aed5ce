"""Dispatches of normal mode on a GPU.

The engine's plan decides on the launches and asks for memory: a workspace, and rows. Only the
host's time before the launch delays a call: the rest runs beside the GPU's work. So objects that
follow from the shape of a call are kept for the next one, small tensors share one allocation, and
they are made after the launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl import _core
from uccl.ep._backend import DispatchOptions, Received, Tokens
from uccl.ep._checks import check
from uccl.ep._cuda.plans import ShapePlan, ShapePlans
from uccl.ep._cuda.routing import CudaHandle, DispatchLayout, Routing
from uccl.ep._cuda.workspace import Workspace
from uccl.ep._row_layout import RowLayout
from uccl.ep._tensors import RowScales, TokenScales, address, scales_for, scales_in


class CallShape(NamedTuple):
    """The properties of a dispatch that calls share; all but the number of tokens. The native
    module reads them by name."""

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


class SendArgs:
    """The arguments about sent tokens. The native module reads them by name; 0 is no address."""

    __slots__ = (
        "rows",
        "scales",
        "weights",
        "experts",
        "is_64",
        "token_in_rank",
        "per_expert",
        "tokens",
        "layout",
        "cached",
        "row_layout",
        "max_tokens",
        "needs_counts",
        "max_blocks",
        "stream",
    )
    rows: int
    scales: TokenScales | None
    weights: int
    experts: int
    is_64: bool
    """Whether an expert is an i64."""
    token_in_rank: int | None
    """For tokens without choices: a byte by token and rank."""
    per_expert: int
    """With ``token_in_rank``: i32 by expert."""
    tokens: int
    layout: _core.EpCudaDispatchLayout | None
    """A counted layout of the tokens."""
    cached: _core.EpCudaNormalHandle | None
    """The handle of an earlier dispatch to the same rows."""
    row_layout: RowLayout | None
    """The layout of received rows; None: as many as arrive."""
    max_tokens: int | None
    """The most tokens of any rank; None: any number, but with rows for the worst case their part."""
    needs_counts: bool
    """Whether a dispatch that reuses a handle waits for counts, if the host has none."""
    max_blocks: int
    stream: int


class NormalDispatch:
    """A prepared dispatch. The engine asks it for memory."""

    def __init__(
        self,
        plans: ShapePlans,
        x: Tokens,
        weights: torch.Tensor | None,
        routing: Routing,
        options: DispatchOptions,
    ) -> None:
        (rows, scales), group = x, plans.group
        check("x", rows, (None, None), device=group.device)
        tokens, hidden = rows.shape
        if tokens != routing.tokens:
            raise ValueError(f"x has {tokens} tokens, and {routing.tokens} are routed")
        if weights is not None:
            shape = (tokens, routing.top_k)
            check("topk_weights", weights, shape, torch.float32, device=group.device)
        self._plans, self._group, self._routing, self._options = plans, group, routing, options
        # The dispatch reads these tensors until its work has ended.
        self._rows, self._scales, self._weights = rows, scales, weights
        self._token_scales = scales_in(scales, tokens, group.device)
        self._plan = self._plan_of_shape(tokens, hidden)
        self._shape: CallShape = self._plan.shape
        self._stream = group.stream()
        #: The first workspace, and that with the tables of received rows.
        self._own: Workspace | None = None
        self._tables: Workspace | None = None
        #: None for rows that are a view of the communication buffer.
        self._row_tensor: torch.Tensor | None = None
        #: None also where the workspace has the scales.
        self._scale_tensor: torch.Tensor | None = None

    def _plan_of_shape(self, tokens: int, hidden: int) -> ShapePlan:
        """The plan of dispatches like this one."""
        options, routing, scales = self._options, self._routing, self._token_scales
        row_bytes, scale_words = (
            hidden * self._rows.element_size(),
            0 if scales is None else scales.token_words,
        )
        choice_words = 0 if options.choice_dtype is None else options.choice_dtype.itemsize // 4
        is_col_major = scales is not None and options.is_col_major
        # A tuple is made faster than a shape, which a plan makes once.
        key = (
            hidden,
            row_bytes,
            scale_words,
            routing.top_k,
            routing.num_experts,
            options.alignment,
            choice_words,
            self._weights is not None,
            options.zero_foreign_weights,
            options.zero_gaps,
            is_col_major,
            options.zero_copy,
            routing.cached is None,
            tokens.bit_length(),
        )
        plan = self._plans.plans.get(key)
        if plan is None:
            shape = CallShape(
                hidden=hidden,
                row_bytes=row_bytes,
                scales=scale_words,
                top_k=routing.top_k,
                num_experts=routing.num_experts,
                alignment=options.alignment,
                choice_words=choice_words,
                has_weights=self._weights is not None,
                zero_foreign_weights=options.zero_foreign_weights,
                zero_gaps=options.zero_gaps,
                is_col_major=is_col_major,
                zero_copy=options.zero_copy,
                fills_tables=routing.cached is None,
            )
            plan = self._plans.plans[key] = ShapePlan(self._group, shape)
        return plan

    def run(self) -> tuple[Received, CudaHandle, list[int]]:
        """Sends tokens, and returns the received ones, the handle, and the tokens of each local
        expert where the host waits for counts."""
        plan, routing, group = self._plan, self._routing, self._group
        cached, layout = routing.cached, routing.layout
        if cached is not None:
            group.keep_for(self._stream, cached.stream, cached.memory_in_use())
        elif layout is not None:
            group.keep_for(self._stream, layout.stream, (layout.memory,))
        result = plan.native.dispatch(
            group.native, self._send_args(), self, self._plans.count_timeout
        )
        own, tables = self._own, self._tables
        assert own is not None and tables is not None, "a dispatch has a workspace"
        returned = cached or CudaHandle(
            self._plans,
            result.handle,
            routing,
            own.memory,
            None if layout is None else layout.memory,
            tables,
            self._stream,
            own.address + 4 * own.layout.combine_scratch,
        )
        received, counts = self._received(result.row_layout, result.view, tables), result.per_expert
        if counts is None:
            return received, returned, []
        if result.next_workspace is not None:
            plan.next_workspace = self._new_workspace(result.next_workspace), self._stream
        return received, returned, counts

    def _send_args(self) -> SendArgs:
        options, routing, args = self._options, self._routing, SendArgs()
        idx, ranks, layout, cached = routing.topk_idx, routing.ranks, routing.layout, routing.cached
        args.rows, args.scales = address(self._rows), self._token_scales
        args.weights, args.experts = address(self._weights), address(idx)
        args.is_64 = idx is not None and idx.dtype == torch.int64
        args.token_in_rank, args.per_expert = None, 0
        if ranks is not None:
            args.token_in_rank, args.per_expert = address(ranks[0]), address(ranks[1])
        args.tokens = routing.tokens
        args.layout = None if layout is None else layout.native
        args.cached = None if cached is None else cached.native
        args.row_layout, args.max_tokens = options.row_layout, options.max_tokens
        args.needs_counts, args.max_blocks = options.needs_counts, options.max_blocks
        args.stream = self._stream
        return args

    # The engine calls the next four methods.

    def workspace(self, layout: _core.EpCudaWorkspaceLayout, waits: bool) -> int:
        """The address of a workspace. If the call ``waits`` for counts, it may be the one that the
        call before has left; a captured dispatch has memory of its own, and never waits."""
        made = None
        if waits:
            refuse_in_graph(self._routing.layout)
            ready, self._plan.next_workspace = self._plan.next_workspace, None
            if ready is not None and ready[0].layout.is_same(layout) and ready[1] == self._stream:
                made = ready[0]
        made = self._tables = made or self._new_workspace(layout)
        self._own = self._own or made
        return made.address

    def rows(self, num_rows: int) -> int:
        """The address of memory for received rows."""
        shape = (num_rows, self._shape.hidden)
        rows = self._row_tensor = self._group.empty(shape, self._rows.dtype)
        return address(rows)

    def scales(self, num_rows: int) -> RowScales:
        """Memory for the rows' scales, where those of one channel are contiguous."""
        scales = self._scale_tensor = scales_for(self._scales, num_rows, True)
        assert scales is not None, "a shape with scales is that of a call with scales"
        row_stride, word_stride = scales.stride()
        return RowScales(address(scales), row_stride, word_stride)

    def announce_too_many(self) -> None:
        """Tells the other ranks, which would wait for this one, that it has too many tokens."""
        # The work of a captured graph is not done now, on any rank.
        if not torch.cuda.is_current_stream_capturing():
            self._group.native.announce_too_many(self._stream)

    def _new_workspace(self, layout: _core.EpCudaWorkspaceLayout) -> Workspace:
        memory = self._group.empty((layout.len,), torch.int32)
        return Workspace(memory, memory.data_ptr(), layout)

    def _received(
        self, layout: RowLayout, view: _core.EpCudaZeroCopyView | None, workspace: Workspace
    ) -> Received:
        """The caller's tensors, with the rows of the layout."""
        shape, offsets, scales = self._shape, workspace.layout, self._scales
        tokens, num_rows = layout.tokens, layout.num_rows()
        choices = weights = None
        if self._options.choice_dtype is not None:
            choice_shape = (tokens, shape.top_k)
            choices = workspace.tensor(offsets.choices, choice_shape, self._options.choice_dtype)
        if shape.has_weights:
            by_token = layout.alignment is None
            weight_shape = (tokens, shape.top_k) if by_token else (num_rows,)
            weights = workspace.tensor(offsets.weights, weight_shape, torch.float32)
        if view is not None:
            return Received(*self._view_tensors(view), choices, weights)
        rows = self._row_tensor
        assert rows is not None, "rows that are no view have memory of their own"
        if rows.shape[0] > num_rows:
            rows.resize_((num_rows, shape.hidden))
        if scales is not None:
            scale_shape = (num_rows, *scales.shape[1:])
            scales = (
                self._scale_tensor
                if shape.is_col_major
                else workspace.tensor(offsets.scales, scale_shape, scales.dtype)
            )
        return Received(rows, scales, choices, weights)

    def _view_tensors(self, view: _core.EpCudaZeroCopyView) -> Tokens:
        """Rows in the communication buffer, and their scales."""
        num_rows, stride, scales = view.num_rows, view.stride, self._scales
        in_pool = self._group.rows_in_pool
        rows = in_pool(view.offset, stride, (num_rows, self._shape.hidden), self._rows.dtype)
        if scales is None:
            return rows, None
        scale_shape = (num_rows, *scales.shape[1:])
        return rows, in_pool(view.scales_offset, stride, scale_shape, scales.dtype)


def refuse_in_graph(layout: DispatchLayout | None) -> None:
    """Raises if a graph is being captured. A dispatch layout has stored the answer."""
    if torch.cuda.is_current_stream_capturing() if layout is None else layout.is_captured:
        raise RuntimeError(
            "a graph does not wait for counts: capture dispatch with num_worst_tokens, or of "
            "ElasticBuffer with do_cpu_sync=False"
        )
