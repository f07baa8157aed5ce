"""Normal mode of ranks with GPUs, for both interfaces. A call is one round, and its host waits only
if the caller asks for counts."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from uccl import _core
from uccl.ep._cuda.group import GpuGroup
from uccl.ep._cuda.normal_dispatch import Arrived, Dispatch, Dispatches, Sent, Wanted
from uccl.ep._cuda.routing import LaidOut, Routed, Rows, version_of
from uccl.ep._cuda.workspace import words
from uccl.ep._group import address, align, biases, check, weights_address


class NormalMode:
    """Calls of normal mode of one rank's end of a group."""

    def __init__(self, gpu: GpuGroup, limit: float) -> None:
        """The host waits up to ``limit`` seconds for counts."""
        self.gpu, self.dispatches = gpu, Dispatches(gpu, limit)
        self.device, self.ranks, self.native = gpu.device, gpu.ranks, gpu.native
        #: The empty tables of channels in DeepEP's handles.
        self.channels = gpu.empty((gpu.ranks, 0), torch.int32)
        #: By the id of a table of tokens and ranks, while that tensor lives. Tensors cannot be
        #: keys, as they are compared value by value.
        self._laid_out: dict[int, LaidOut] = {}

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts tokens: by rank ``[R]`` i32, by expert ``[E]`` i32, and ``[n, R]`` bool."""
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=self.device)
        (tokens, top_k), empty = topk_idx.shape, self.gpu.empty
        goes = empty((tokens, self.ranks), torch.bool)
        # One piece of memory, with parts that begin at multiples of 16 bytes.
        scratch_len = _core.ep_cuda_scratch_len(tokens, top_k, num_experts, self.ranks)
        ranks_at = align(num_experts, 4)
        scratch_at = ranks_at + align(self.ranks, 4)
        whole = empty((scratch_at + words(scratch_len),), torch.int32)
        per_expert = whole.as_strided((num_experts,), (1,))
        per_rank = whole.as_strided((self.ranks,), (1,), ranks_at)
        stream = self.gpu.stream()
        native = _core.ep_cuda_layout(
            self.native,
            experts=address(topk_idx),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            per_rank=address(per_rank),
            per_expert=address(per_expert),
            goes=address(goes),
            scratch=whole.data_ptr() + 4 * scratch_at,
            stream=stream,
        )
        is_captured, version = torch.cuda.is_current_stream_capturing(), version_of(topk_idx)
        self._laid_out[id(goes)] = LaidOut(
            native, topk_idx, version, num_experts, whole, stream, is_captured
        )
        weakref.finalize(goes, self._laid_out.pop, id(goes), None).atexit = False
        return per_rank, per_expert, goes

    def by_choices(
        self, topk_idx: torch.Tensor, num_experts: int, goes: torch.Tensor | None = None
    ) -> Routed:
        """Tokens go to the ranks of their experts. With ``goes`` from ``layout`` they need not be
        counted again."""
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=self.device)
        tokens, top_k = topk_idx.shape
        laid_out = self._laid_out.get(id(goes))
        if laid_out is not None and not laid_out.is_of(topk_idx, num_experts):
            laid_out = None
        return Routed(tokens, top_k, num_experts, topk_idx=topk_idx, laid_out=laid_out)

    def by_ranks(self, goes: torch.Tensor, per_expert: torch.Tensor) -> Routed:
        """Tokens go to these ranks, and have no choices."""
        check("is_token_in_rank", goes, (None, self.ranks), torch.bool, device=self.device)
        check("num_tokens_per_expert", per_expert, (None,), torch.int32, device=self.device)
        return Routed(goes.shape[0], 0, per_expert.numel(), ranks=(goes, per_expert))

    def again(self, rows: Rows) -> Routed:
        """Tokens go to the same places as before, through the buffer of that dispatch."""
        return Routed(rows.routed.tokens, rows.routed.top_k, rows.routed.num_experts, again=rows)

    def dispatch(
        self, x: Sent, weights: torch.Tensor | None, routed: Routed, wanted: Wanted
    ) -> tuple[Arrived, Rows, list[int]]:
        """Sends tokens, and takes out the received ones; see :meth:`Dispatch.make`."""
        of = self.dispatches if routed.again is None else routed.again.of
        return Dispatch(of, x, weights, routed, wanted).make()

    def combine(
        self,
        x: torch.Tensor,
        rows: Rows,
        weights: torch.Tensor | None,
        bias: Any,
        sums: str,
        sends: str = "row",
        blocks: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends rows back and sums them by "rank" or by "choice", and weights if there are any. Of
        rows by expert, ``sends`` is their "sum", or "each". The call goes through the buffer of the
        dispatch."""
        gpu = rows.gpu
        check("x", x, (None, None), torch.bfloat16, device=gpu.device)
        (have, hidden), routed, empty = x.shape, rows.routed, gpu.empty
        if have < rows.layout.least:
            raise ValueError(f"x has {have} rows, and {rows.layout.least} arrived")
        if weights is not None:
            shape = (have, routed.top_k) if sends == "row" else (have,)
            check("topk_weights", weights, shape, torch.float32, device=gpu.device)
        out = empty((routed.tokens, hidden), torch.bfloat16)
        out_weights = (
            None if weights is None else empty((routed.tokens, routed.top_k), torch.float32)
        )
        bias = biases(bias, out)
        stream = gpu.stream()
        gpu.keep_for(stream, rows.stream, rows.kept())
        _memory, scratch = gpu.scratch_of(rows)
        combine = _core.EpCudaNormalCombine(
            gpu.native,
            rows.native,
            len=have,
            rows=address(x),
            hidden=hidden,
            weights=weights_address(weights),
            sends=sends,
            blocks=blocks,
            scratch=scratch,
            stream=stream,
        )
        combine.finish(rows=address(out), sums=sums, bias=bias, weights=address(out_weights))
        return out, out_weights
