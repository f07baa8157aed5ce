"""Dispatches of normal mode on a GPU.

Only the host's time before the launch delays a call: the rest runs beside the GPU's work. So
objects that follow from the shape of a call are kept for the next one, small tensors share one
allocation, and they are made after the launch.
"""

from __future__ import annotations

from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import DispatchOptions, Received, Tokens
from uccl.ep._checks import check
from uccl.ep._cuda.call_shape import ShapePlans
from uccl.ep._cuda.routing import CudaHandle, DispatchLayout, Routing
from uccl.ep._cuda.workspace import Workspace, to_words
from uccl.ep._ranks import TOKENS
from uccl.ep._row_layout import RowLayout
from uccl.ep._tensors import address, scales_for, scales_in

#: The largest alignment of an expert's rows that kernels take.
MAX_ALIGNMENT = 1 << 16
COMBINE_SCRATCH_WORDS = to_words(_core.ep_cuda_combine_scratch_len())
#: Words of scratch for a combine, and for a dispatch.
NO_SCRATCH = (0, 0)


class SendArgs:
    """The arguments about sent tokens. The native module reads them by name; 0 is no address."""

    __slots__ = (
        "rows",
        "scales",
        "weights",
        "experts",
        "is_64",
        "ranks",
        "tokens",
        "layout",
        "cached",
        "max_tokens",
        "max_blocks",
        "scratch",
        "stream",
    )
    rows: int
    scales: tuple[int, int, int, int] | None
    """The address of scales, their words for each token, and strides by token and by word."""
    weights: int
    experts: int
    is_64: bool
    """Whether an expert is an i64."""
    ranks: tuple[int, int] | None
    """For tokens without choices: a byte by token and rank, and i32 by expert."""
    tokens: int
    layout: Any
    """A counted layout of the tokens, or None."""
    cached: Any
    """The handle of an earlier dispatch to the same rows, or None."""
    max_tokens: int
    """The most tokens of any rank."""
    max_blocks: int
    scratch: int
    stream: int


class RecvMemory:
    """The output memory of a dispatch. The native module reads the first seven by name."""

    __slots__ = (
        "len",
        "rows",
        "scales",
        "zero_copy",
        "tokens",
        "workspace",
        "layout",
        "row_layout",
        "row_tensor",
        "scale_tensor",
        "tables",
        "view",
    )
    len: int
    """The number of rows."""
    rows: int
    """The address of rows."""
    scales: tuple[int, int, int] | None
    """The address of scales, and strides by row and by word; None where the workspace has them."""
    zero_copy: bool
    """Whether rows and scales are a view of the communication buffer."""
    tokens: int
    workspace: int
    """The address of the workspace."""
    layout: Any
    """The native layout of the workspace."""
    row_layout: RowLayout
    row_tensor: torch.Tensor | None
    """None where rows and scales are a view of the communication buffer."""
    scale_tensor: torch.Tensor | None
    """None also where the workspace has the scales."""
    tables: Workspace
    view: _core.EpCudaZeroCopyView | None


