"""Low latency mode of ranks with GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable

import torch

from uccl import _core
from uccl.ep._backend import (
    Choices,
    CombineResults,
    LowLatencyCombineOptions,
    LowLatencyDispatchOptions,
)
from uccl.ep._checks import check
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._tensors import address


@lru_cache(maxsize=64)
def workspace_of(
    tokens: int, top_k: int, num_experts: int, max_tokens: int, ranks: int
) -> _core.EpCudaLowLatencyWorkspace:
    """The layout of a dispatch's small tensors and scratch."""
    return _core.EpCudaLowLatencyWorkspace(
        tokens=tokens, top_k=top_k, num_experts=num_experts, max_tokens=max_tokens, ranks=ranks
    )


@dataclass
class CudaLowLatencyHandle:
    """A dispatch's handle, for its combine."""

    native: Any
    records: int
    """The address of the records that the combine reads."""
    memory: torch.Tensor
    """The memory with the records."""
    shape: tuple[int, int]
    """Tokens of this rank, and choices of each."""
    stream: int
    """The number of the stream of the dispatch."""
    free_scratch: int
    """The address of the first combine's scratch in ``memory``; 0 once it is used."""


@dataclass
class CudaLowLatencyDispatch:
    """A prepared dispatch."""

    returned: Any
    """Rows, and their scales."""
    count: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    """``src_info`` and ``layout_range``."""
    begin: Callable[[], None]
    """Enqueues the sending."""
    receive: Callable[[], CudaLowLatencyHandle]
    """Enqueues the receive, and the send if that has not begun."""


@dataclass
class CudaLowLatencyCombine:
    """A prepared combine, and the tensors for its sums."""

    native: Any
    memory: torch.Tensor
    """The memory with its scratch."""
    choices: Choices
    out: torch.Tensor
    waits: torch.Tensor | None

    def begin(self) -> None:
        """Enqueues the sending."""
        self.native.begin()

    def finish(self) -> None:
        """Enqueues the sums, and the send if that has not begun."""
        experts, weights = self.choices
        self.native.finish(
            rows=self.out.data_ptr(),
            weights=weights.data_ptr(),
            experts=experts.data_ptr(),
            waits=address(self.waits),
        )


class LowLatencyMode:
    """Low latency calls of one rank's end of a group."""

    group: CudaGroup

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, options: LowLatencyDispatchOptions
    ) -> CudaLowLatencyDispatch:
        """Prepares to send rows of bf16."""
        max_tokens, num_experts, row_format, stats, waits, _, rank_bound = options
        group, (tokens, hidden) = self.group, x.shape
        device, ranks, empty = group.device, group.ranks, group.empty
        local, rows = num_experts // ranks, rank_bound * max_tokens
        check("topk_idx", topk_idx, (tokens, None), torch.int64, torch.int32, device=device)
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            check(name, stats, (local,), torch.int32, device=device)
        stream, top_k = group.stream(), topk_idx.shape[1]
        recv = row_format.recv_tensors(group, (local, rows, hidden))
        # One allocation for all small tensors.
        workspace = workspace_of(tokens, top_k, num_experts, max_tokens, ranks)
        memory = empty((workspace.len,), torch.int32)
        src_info = memory.as_strided((local, rows), (rows, 1), workspace.src_info)
        count = memory.as_strided((local,), (1,), workspace.count)
        layout_range = empty((local, ranks), torch.int64)
        start = memory.data_ptr()
        records = start + 4 * workspace.records
        global_scale, global_scale_at = row_format.global_scale_on(device)
        native = _core.EpCudaLowLatencyDispatch(
            group.native,
            rows=x.data_ptr(),
            stride=2 * hidden,
            format=row_format.name,
            len=row_format.row_len(hidden),
            global_scale=global_scale,
            global_scale_at=global_scale_at,
            experts=topk_idx.data_ptr(),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            max_tokens=max_tokens,
            expert_rows=rows,
            scratch=start + 4 * workspace.dispatch_scratch,
            stream=stream,
        )

        def receive() -> CudaLowLatencyHandle:
            handle = native.receive(
                rows=recv.rows.data_ptr(),
                stride=recv.rows.stride(1) * recv.rows.element_size(),
                **recv.scale_args,
                count=count.data_ptr(),
                stats=address(stats),
                waits=address(waits),
                src_info=src_info.data_ptr(),
                records=records,
                layout_range=layout_range.data_ptr(),
            )
            combine_scratch = start + 4 * workspace.combine_scratch
            shape = tokens, top_k
            return CudaLowLatencyHandle(handle, records, memory, shape, stream, combine_scratch)

        tables = src_info, layout_range
        return CudaLowLatencyDispatch(recv.returned, count, tables, native.begin, receive)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        choices: Choices,
        handle: CudaLowLatencyHandle,
        results: CombineResults,
        options: LowLatencyCombineOptions,
    ) -> CudaLowLatencyCombine:
        """Prepares to send the experts' rows back."""
        (topk_idx, topk_weights), (out, waits) = choices, results
        group, hidden, shape = self.group, x.shape[-1], handle.shape
        check("topk_idx", topk_idx, shape, torch.int64, torch.int32, device=group.device)
        check("topk_weights", topk_weights, shape, torch.float32, device=group.device)
        if out is None:
            out = group.empty((shape[0], hidden), torch.bfloat16)
        else:
            check("out", out, (shape[0], hidden), torch.bfloat16, device=group.device)
        stream = group.stream()
        group.keep_for(stream, handle.stream, (handle.memory,))
        memory, scratch = group.combine_scratch_of(handle)
        native = _core.EpCudaLowLatencyCombine(
            group.native,
            handle.native,
            rows=x.data_ptr(),
            hidden=hidden,
            records=handle.records,
            is_packed=options.use_logfmt,
            scratch=scratch,
            stream=stream,
        )
        return CudaLowLatencyCombine(native, memory, choices, out, waits)
