"""Normal mode of ranks on the CPU, for both interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import CombineOptions, DispatchOptions, Received, Tokens
from uccl.ep._checks import check
from uccl.ep._host.memory import Memory
from uccl.ep._row_layout import rows_of_choices
from uccl.ep._tensors import (
    RowScales,
    address,
    align,
    align_all,
    biases,
    scales_for,
    scales_in,
    weights_address,
)


@dataclass
class HostHandle:
    """A dispatch's handle, for combines and for dispatches to the same places."""

    native: Any
    rank: int
    max_tokens: int
    """The most tokens of any rank; 0 if there is no limit."""
    num_tokens: int
    """Tokens of this rank."""
    top_k: int
    """Choices of each token."""
    rank_counts: list[int]
    """Received tokens of each rank."""
    expert_counts: list[int]
    """Received tokens of each local expert."""
    starts: list[int]
    """Each expert's first row, for rows by expert."""
    num_recv_tokens: int
    """Received tokens, or an upper bound if the caller has asked for as many rows."""

    def normal_tables(self, token_in_rank: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The tensors of DeepEP's handle; those of its channels are empty."""
        ranks = len(self.rank_counts)
        prefixes = torch.zeros((ranks, ranks), dtype=torch.int32)
        prefixes[:, self.rank] = torch.tensor(self.rank_counts, dtype=torch.int32).cumsum(0)
        source_tokens = self._sources(0)[:, 0].contiguous()
        if token_in_rank is None:
            token_in_rank = token_in_rank_of(self.native.routing, ranks)
        channels = prefixes.new_empty((ranks, 0))
        heads = token_in_rank.int() - 1
        return prefixes, channels, channels, source_tokens, token_in_rank, heads

    def rank_ends(self, scaleup_ranks: int) -> torch.Tensor:
        """``[scaleup_ranks]`` i32: tokens from the scale-up ranks up to each, over all nodes."""
        counts = torch.tensor(self.rank_counts, dtype=torch.int32).view(-1, scaleup_ranks)
        return counts.sum(0).cumsum(0).to(torch.int32)

    def per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: tokens of each local expert."""
        return torch.tensor(self.expert_counts, dtype=torch.int32)

    def expert_ends(self) -> torch.Tensor:
        """``[E/R]`` i32: the end of each expert's rows, for rows by expert."""
        ends = [start + count for start, count in zip(self.starts, self.expert_counts)]
        return torch.tensor(ends, dtype=torch.int32)

    def source_metadata(self, choices: torch.Tensor | None) -> torch.Tensor:
        """``[m, K + 2]`` i32: ``rank * T + token``, ``rank * K + last choice``, and the row of each
        choice, or -1. For rows by token, ``choices`` are the received ones."""
        table = self._sources(self.max_tokens)
        if choices is not None:
            table[:, 2:] = rows_of_choices(choices[: table.shape[0]])
        return table

    def _sources(self, max_tokens: int) -> torch.Tensor:
        """The table above, where only rows by expert have the rows of choices."""
        arrived = sum(self.rank_counts)
        table = torch.empty((arrived, 2 + self.top_k), dtype=torch.int32)
        if arrived:
            self.native.fill_source_metadata(table.data_ptr(), max_tokens)
        return table


@dataclass
class Routing:
    """The routing of a dispatch."""

    native: Any
    cached: HostHandle | None = None
    """The handle of an earlier dispatch of the same tokens."""


class NormalMode:
    """Calls of normal mode of one rank's end of a group."""

    native: _core.EpGroup
    memory: Memory

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts tokens: by rank ``[R]`` i32, by expert ``[E]`` i32, and ``[n, R]`` bool."""
        ranks = self.native.ranks
        routing = routing_of(topk_idx, num_experts, ranks)
        per_rank = torch.tensor(routing.per_rank(), dtype=torch.int32)
        per_expert = torch.tensor(routing.per_expert(), dtype=torch.int32)
        return per_rank, per_expert, token_in_rank_of(routing, ranks)

    def by_choices(
        self, topk_idx: torch.Tensor, num_experts: int, token_in_rank: torch.Tensor | None = None
    ) -> Routing:
        """Routes tokens to the ranks of their experts."""
        return Routing(routing_of(topk_idx, num_experts, self.native.ranks))

    def by_ranks(self, token_in_rank: torch.Tensor, per_expert: torch.Tensor) -> Routing:
        """Routes tokens without choices to these ranks."""
        ranks = self.native.ranks
        check("is_token_in_rank", token_in_rank, (None, ranks), torch.bool)
        native = _core.EpRouting.by_rank(
            token_in_rank=address(token_in_rank),
            tokens=token_in_rank.shape[0],
            per_expert=per_expert.tolist(),
            ranks=ranks,
        )
        return Routing(native)

    def by_handle(self, handle: Any) -> Routing:
        """Routes tokens to the same places as before."""
        before = own_handle(handle)
        before.native.check_is_last()
        return Routing(before.native.routing, before)

    def dispatch(
        self, x: Tokens, weights: torch.Tensor | None, routing: Routing, options: DispatchOptions
    ) -> tuple[Received, HostHandle, list[int]]:
        """Sends tokens. Returns the received ones, a handle, and the tokens of each local expert if
        there are exactly as many rows as have arrived."""
        (rows, scales), tokens, top_k = x, routing.native.tokens, routing.native.top_k
        check("x", rows, (None, None))
        if rows.shape[0] != tokens:
            raise ValueError(f"x has {rows.shape[0]} tokens, and {tokens} are routed")
        if weights is not None:
            check("topk_weights", weights, (tokens, top_k), torch.float32)
        row_bytes, max_tokens = rows.shape[1] * rows.element_size(), options.max_tokens
        call = _core.EpDispatch(
            self.native,
            routing.native,
            rows=address(rows),
            stride=row_bytes,
            format="bytes",
            len=row_bytes,
            scales=scales_in(scales, tokens),
            weights=address(weights),
            max_tokens=max_tokens,
            relays=options.uses_relays,
            is_stable=max_tokens is not None,
        )
        with call:
            counts = call.counts()
            rank_counts, expert_counts = counts.per_rank, counts.per_expert
            arrived, layout, starts = sum(rank_counts), options.row_layout, None
            num_rows = num_recv_tokens = arrived
            if options.alignment is not None:
                *starts, num_rows = row_ends(expert_counts, options.alignment)
            if layout is not None:
                num_rows, num_recv_tokens = layout.num_rows(), layout.tokens
            received = self._recv_tensors(x, weights, (num_rows, top_k), options)
            if received.choices is not None:
                received.choices[arrived:] = -1
            native = receive(call, received, starts, options.zero_foreign_weights)
        if options.zero_gaps and starts is not None:
            zero_gaps(received, starts, expert_counts, options.alignment or 1)
        handle = routing.cached or HostHandle(
            native,
            self.native.rank,
            max_tokens or 0,
            tokens,
            top_k,
            rank_counts,
            expert_counts,
            starts or [],
            num_recv_tokens,
        )
        return received, handle, expert_counts if layout is None else []

    def _recv_tensors(
        self,
        x: Tokens,
        weights: torch.Tensor | None,
        shape: tuple[int, int],
        options: DispatchOptions,
    ) -> Received:
        """Output tensors. ``shape`` are the rows, and the choices of each token."""
        (rows, scales), choices, recv_weights = x, None, None
        if options.choice_dtype is not None:
            choices = torch.empty(shape, dtype=options.choice_dtype)
        if weights is not None:
            weight_shape = shape if options.alignment is None else shape[:1]
            recv_weights = torch.empty(weight_shape, dtype=torch.float32)
        return Received(
            self.memory.empty((shape[0], rows.shape[1]), rows.dtype),
            None if scales is None else scales_for(scales, shape[0], options.is_col_major),
            choices,
            recv_weights,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        weights: torch.Tensor | None,
        bias: Any,
        options: CombineOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends rows back and sums them, and weights if there are any."""
        handle = own_handle(handle)
        native, tokens, top_k = handle.native, handle.num_tokens, handle.top_k
        check("x", x, (None, None), torch.bfloat16)
        num_rows, hidden = x.shape
        if options.sends == "row" and num_rows < sum(handle.rank_counts):
            raise ValueError(f"x has {num_rows} rows, and {sum(handle.rank_counts)} tokens arrived")
        out_weights = None
        if weights is not None:
            shape = (num_rows, top_k) if options.sends == "row" else (num_rows,)
            check("topk_weights", weights, shape, torch.float32)
            out_weights = torch.empty((tokens, top_k), dtype=torch.float32)
        out = self.memory.empty((tokens, hidden), torch.bfloat16)
        combine = _core.EpCombine(
            native,
            rows=address(x),
            len=num_rows,
            stride=2 * hidden,
            hidden=hidden,
            sends=options.sends,
            weights=weights_address(weights),
            is_stable=True,
            relays=options.sums if options.uses_relays else None,
        )
        first_bias, second_bias = biases(bias, out)
        combine.finish(
            rows=address(out),
            sums=options.sums,
            bias=first_bias,
            second_bias=second_bias,
            weights=address(out_weights),
        )
        return out, out_weights


def own_handle(handle: Any) -> HostHandle:
    """A handle of a rank on the CPU. Raises for one of a GPU."""
    if not isinstance(handle, HostHandle):
        raise RuntimeError("the handle is of a buffer on a GPU, and this one is on the CPU")
    return handle


def routing_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Any:
    """The engine's routing of tokens, from their choices."""
    check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32)
    tokens, top_k = topk_idx.shape
    return _core.EpRouting.by_choices(
        experts=address(topk_idx),
        is_64=topk_idx.dtype == torch.int64,
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        ranks=ranks,
    )


