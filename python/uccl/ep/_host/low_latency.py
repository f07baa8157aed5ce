"""Low latency mode of ranks on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import (
    Choices,
    CombineResults,
    LowLatencyCombineOptions,
    LowLatencyDispatchOptions,
)
from uccl.ep._checks import CPU, check
from uccl.ep._formats import RecvTensors
from uccl.ep._host.memory import Memory
from uccl.ep._host.normal import routing_of
from uccl.ep._tensors import address


class HostLowLatencyDispatch:
    """A dispatch under way, and its output tensors."""

    def __init__(
        self,
        native: Any,
        recv: RecvTensors,
        shape: tuple[int, int, int],
        stats: torch.Tensor | None,
        waits: torch.Tensor | None,
    ) -> None:
        """``shape`` are this rank's experts, rows of each, and ranks."""
        local, self._rows, ranks = shape
        self.returned = recv.returned
        self.count = torch.empty(local, dtype=torch.int32)
        self.tables = (
            torch.empty((local, self._rows), dtype=torch.int32),
            torch.empty((local, ranks), dtype=torch.int64),
        )
        self._native, self._recv, self._stats, self._waits = native, recv, stats, waits

    def begin(self) -> None:
        """Does nothing: the tokens are on their way since this object was made."""

    def receive(self) -> Any:
        """Fills the tensors, and returns the engine's handle."""
        native, recv, local = self._native, self._recv, self.count.shape[0]
        with native:
            per_expert = native.counts().per_expert
            if self._waits is not None:
                self._waits.add_(torch.tensor(native.waited()))
            handle = native.receive(
                len=local * self._rows,
                rows=address(recv.rows),
                stride=recv.rows.stride(1) * recv.rows.element_size(),
                **recv.scale_args,
                starts=[expert * self._rows for expert in range(local)],
            )
        self.count.copy_(torch.tensor(per_expert, dtype=torch.int32))
        if self._stats is not None:
            self._stats.add_(self.count)
        src_info, layout_range = self.tables
        handle.fill_low_latency(src_info.data_ptr(), layout_range.data_ptr(), self._rows)
        return handle


class HostLowLatencyCombine:
    """A combine under way, and the tensors for its sums."""

    def __init__(
        self,
        native: Any,
        choices: Choices,
        out: torch.Tensor,
        waits: torch.Tensor | None,
    ) -> None:
        self._native, self._choices, self.out, self._waits = native, choices, out, waits

    def begin(self) -> None:
        """Does nothing: the rows are on their way since this object was made."""

    def finish(self) -> None:
        """Fills the sums."""
        experts, weights = self._choices
        waited = self._native.finish(
            rows=address(self.out),
            sums="weighted",
            choice_weights=address(weights),
            experts=address(experts),
            is_64=experts.dtype == torch.int64,
        )
        if self._waits is not None:
            self._waits.add_(torch.tensor(waited))


class LowLatencyMode:
    """Low latency calls of one rank's end of a group."""

    native: _core.EpGroup
    memory: Memory

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, options: LowLatencyDispatchOptions
    ) -> HostLowLatencyDispatch:
        """Begins to send rows of bf16."""
        max_tokens, num_experts, row_format, stats, waits, has_hook, rank_bound = options
        ranks, (tokens, hidden) = self.native.ranks, x.shape
        routing = routing_of(topk_idx, num_experts, ranks)
        if routing.tokens != tokens:
            raise ValueError(f"x has {tokens} tokens, and topk_idx {routing.tokens}")
        local, rows = num_experts // ranks, rank_bound * max_tokens
        recv = row_format.recv_tensors(self.memory, (local, rows, hidden))
        native = _core.EpDispatch(
            self.native,
            routing,
            rows=address(x),
            stride=2 * hidden,
            format=row_format.name,
            len=row_format.row_len(hidden),
            global_scale=row_format.global_scale_on(CPU)[0],
            max_tokens=max_tokens,
            is_stable=not has_hook,
        )
        return HostLowLatencyDispatch(native, recv, (local, rows, ranks), stats, waits)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        choices: Choices,
        handle: Any,
        results: CombineResults,
        options: LowLatencyCombineOptions,
    ) -> HostLowLatencyCombine:
        """Begins to send the experts' rows back."""
        (topk_idx, topk_weights), (out, waits) = choices, results
        use_logfmt, zero_copy, has_hook = options
        local, rows, hidden = x.shape
        if zero_copy and not self.native.has_block(address(x), x.numel() * x.element_size()):
            raise ValueError(
                "with zero_copy, x is what get_next_low_latency_combine_buffer returned"
            )
        routing = handle.routing
        shape = (routing.tokens, routing.top_k)
        check("topk_idx", topk_idx, shape, torch.int64, torch.int32)
        check("topk_weights", topk_weights, shape, torch.float32)
        if out is None:
            out = self.memory.empty((routing.tokens, hidden), torch.bfloat16)
        check("out", out, (routing.tokens, hidden), torch.bfloat16)
        native = _core.EpCombine(
            handle,
            rows=address(x),
            len=local * rows,
            stride=2 * hidden,
            hidden=hidden,
            sends="each",
            is_packed=use_logfmt,
            is_stable=zero_copy or not has_hook,
            has_hook=has_hook,
        )
        return HostLowLatencyCombine(native, choices, out, waits)