class NormalDispatch:
    """A prepared dispatch."""

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
        alignment, cached = options.alignment, routing.cached
        if alignment is not None and not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError(f"expert_alignment is 1 to {MAX_ALIGNMENT}, not {alignment}")
        #: The layout of received rows; None: as many as arrive.
        self._row_layout = options.row_layout
        if cached is not None:
            self._row_layout = cached_layout(cached, options.needs_counts)
        if self._row_layout is None:
            refuse_in_graph(routing.layout)
        # Without choices, nothing marks the rows of a view that have no token.
        self._may_view = options.zero_copy and routing.top_k > 0
        self._plans, self._group, self._routing, self._options = plans, group, routing, options
        # The dispatch reads these tensors until its work has ended.
        self._rows, self._scales, self._weights = rows, scales, weights
        scale_args = scales_in(scales, tokens, group.device)
        self._addresses = address(rows), scale_args, address(weights)
        has_columns = scales is not None and options.is_col_major
        # In the order of `CallShape`, which a plan makes once: that takes a microsecond or two.
        self._plan = plans.plan_for(
            hidden,
            hidden * rows.element_size(),
            0 if scale_args is None else scale_args[1],
            routing.top_k,
            routing.num_experts,
            alignment,
            0 if options.choice_dtype is None else options.choice_dtype.itemsize // 4,
            weights is not None,
            options.zero_foreign_weights,
            options.zero_gaps,
            has_columns,
            self._may_view,
            cached is None,
            # With contiguous scales of a channel, their offsets depend on the number of rows.
            plans.can_estimate and cached is None and not has_columns,
            tokens.bit_length(),
        )
        self._shape = self._plan.shape
        self._max_tokens = self._checked_max_tokens()
        self._stream = group.stream()
        #: Words of the first combine's scratch, and of the dispatch's.
        self._scratch = self._scratch_words()

    def run(self) -> tuple[Received, CudaHandle, list[int]]:
        """Sends tokens, and returns the received ones, the handle, and the tokens of each local
        expert where the host waits for counts. With an estimate, rows are on their way while it
        waits."""
        plan, native, counts = self._plan, self._group.native, None
        layout, handle = self._row_layout or plan.native.estimate, None
        unfinished: _core.EpCudaNormalDispatch | None
        if layout is None or self._may_view:
            # Whether rows are a view, or their number, is known only after the call has begun.
            own = self._workspace(self._scratch, None)
            unfinished = plan.native.begin(native, self._send_args(own))
            if layout is None:
                layout, counts = plan.native.counts(unfinished, self._plans.count_timeout)
        else:
            own = self._workspace(self._scratch, layout)
            memory = self._recv_memory(layout, own)
            timeout = None if self._row_layout else self._plans.count_timeout
            handle, unfinished, arrived = plan.native.dispatch(
                native, self._send_args(own), memory, timeout
            )
            if arrived is not None:
                layout, counts = arrived
                memory.row_layout = layout
        if unfinished is not None:
            # Rows may be a view, or there was no estimate, or it was too small.
            view = unfinished.zero_copy_view() if self._may_view else None
            memory = self._recv_memory(layout, None, view)
            handle = plan.native.receive(unfinished, memory)
        returned = self._routing.cached or self._new_handle(handle, memory, own, counts is not None)
        received = self._received(memory)
        if counts is None:
            return received, returned, []
        plan.update_estimate(layout, self._max_tokens)
        estimate = plan.native.estimate
        if estimate is not None:
            plan.next_workspace = self._workspace(self._scratch, estimate), self._stream
        return received, returned, counts

    def _checked_max_tokens(self) -> int:
        """The most tokens of any rank: the caller's number, or else the room; with a handle, the
        handle's number. A rank with more tokens tells the others, which would wait for it."""
        routing, max_tokens = self._routing, self._options.max_tokens
        if routing.cached is not None:
            return routing.cached.max_tokens
        if max_tokens is not None:
            if routing.tokens > max_tokens:
                self._announce_too_many()
                raise ValueError(
                    f"this rank has {routing.tokens} tokens, and room for {max_tokens} of each "
                    "rank: num_max_tokens_per_rank is the most of any rank"
                )
            return max_tokens
        if routing.tokens > self._plan.max_tokens:
            try:
                self._plan.max_tokens = self._max_tokens_in_pool()
            except ValueError as why:
                self._announce_too_many()
                raise ValueError(
                    f"{why}; programs that ask for its size set {TOKENS} to half of the tokens of "
                    "a rank, on all ranks"
                ) from None
        return self._plan.max_tokens

    def _max_tokens_in_pool(self) -> int:
        """The tokens of each rank that the pool has room for. Raises if this rank has more."""
        routing, shape = self._routing, self._shape
        return _core.ep_cuda_max_tokens(
            self._group.native,
            routing.tokens,
            payload=shape.row_bytes,
            scales=shape.scales,
            hidden=shape.hidden,
            top_k=routing.top_k,
            local_experts=routing.num_experts // self._group.ranks,
            zero_copy=shape.zero_copy,
        )

    def _announce_too_many(self) -> None:
        # The work of a captured graph is not done now, on any rank.
        if not torch.cuda.is_current_stream_capturing():
            self._group.native.announce_too_many(self._group.stream())

    def _scratch_words(self) -> tuple[int, int]:
        routing, group = self._routing, self._group
        cached, layout = routing.cached, routing.layout
        if cached is not None:
            group.keep_for(self._stream, cached.stream, cached.memory_in_use())
            return 0, COMBINE_SCRATCH_WORDS
        if layout is not None:
            group.keep_for(self._stream, layout.stream, (layout.memory,))
            return COMBINE_SCRATCH_WORDS, COMBINE_SCRATCH_WORDS
        length = _core.ep_cuda_scratch_len(
            routing.tokens, routing.top_k, routing.num_experts, group.ranks
        )
        return COMBINE_SCRATCH_WORDS, to_words(length)

    def _workspace(self, scratch: tuple[int, int], row_layout: RowLayout | None) -> Workspace:
        """A new workspace, or the one that the call before has left."""
        layout = self._plan.native.workspace(*scratch, row_layout)
        # A captured dispatch has memory of its own, and never waits for counts.
        if self._row_layout is None:
            ready, self._plan.next_workspace = self._plan.next_workspace, None
            if ready is not None and ready[0].layout.is_same(layout) and ready[1] == self._stream:
                return ready[0]
        memory = self._group.empty((layout.len,), torch.int32)
        return Workspace(memory, memory.data_ptr(), layout)

    def _recv_memory(
        self,
        row_layout: RowLayout,
        workspace: Workspace | None,
        view: _core.EpCudaZeroCopyView | None = None,
    ) -> RecvMemory:
        """Memory for rows of this layout, or only a workspace for rows that are a view."""
        memory = RecvMemory()
        memory.view, memory.zero_copy = view, view is not None
        memory.row_tensor = memory.scale_tensor = memory.scales = None
        if view is not None:
            row_layout, memory.rows = RowLayout(view.num_rows, is_view=True), 0
            num_rows = view.num_rows
        else:
            num_rows, hidden = row_layout.num_rows(), self._shape.hidden
            rows = memory.row_tensor = self._group.empty((num_rows, hidden), self._rows.dtype)
            memory.rows = rows.data_ptr()
        memory.row_layout, memory.len, memory.tokens = row_layout, num_rows, row_layout.tokens
        tables = memory.tables = workspace or self._workspace(NO_SCRATCH, row_layout)
        memory.workspace, memory.layout = tables.address, tables.layout
        if self._shape.is_col_major and view is None:
            scales = memory.scale_tensor = scales_for(self._scales, num_rows, True)
            assert scales is not None, "a shape with scales is that of a call with scales"
            row_stride, word_stride = scales.stride()
            memory.scales = address(scales), row_stride, word_stride
        return memory

    def _send_args(self, own: Workspace) -> SendArgs:
        (rows, scales, weights), routing, args = self._addresses, self._routing, SendArgs()
        idx, ranks, layout, cached = routing.topk_idx, routing.ranks, routing.layout, routing.cached
        args.rows, args.scales, args.weights = rows, scales, weights
        args.experts = address(idx)
        args.is_64 = idx is not None and idx.dtype == torch.int64
        args.ranks = None if ranks is None else (address(ranks[0]), address(ranks[1]))
        args.tokens = routing.tokens
        args.layout = None if layout is None else layout.native
        args.cached = None if cached is None else cached.native
        args.max_tokens, args.max_blocks = self._max_tokens, self._options.max_blocks
        args.scratch = own.address + 4 * own.layout.dispatch_scratch
        args.stream = self._stream
        return args

    def _received(self, memory: RecvMemory) -> Received:
        """The caller's tensors, with the rows of the layout."""
        shape, workspace, layout = self._shape, memory.tables, memory.row_layout
        offsets, num_rows, scales = workspace.layout, layout.num_rows(), self._scales
        choices = weights = None
        if self._options.choice_dtype is not None:
            choice_shape = (layout.tokens, shape.top_k)
            choices = workspace.tensor(offsets.choices, choice_shape, self._options.choice_dtype)
        if shape.has_weights:
            by_token = layout.alignment is None
            weight_shape = (layout.tokens, shape.top_k) if by_token else (num_rows,)
            weights = workspace.tensor(offsets.weights, weight_shape, torch.float32)
        if memory.view is not None:
            return Received(*self._view_tensors(memory.view), choices, weights)
        rows = memory.row_tensor
        assert rows is not None, "rows that are no view have memory of their own"
        if rows.shape[0] > num_rows:
            rows.resize_((num_rows, shape.hidden))
        if scales is not None:
            scale_shape = (num_rows, *scales.shape[1:])
            scales = (
                memory.scale_tensor
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

    def _new_handle(
        self, native: Any, memory: RecvMemory, own: Workspace, is_counted: bool
    ) -> CudaHandle:
        layout = self._routing.layout
        return CudaHandle(
            self._plans,
            native,
            self._routing,
            self._max_tokens,
            memory.row_layout,
            is_counted,
            own.memory,
            None if layout is None else layout.memory,
            memory.tables,
            self._stream,
            own.address,
        )


def cached_layout(handle: CudaHandle, needs_counts: bool) -> RowLayout | None:
    """The layout of rows for a dispatch with this handle: the handle's, unless the host has to wait
    for the counts of rows."""
    layout = handle.row_layout
    if needs_counts and not handle.is_counted and not layout.is_view:
        return None
    return RowLayout(layout.tokens, layout.alignment, layout.rows)


def refuse_in_graph(layout: DispatchLayout | None) -> None:
    """Raises if a graph is being captured. A dispatch layout has stored the answer."""
    if torch.cuda.is_current_stream_capturing() if layout is None else layout.is_captured:
        raise RuntimeError(
            "a graph does not wait for counts: capture dispatch with num_worst_tokens, or of "
            "ElasticBuffer with do_cpu_sync=False"
        )
