"""The calls that move tokens, in both modes."""

from __future__ import annotations

from typing import Any, Callable

import torch
from uccl.ep import Config, EventHandle, EventOverlap
from uccl.ep._handles import LowLatencyHandle

from nixl_ep._connections import Connections

Hook = Callable[[], None]


class Handle(tuple[Any, ...]):
    """``(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden)``, and the handle
    below."""

    below: LowLatencyHandle


class Mode:
    """The part of the buffer that the calls of both modes use."""

    _experts: int
    """Experts of each rank."""

    def _there(self) -> Connections:
        raise NotImplementedError

    def _num_ranks_of(self, num_experts: int | None) -> int:
        raise NotImplementedError

    def _check_waits(self, name: str, waits: torch.Tensor | None, ranks: int) -> None:
        raise NotImplementedError


class LowLatency(Mode):
    """Low latency mode: few tokens, rows by expert."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Sends each token to its experts, quantised on the way with ``use_fp8``.

        The first ``count[e]`` rows of local expert ``e`` are valid, in order of rank and token.
        Below, T is ``num_max_dispatch_tokens_per_rank``, E the experts of a rank, and R the ranks
        that ``num_experts`` stands for.

        Args:
            x: ``[n, H]`` bf16, with H a multiple of 128.
            topk_idx: ``[n, K]`` i64 or i32: each token's experts; negative: none.
            num_max_dispatch_tokens_per_rank: The most tokens of any rank, T; the same on all ranks.
            num_experts: The experts of the ranks that the results have room for: at least of all
                that take part, at most of all that may. None: up to the largest that takes part.
            cumulative_local_expert_recv_stats: ``[E]`` i32: the tokens of each local expert are
                added; or None.
            dispatch_wait_recv_cost_stats: ``[R]`` i64: for each rank, the nanoseconds that the
                receive waited for its tokens are added; or None.
            use_fp8: Whether rows are E4M3, with an f32 scale for 128 values.
            round_scale: Whether scales are powers of two.
            use_ue8m0: Whether scales are exponents, four in an i32. Needs ``round_scale``.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the tensors.

        Returns:
            The rows, ``[E, R*T, H]``, or a pair of rows and scales, ``[E, R*T, H/128]`` f32 or
            ``[E, R*T, H/512]`` i32; ``count`` ``[E]`` i32; a handle; an event; and the hook, or
            None.

        Raises:
            RuntimeError: If the buffer has no memory, or a peer makes another call.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        bound = self._num_ranks_of(num_experts)
        connections = self._there()
        members, waits = connections.members, dispatch_wait_recv_cost_stats
        self._check_waits("dispatch_wait_recv_cost_stats", waits, bound)
        engine = connections.join()
        by_rank = wider(waits, members.num_ranks)
        rows, count, below, event, hook = engine.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            members.num_ranks * self._experts,
            cumulative_local_expert_recv_stats,
            by_rank,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
            rank_bound=bound,
        )
        src_info, layout_range, most, hidden, _ = below
        handle = Handle((src_info, layout_range[:, :bound], most, hidden))
        handle.below = below
        return rows, count, handle, event, narrowed(waits, by_rank, event, hook)

    def dispatch(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`low_latency_dispatch`."""
        return self.low_latency_dispatch(*args, **keywords)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sums the rows that experts made of each token, each times its weight. Rows of ranks that
        are masked are left out.

        Args:
            x: ``[E, R*T, H]`` bf16: rows where the dispatch's rows were.
            topk_idx: ``[n, K]`` i64 or i32, as in the dispatch.
            topk_weights: ``[n, K]`` f32.
            handle: The dispatch's handle.
            use_logfmt: Whether rows are sent with ten bits a value, where their magnitudes are
                below 1.
            zero_copy: Whether the rows in the tensor of :meth:`get_next_combine_buffer` are sent,
                without a copy.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the sums.
            out: ``[n, H]`` bf16 for the sums; or None.
            combine_wait_recv_cost_stats: ``[R]`` i64: for each rank, the nanoseconds that the
                receive waited for its rows are added; or None.

        Returns:
            The sums, ``[n, H]`` bf16; an event; and the hook, or None.

        Raises:
            RuntimeError: If the dispatch's hook has not been called, or ranks have met since the
                dispatch.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        connections, waits = self._there(), combine_wait_recv_cost_stats
        self._check_waits("combine_wait_recv_cost_stats", waits, handle.below.rank_bound)
        by_rank = wider(waits, connections.members.num_ranks)
        sums, event, hook = connections.engine.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle.below,
            use_logfmt,
            zero_copy,
            async_finish,
            return_recv_hook,
            out,
            by_rank,
        )
        return sums, event, narrowed(waits, by_rank, event, hook)

    def combine(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`low_latency_combine`."""
        return self.low_latency_combine(*args, **keywords)

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Allocates memory for the experts' rows, which a combine with ``zero_copy`` does not copy.

        Args:
            handle: The dispatch's handle.

        Returns:
            ``[E, R*T, H]`` bf16, not initialised.
        """
        return self._there().engine.get_next_low_latency_combine_buffer(handle.below)


class HighThroughput(Mode):
    """High-throughput mode: any number of tokens, rows by rank. Its calls are those of
    :class:`uccl.ep.Buffer`, with one number of experts on each rank."""

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As :meth:`uccl.ep.Buffer.get_dispatch_layout`. ``num_experts`` are those of all ranks that
        the buffer has room for."""
        engine = self._there().engine
        return engine.get_dispatch_layout(
            topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream
        )

    def ht_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As :meth:`uccl.ep.Buffer.dispatch`."""
        return (
            self._there()
            .join()
            .dispatch(
                x,
                handle,
                num_tokens_per_rank,
                num_tokens_per_rdma_rank,
                is_token_in_rank,
                num_tokens_per_expert,
                topk_idx,
                topk_weights,
                expert_alignment,
                config=config,
                previous_event=previous_event,
                async_finish=async_finish,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
        )

    def ht_combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As :meth:`uccl.ep.Buffer.combine`."""
        return self._there().engine.combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )


def wider(waits: torch.Tensor | None, ranks: int) -> torch.Tensor | None:
    """A tensor of waits of so many ranks: the caller's, or a new one if the caller's has fewer."""
    return waits if waits is None or len(waits) == ranks else waits.new_zeros(ranks)


def narrowed(
    waits: torch.Tensor | None,
    by_rank: torch.Tensor | None,
    event: EventOverlap,
    hook: Hook | None,
) -> Hook | None:
    """The hook of a call, behind which its waits are added to the caller's tensor, if that is
    another one. Without a hook they are added behind the call, or behind the wait for its event."""
    if waits is None or by_rank is None or waits is by_rank:
        return hook
    mine, all_of_them, receive = waits, by_rank, hook

    def add() -> None:
        if receive is not None:
            receive()
        mine.add_(all_of_them[: len(mine)])

    if receive is not None:
        return add
    if event.event is not None:
        event.register_hook_after_wait(add)
    else:
        add()
    return None
