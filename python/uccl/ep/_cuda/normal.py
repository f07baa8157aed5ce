"""Normal mode of ranks with GPUs, for both interfaces. The host waits only if the caller asks for
counts."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import CombineOptions, DispatchOptions, Received, Tokens
from uccl.ep._checks import check
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.normal_dispatch import NormalDispatch
from uccl.ep._cuda.plans import ShapePlans
from uccl.ep._cuda.routing import CudaHandle, DispatchLayout, Routing, version_of
from uccl.ep._tensors import address, biases, weights_address


class NormalMode:
    """Calls of normal mode of one rank's end of a group."""

    def __init__(self, group: CudaGroup, count_timeout: float) -> None:
        """The host waits up to ``count_timeout`` seconds for counts."""
        self.group, self.plans = group, ShapePlans(group, count_timeout)
        #: By the id of a tensor ``token_in_rank``, while it lives. Tensors cannot be keys, as they
        #: are compared value by value.
        self.layouts: dict[int, DispatchLayout] = {}

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts tokens: by rank ``[R]`` i32, by expert ``[E]`` i32, and ``[n, R]`` bool."""
        group = self.group
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=group.device)
        (tokens, top_k), ranks = topk_idx.shape, group.ranks
        token_in_rank = group.empty((tokens, ranks), torch.bool)
        workspace = layout_workspace(tokens, top_k, num_experts, ranks)
        memory = group.empty((workspace.len,), torch.int32)
        per_expert = memory.as_strided((num_experts,), (1,), workspace.per_expert)
        per_rank = memory.as_strided((ranks,), (1,), workspace.per_rank)
        stream = group.stream()
        native = _core.ep_cuda_layout(
            group.native,
            experts=address(topk_idx),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            per_rank=address(per_rank),
            per_expert=address(per_expert),
            token_in_rank=address(token_in_rank),
            scratch=memory.data_ptr() + 4 * workspace.scratch,
            stream=stream,
        )
        is_captured, version = torch.cuda.is_current_stream_capturing(), version_of(topk_idx)
        self.layouts[id(token_in_rank)] = DispatchLayout(
            native, topk_idx, version, num_experts, memory, stream, is_captured
        )
        ended = weakref.finalize(token_in_rank, self.layouts.pop, id(token_in_rank), None)
        ended.atexit = False  # type: ignore[misc]
        return per_rank, per_expert, token_in_rank

    def by_choices(
        self, topk_idx: torch.Tensor, num_experts: int, token_in_rank: torch.Tensor | None = None
    ) -> Routing:
        """Routes tokens to the ranks of their experts. A layout that :meth:`layout` has counted
        with ``token_in_rank`` is cached."""
        device = self.group.device
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=device)
        tokens, top_k = topk_idx.shape
        layout = self.layouts.get(id(token_in_rank))
        if layout is not None and not layout.is_of(topk_idx, num_experts):
            layout = None
        return Routing(tokens, top_k, num_experts, topk_idx=topk_idx, layout=layout)

    def by_ranks(self, token_in_rank: torch.Tensor, per_expert: torch.Tensor) -> Routing:
        """Routes tokens without choices to these ranks."""
        group = self.group
        shape = (None, group.ranks)
        check("is_token_in_rank", token_in_rank, shape, torch.bool, device=group.device)
        check("num_tokens_per_expert", per_expert, (None,), torch.int32, device=group.device)
        ranks = token_in_rank, per_expert
        return Routing(token_in_rank.shape[0], 0, per_expert.numel(), ranks=ranks)

    def by_handle(self, handle: Any) -> Routing:
        """Routes tokens to the same places as before, through the buffer of that dispatch."""
        cached = own_handle(handle)
        before = cached.routing
        return Routing(before.tokens, before.top_k, before.num_experts, cached=cached)

    def dispatch(
        self,
        x: Tokens,
        weights: torch.Tensor | None,
        routing: Routing,
        options: DispatchOptions,
    ) -> tuple[Received, CudaHandle, list[int]]:
        """Sends tokens, and returns the received ones; see :meth:`NormalDispatch.run`."""
        plans = self.plans if routing.cached is None else routing.cached.plans
        return NormalDispatch(plans, x, weights, routing, options).run()

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        weights: torch.Tensor | None,
        bias: Any,
        options: CombineOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends rows back and sums them, and weights if there are any. The call goes through the
        buffer of the dispatch."""
        handle = own_handle(handle)
        group, routing = handle.group, handle.routing
        check("x", x, (None, None), torch.bfloat16, device=group.device)
        num_rows, hidden = x.shape
        if weights is not None:
            shape = (num_rows, routing.top_k) if options.sends == "row" else (num_rows,)
            check("topk_weights", weights, shape, torch.float32, device=group.device)
        out, out_weights = group.empty((routing.tokens, hidden), torch.bfloat16), None
        if weights is not None:
            out_weights = group.empty((routing.tokens, routing.top_k), torch.float32)
        first_bias, second_bias = biases(bias, out)
        stream = group.stream()
        group.keep_for(stream, handle.stream, handle.memory_in_use())
        _memory, scratch = group.combine_scratch_of(handle)
        combine = _core.EpCudaNormalCombine(
            group.native,
            handle.native,
            len=num_rows,
            rows=address(x),
            hidden=hidden,
            weights=weights_address(weights),
            sends=options.sends,
            blocks=options.max_blocks,
            scratch=scratch,
            stream=stream,
        )
        combine.finish(
            rows=address(out),
            sums=options.sums,
            bias=first_bias,
            second_bias=second_bias,
            weights=address(out_weights),
        )
        return out, out_weights


@lru_cache(maxsize=64)
def layout_workspace(
    tokens: int, top_k: int, num_experts: int, ranks: int
) -> _core.EpCudaLayoutWorkspace:
    """The places of a layout's counts and scratch in one allocation."""
    return _core.EpCudaLayoutWorkspace(
        tokens=tokens, top_k=top_k, num_experts=num_experts, ranks=ranks
    )


def own_handle(handle: Any) -> CudaHandle:
    """A handle of a rank with a GPU. Raises for one of the CPU."""
    if not isinstance(handle, CudaHandle):
        raise RuntimeError("the handle is of a buffer on the CPU")
    return handle