def token_in_rank_of(routing: Any, ranks: int) -> torch.Tensor:
    """``[n, R]`` bool: whether each token goes to each rank."""
    token_in_rank = torch.empty((routing.tokens, ranks), dtype=torch.bool)
    routing.fill_token_in_rank(address(token_in_rank))
    return token_in_rank


def row_ends(per_expert: list[int], alignment: int) -> list[int]:
    """0, and the end of each expert's rows and of the gap behind them, for rows by expert."""
    return list(accumulate(align_all(per_expert, alignment), initial=0))


def receive(call: Any, to: Received, starts: list[int] | None, zero_foreign_weights: bool) -> Any:
    """Copies the received rows of a dispatch to these tensors, and returns the engine's handle."""
    rows, scales, choices, scale_args = to.rows, to.scales, to.choices, None
    if scales is not None:
        strides = scales.stride()
        word_stride = strides[1] if scales.dim() > 1 else 1
        scale_args = RowScales(address(scales), strides[0], word_stride)
    return call.receive(
        len=rows.shape[0],
        rows=address(rows),
        stride=rows.shape[1] * rows.element_size(),
        scales=scale_args,
        choices=address(choices),
        is_64=choices is not None and choices.dtype == torch.int64,
        weights=address(to.weights),
        zero_foreign_weights=zero_foreign_weights,
        starts=starts,
    )


def zero_gaps(to: Received, starts: list[int], per_expert: list[int], alignment: int) -> None:
    """Sets the rows between those of experts to 0, up to the alignment behind the last."""
    for start, count in zip(starts, per_expert):
        gap = slice(start + count, start + align(count, alignment))
        for tensor in (to.rows, to.scales, to.weights):
            if tensor is not None:
                tensor[gap] = 0
