"""Low latency mode of ranks with GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch

from uccl import _core
from uccl.ep._cuda.group import GpuGroup
from uccl.ep._formats import Format
from uccl.ep._group import address, align, check


@dataclass
class Rows:
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
    spare: int
    """The address of the first combine's scratch in this memory; 0 once it is used."""


@dataclass
class Dispatch:
    """A prepared dispatch."""

    returned: Any
    """Rows, and their scales."""
    count: torch.Tensor
    told: tuple[torch.Tensor, torch.Tensor]
    """``src_info`` and ``layout_range``."""
    begin: Callable[[], None]
    """Enqueues the sending."""
    receive: Callable[[], Rows]
    """Enqueues the receive, and the send if that has not begun."""


@dataclass
class Combine:
    """A prepared combine, and the tensors for its sums."""

    native: Any
    memory: torch.Tensor
    """The memory with its scratch."""
    chosen: tuple[torch.Tensor, torch.Tensor]
    out: torch.Tensor
    waits: torch.Tensor | None

    def begin(self) -> None:
        """Enqueues the sending."""
        self.native.begin()

    def finish(self) -> None:
        """Enqueues the sums, and the send if that has not begun."""
        experts, weights = self.chosen
        self.native.finish(
            rows=self.out.data_ptr(),
            weights=weights.data_ptr(),
            experts=experts.data_ptr(),
            waits=address(self.waits),
        )


class LowLatency:
    """Low latency calls of one rank's end of a group."""

    def __init__(self, gpu: GpuGroup) -> None:
        self.gpu = gpu
        self.device, self.ranks, self.native = gpu.device, gpu.ranks, gpu.native

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: tuple[int, int],
        form: Format,
        added_to: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> Dispatch:
        """Prepares to send tokens, rows of bf16. ``sizes`` are the most tokens of a rank and the
        number of experts. Two tensors, or None, get counts by expert and nanoseconds of waits by
        rank added."""
        (most, num_experts), (stats, waits) = sizes, added_to
        (tokens, hidden), local, rows = x.shape, num_experts // self.ranks, self.ranks * most
        check("topk_idx", topk_idx, (tokens, None), torch.int64, torch.int32, device=self.device)
        if stats is not None:
            check(
                "cumulative_local_expert_recv_stats",
                stats,
                (local,),
                torch.int32,
                device=self.device,
            )
        stream, top_k, empty = self.gpu.stream(), topk_idx.shape[1], self.gpu.empty
        arriving = form.arriving(self.gpu, self.native, (local, rows, hidden))
        # One piece of memory for all small parts: scratch of the first combine and of this
        # dispatch, records, `src_info` and counts.
        spare = _core.ep_cuda_combine_scratch_len()
        records = (
            spare + align(_core.ep_cuda_scratch_len(tokens, top_k, num_experts, self.ranks), 4)
        ) // 4
        first = records + _core.ep_cuda_records_len(most, self.ranks, top_k) // 4
        told = empty((first + local * rows + local,), torch.int32)
        src_info = told.as_strided((local, rows), (rows, 1), first)
        count = told.as_strided((local,), (1,), first + local * rows)
        layout_range = empty((local, self.ranks), torch.int64)
        start = told.data_ptr()
        records_at = start + 4 * records
        native = _core.EpCudaDispatch(
            self.native,
            rows=x.data_ptr(),
            stride=2 * hidden,
            kind=form.kind,
            len=2 * hidden if form.kind == "bytes" else hidden,
            global_scale=form.global_scale_on(self.device),
            experts=topk_idx.data_ptr(),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            slots=most,
            scratch=start + spare,
            stream=stream,
        )

        def receive() -> Rows:
            handle = native.receive(
                rows=arriving.values.data_ptr(),
                stride=arriving.values.stride(1) * arriving.values.element_size(),
                **arriving.scales,
                count=count.data_ptr(),
                stats=address(stats),
                waits=address(waits),
                table=(src_info.data_ptr(), records_at, layout_range.data_ptr()),
            )
            return Rows(handle, records_at, told, (tokens, top_k), stream, start)

        return Dispatch(arriving.returned, count, (src_info, layout_range), native.begin, receive)

    def combine(
        self,
        x: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        to: tuple[torch.Tensor | None, torch.Tensor | None],
        is_packed: bool,
    ) -> Combine:
        """Prepares to send rows back, as LogFMT-10 if ``is_packed``. ``chosen`` are experts and
        weights; ``to`` are the caller's tensors for the sums and for waits, or None."""
        hidden, (topk_idx, topk_weights), (out, waits) = x.shape[-1], chosen, to
        check("topk_idx", topk_idx, rows.shape, torch.int64, torch.int32, device=self.device)
        check("topk_weights", topk_weights, rows.shape, torch.float32, device=self.device)
        if out is None:
            out = self.gpu.empty((rows.shape[0], hidden), torch.bfloat16)
        else:
            check("out", out, (rows.shape[0], hidden), torch.bfloat16, device=self.device)
        stream = self.gpu.stream()
        self.gpu.keep_for(stream, rows.stream, (rows.memory,))
        memory, scratch = self.gpu.scratch_of(rows)
        native = _core.EpCudaCombine(
            self.native,
            rows.native,
            rows=x.data_ptr(),
            hidden=hidden,
            records=rows.records,
            is_packed=is_packed,
            scratch=scratch,
            stream=stream,
        )
        return Combine(native, memory, chosen, out, waits)
