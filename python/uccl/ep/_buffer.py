"""DeepEP's first interface: low latency and normal mode on one buffer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import (
    Backend,
    BufferParams,
    DispatchOptions,
    LowLatencyDispatchOptions,
    combine_options,
    low_latency_combine_options,
)
from uccl.ep._base import BaseBuffer
from uccl.ep._checks import Hook, check, check_count, refuse_unknown
from uccl.ep._config import MAX_TOP_K, Config
from uccl.ep._events import EventHandle, EventOverlap
from uccl.ep._formats import GROUP, Format
from uccl.ep._handles import LowLatencyHandle, NormalHandle
from uccl.ep._ranks import Ranks
from uccl.ep._row_layout import RowLayout
from uccl.ep._tensors import align, align_all
from uccl.ep._untraced import untraced


class Buffer(BaseBuffer):
    """Memory of a group of ranks, and the calls that move tokens through it.

    Making a buffer is collective; dropping it is not. All ranks are on the CPU, or all are on GPUs.
    On a GPU a call returns when it is enqueued on the current stream; its failure is raised by the
    next call, its hook, or :meth:`check`.

    With ``store``, ranks may come and go: see :meth:`connect_ranks`.

    Args:
        group: The ranks' ``torch.distributed`` group, of gloo or NCCL.
        num_nvl_bytes: Bytes for calls; see :meth:`Config.get_nvl_buffer_size_hint`.
        num_rdma_bytes: More bytes; calls use both together.
        low_latency_mode: Only recorded: a buffer has both modes.
        allow_nvlink_for_low_latency_mode: If it is false on any rank, ranks with GPUs reach each
            other through host memory, in both modes.
        explicitly_destroy: Only recorded.
        enable_shrink: Whether a call goes on without peers that are late, instead of failing.
        comm: An MPI communicator, in place of ``group``.
        timeout: Seconds that a call waits for its peers; ``UCCL_EP_TIMEOUT_SECS``, or 100, if it is
            None. Then the call fails and names them.
        store: A ``torch.distributed.Store`` by which ranks meet. A rank without ``group`` and
            ``comm`` is alone until it is connected.
        rank: The number of a rank that has only ``store``.
        num_ranks: The most ranks, for a rank that has only ``store``.
        device: The CPU or a GPU. If it is None: ``UCCL_EP_DEVICE``; else the current GPU if the
            group has NCCL or the process has begun to use CUDA; else the first tensor's device.
        allow_mnnvl, use_fabric: If one is true, ranks with GPUs on several hosts of one NVLink
            domain reach each other directly. Where the driver has no fabric handles, ranks are as
            without it; ``use_fabric`` then says so in the log ``uccl``.
        num_qps_per_rank, is_intranode: Not used.

    Raises:
        NotImplementedError: For an unknown keyword that is neither None nor False.
        RuntimeError: On all ranks, if one of them finds no GPU that it asked for.
        ValueError: Without ``group``, ``comm``, or ``store`` with ``rank`` and ``num_ranks``; or if
            some ranks are on GPUs and some on the CPU.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        is_intranode: bool | None = None,
        timeout: float | None = None,
        store: Any = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        device: torch.device | str | int | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Buffer", unknown)
        check_count("num_nvl_bytes", num_nvl_bytes)
        check_count("num_rdma_bytes", num_rdma_bytes)
        ranks = Ranks(group, comm, store, rank, num_ranks)
        params = BufferParams(
            num_nvl_bytes + num_rdma_bytes,
            timeout,
            timeout,
            bool(enable_shrink),
            # Both modes share one group, and so the path between its ranks.
            via_host=not allow_nvlink_for_low_latency_mode,
            in_fabric=bool(allow_mnnvl or use_fabric),
            says_fabric=bool(use_fabric),
        )
        super().__init__(ranks, params, device)
        self.rank, self.group_size = ranks.rank, ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the most SMs of a call in normal mode without a ``config``. The CPU has none.

        Args:
            new_num_sms: An even number above 0.

        Raises:
            ValueError: For any other number.
        """
        if new_num_sms <= 0 or new_num_sms % 2:
            raise ValueError(f"num_sms is even and more than 0, not {new_num_sms}")
        cls.num_sms = new_num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns whether FP8 is there: always True."""
        return True

    @staticmethod
    @untraced
    def capture() -> EventOverlap:
        """Makes an event behind the current stream's work up to now.

        Returns:
            The event; on the CPU one that is over.
        """
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Computes the size of a buffer for low latency mode: two dispatches and two combines at a
        time, of any top-k.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens of any rank.
            hidden: Values of a row.
            num_ranks: Ranks of the group.
            num_experts: Experts of all ranks.

        Returns:
            Bytes, a multiple of 128.

        Raises:
            ValueError: For a negative number, or no ranks.
        """
        check_count("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        check_count("hidden", hidden)
        check_count("num_ranks", num_ranks, 1)
        check_count("num_experts", num_experts)
        tokens, local = num_max_dispatch_tokens_per_rank, num_experts // num_ranks
        top_k = min(MAX_TOP_K, num_experts)
        dispatch = _core.ep_dispatch_len(
            payload=2 * hidden,
            scales=0,
            top_k=top_k,
            local_experts=local,
            slots=tokens,
            nodes=_core.EpNodes(1, num_ranks),
        )
        packed = hidden // GROUP * (2 * GROUP + 4)
        combine = _core.ep_row_place_len(values=packed, weights=0, slots=top_k, tokens=tokens)
        return align(2 * (dispatch + combine), 128)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for dispatch: the same for any ``num_ranks``, with the class's
        number of SMs."""
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for combine: the same for any ``num_ranks``, with the class's
        number of SMs."""
        return Config(cls.num_sms)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Makes a view of this rank's own memory, which the next call overwrites.

        Args:
            dtype: The view's dtype.
            size: Its shape; one dimension, up to the end, if it is None.
            offset: Bytes before it.
            use_rdma_buffer: Whether ``offset`` counts from the end of ``num_nvl_bytes``.

        Returns:
            The view.

        Raises:
            ValueError: If the memory ends before the view does.
        """
        start = offset + (self.num_nvl_bytes if use_rdma_buffer else 0)
        count = None if size is None else size.numel()
        flat = self._pool_tensor(dtype, start, count)
        return flat if size is None else flat.view(size)

    # Normal mode.

    @untraced
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts the tokens for each rank and expert.

        Args:
            topk_idx: ``[n, K]`` i64 or i32: each token's experts; negative: none.
            num_experts: Experts of all ranks, E.
            previous_event: An event that the call waits for. An asynchronous call waits for the
                current stream's work if it is None.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            allocate_on_comm_stream: Whether memory of an asynchronous call belongs to the
                communication stream. With ``previous_event`` it does.

        Returns:
            Tokens by rank, ``[R]`` i32; None, for tokens by node; tokens by expert, ``[E]`` i32;
            whether each token goes to each rank, ``[n, R]`` bool; and an event, empty without
            ``async_finish``.

        Raises:
            RuntimeError: If the buffer has been destroyed.
            ValueError: For choices with a wrong shape, dtype or device, or, on the CPU, of an
                expert that does not exist.
        """
        check_count("num_experts", num_experts)
        backend = self._begin(topk_idx)
        call = self._call(
            "get_dispatch_layout",
            backend,
            async_finish,
            previous_event,
            allocate_on_comm_stream,
            topk_idx,
        )
        with call:
            per_rank, per_expert, token_in_rank = backend.layout(topk_idx, num_experts)
        event = call.done(per_rank, per_expert, token_in_rank)
        return per_rank, None, per_expert, token_in_rank, event

    @untraced
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        zero_copy: bool = False,
    ) -> tuple[
        Any,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        NormalHandle | None,
        EventOverlap,
    ]:
        """Sends each token once to each rank that has one of its experts.

        With ``zero_copy``, ``recv_x`` (and scales) may be a view of the buffer: its rows are some
        bytes apart, there are more of them than tokens may arrive, and those without a token may be
        anywhere; ``recv_topk_idx`` is -1 there. The view is valid until the buffer's next call
        begins. Calls refuse rows in the buffer: copy them before a combine, or before another
        dispatch. All ranks ask for a view, or none. Without ``topk_idx``, on the CPU, on GPUs that
        do not reach each other and in a buffer that is too small, the rows are copied to a tensor
        of their own.

        Args:
            x: ``[n, H]``, of any dtype; or this and its scales, ``[n, S]`` of four bytes each.
            handle: The handle of an earlier dispatch: tokens go to the same places.
            num_tokens_per_rank, num_tokens_per_rdma_rank: Not used.
            is_token_in_rank: ``[n, R]`` bool, from :meth:`get_dispatch_layout`. On GPUs tokens are
                not counted again, if it is the very tensor returned for the same, unchanged
                ``topk_idx``.
            num_tokens_per_expert: ``[E]`` i32: tokens of each expert; with ``topk_idx`` only its
                length counts.
            topk_idx: ``[n, K]`` i64 or i32: each token's experts; negative: none. Without it,
                ``is_token_in_rank`` decides.
            topk_weights: ``[n, K]`` f32.
            expert_alignment: Rounds up the returned counts by expert.
            num_worst_tokens: Rows of the output, for as many tokens as may arrive; the list of
                counts is then empty. 0: as many as arrive. On GPUs the same on all ranks, if a
                rank's part of them does not fit into the buffer at once.
            config: On GPUs, its ``num_sms`` is the most blocks of a launch.
            previous_event: An event that the call waits for. An asynchronous call waits for the
                current stream's work if it is None.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            allocate_on_comm_stream: Whether memory of an asynchronous call belongs to the
                communication stream. With ``previous_event`` it does.
            zero_copy: Whether ``recv_x`` may be a view of the buffer. Needs ``num_worst_tokens``,
                or the handle of such a call.

        Returns:
            ``recv_x`` ``[m, H]`` in order of rank and token, or this and its scales ``[m, S]``;
            ``recv_topk_idx`` ``[m, K]``, with numbers of this rank's experts, or -1 for others;
            ``recv_topk_weights`` ``[m, K]`` f32, 0 for others; a list of aligned counts, one for
            each local expert, empty with ``num_worst_tokens``; a handle; and an event. With
            ``handle`` only ``recv_x`` and the event are returned, and None for the rest.

        Raises:
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        rows, scales = x if isinstance(x, tuple) else (x, None)
        backend = self._begin(rows)
        if zero_copy and handle is None and not num_worst_tokens:
            raise ValueError(
                "zero_copy needs num_worst_tokens: the host does not count rows that are a view"
            )
        check_count("expert_alignment", expert_alignment, 1)
        if handle is not None and (topk_idx is not None or topk_weights is not None):
            raise ValueError("with a handle, topk_idx and topk_weights are None")
        dtype = None if topk_idx is None else topk_idx.dtype
        max_blocks = self._max_blocks(config)
        options = dispatch_options(num_worst_tokens, dtype, bool(zero_copy), max_blocks)
        call = self._call(
            "dispatch",
            backend,
            async_finish,
            previous_event,
            allocate_on_comm_stream,
            x,
            topk_idx,
            topk_weights,
            is_token_in_rank,
            num_tokens_per_expert,
            state=None if handle is None else handle.state,
        )
        with call:
            routing = self._routing(
                backend, handle, topk_idx, is_token_in_rank, num_tokens_per_expert
            )
            sent = rows, scales
            received, state, counts = backend.dispatch(sent, topk_weights, routing, options)
        recv_x = received.returned()
        event = call.done(recv_x, received.choices, received.weights)
        if handle is not None:
            return recv_x, None, None, None, None, event
        made = NormalHandle(state.normal_tables(is_token_in_rank))
        made.state, made.num_tokens = state, state.num_tokens
        aligned = align_all(counts, expert_alignment)
        return recv_x, received.choices, received.weights, aligned, made, event

    def _routing(
        self,
        backend: Backend,
        handle: NormalHandle | None,
        topk_idx: torch.Tensor | None,
        token_in_rank: torch.Tensor | None,
        per_expert: torch.Tensor | None,
    ) -> Any:
        """The routing of tokens by a handle, by their choices, or by their ranks."""
        if handle is not None:
            return backend.by_handle(handle.state)
        if topk_idx is not None:
            if per_expert is None:
                raise ValueError("num_tokens_per_expert is missing; get_dispatch_layout has it")
            return backend.by_choices(topk_idx, per_expert.numel(), token_in_rank)
        if token_in_rank is None or per_expert is None:
            raise ValueError(
                "without topk_idx, is_token_in_rank and num_tokens_per_expert are needed"
            )
        return backend.by_ranks(token_in_rank, per_expert)

    def _max_blocks(self, config: Config | None) -> int:
        """The most blocks of a launch on a GPU."""
        return self.num_sms if config is None else config.num_sms

    @untraced
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums the rows that ranks return for each token, without weights.

        Sums are made in f32, beginning with the biases and then rank by rank, and rounded once. On
        several nodes the sum of each node is made first, and rounded too.

        Args:
            x: ``[m, H]`` bf16: a row for each received token, in the order of dispatch.
            handle: The dispatch's handle.
            topk_weights: ``[m, K]`` f32, to be summed too; or None.
            bias: ``[n, H]`` bf16, or two of them; or None.
            config: On GPUs, its ``num_sms`` is the most blocks of a launch.
            previous_event: An event that the call waits for. An asynchronous call waits for the
                current stream's work if it is None.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            allocate_on_comm_stream: Whether memory of an asynchronous call belongs to the
                communication stream. With ``previous_event`` it does.

        Returns:
            The sums, ``[n, H]`` bf16; the sums of weights, ``[n, K]`` f32, or None; and an event.

        Raises:
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For tensors with wrong shapes, dtypes or devices.
        """
        backend = self._there()
        options = combine_options("rank", "row", True, self._max_blocks(config))
        call = self._call(
            "combine",
            backend,
            async_finish,
            previous_event,
            allocate_on_comm_stream,
            x,
            topk_weights,
            bias,
            state=handle.state,
        )
        with call:
            out, out_weights = backend.combine(x, handle.state, topk_weights, bias, options)
        return out, out_weights, call.done(out, out_weights)

    @untraced
    def internode_dispatch(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`dispatch`."""
        return self.dispatch(*args, **keywords)

    @untraced
    def internode_combine(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`combine`."""
        return self.combine(*args, **keywords)

    # Low latency mode.

    @untraced
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | float | None = None,
        rank_bound: int | None = None,
        **unknown: Any,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token to its experts, quantised on the way with ``use_fp8`` or ``use_nvfp4``.

        The first ``count[e]`` rows of local expert ``e`` are valid, in order of rank and token.
        Below, T is ``num_max_dispatch_tokens_per_rank``, E the experts and R the ranks.

        Args:
            x: ``[n, H]`` bf16, with H a multiple of 128.
            topk_idx: ``[n, K]`` i64 or i32: each token's experts; negative: none.
            num_max_dispatch_tokens_per_rank: The most tokens of any rank, T; the same on all ranks.
            num_experts: Experts of all ranks, E.
            cumulative_local_expert_recv_stats: ``[E/R]`` i32: the tokens of each local expert are
                added; or None.
            dispatch_wait_recv_cost_stats: ``[R]`` i64: for each rank, the nanoseconds that the
                receive waited for its tokens are added; or None. On GPUs that reach each other,
                with few tokens, it is the wait for the rank's counts, which come before them.
            use_fp8: Whether rows are E4M3, with an f32 scale for 128 values.
            round_scale: Whether scales are powers of two.
            use_ue8m0: Whether scales are exponents, four in an i32. Needs ``round_scale``.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the tensors.
            use_nvfp4: Whether rows are E2M1, with an E4M3 scale for 16 values, ``amax / 6 *
                x_global_scale``. ``use_fp8`` is then not read.
            x_global_scale: NVFP4's global scale: a number, or a tensor of one f32; 1 if it is None.
            rank_bound: The number of ranks, from rank 0 on, that received rows have room for: R in
                the shapes of rows and scales below, and of the combine's ``x``. The other ranks are
                masked or absent; tokens of theirs are not received. None: all.

        Returns:
            The rows, or a pair of rows and scales; ``count`` ``[E/R]`` i32; a handle; an event; and
            the hook, or None. Rows are ``[E/R, R*T, H]`` bf16 or E4M3. FP8's scales are ``[E/R,
            R*T, H/128]`` f32, or ``[E/R, R*T, H/512]`` i32 with ``use_ue8m0``; those of one group
            of channels are contiguous. NVFP4's rows are ``[R*T, H/2, E/R]`` u8, the first of two
            values in the lower half of a byte. Its scales are in tiles of 128 rows by 4 scales:
            scale ``s`` of row ``r`` of expert ``e`` is
            ``[r % 32, r % 128 // 32, r // 128, s % 4, s // 4, e]``.

        Raises:
            NotImplementedError: For an unknown keyword that is neither None nor False.
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        refuse_unknown("low_latency_dispatch", unknown)
        backend = self._begin(x)
        self._check_stats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        row_format = Format.of(use_fp8, round_scale, use_ue8m0, use_nvfp4, x_global_scale)
        check("x", x, (None, None), torch.bfloat16, device=self.device)
        hidden, max_tokens = x.shape[1], num_max_dispatch_tokens_per_rank
        check_count("num_max_dispatch_tokens_per_rank", max_tokens)
        check_count("num_experts", num_experts)
        if hidden % GROUP:
            raise ValueError(f"hidden is a multiple of {GROUP}, not {hidden}")
        bound = self.group_size if rank_bound is None else rank_bound
        if not self.rank < bound <= self.group_size:
            raise ValueError(
                f"rank_bound is {self.rank + 1} to {self.group_size} on rank {self.rank}, not {bound}"
            )
        options = LowLatencyDispatchOptions(
            max_tokens,
            num_experts,
            row_format,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            bool(return_recv_hook),
            bound,
        )
        call = self._call(
            "low_latency_dispatch",
            backend,
            async_finish,
            None,
            False,
            x,
            topk_idx,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            x_global_scale,
        )
        with call:
            dispatch = backend.low_latency_dispatch(x, topk_idx, options)
            handle = LowLatencyHandle((*dispatch.tables, max_tokens, hidden, num_experts))
            handle.owner, handle.stream = self, backend.current_stream()
            handle.rank_bound = bound

            def receive() -> None:
                handle.state = dispatch.receive()

            if return_recv_hook:
                dispatch.begin()
            else:
                receive()
        returned, count = dispatch.returned, dispatch.count
        event = call.done(returned, count, dispatch.tables, keeps=True)
        return returned, count, handle, event, untraced(receive) if return_recv_hook else None

    @untraced
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        **unknown: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sums the rows that experts made of each token, each times its weight.

        Sums are made in f32: for each rank choice by choice, rounded to 24 bits, and then over all
        ranks, rounded once. On the CPU, peers read ``x`` in place if it is a tensor that a dispatch
        or :meth:`get_next_low_latency_combine_buffer` returned; with a hook, only with
        ``zero_copy``, and then ``x`` must not change until all ranks have called their hooks.

        Args:
            x: ``[E/R, R*T, H]`` bf16: rows where the dispatch's rows were.
            topk_idx: ``[n, K]`` i64 or i32, as in the dispatch.
            topk_weights: ``[n, K]`` f32.
            handle: The dispatch's handle.
            use_logfmt: Whether rows are sent with ten bits a value, where their magnitudes are
                below 1.
            zero_copy: Whether the rows in the tensor of :meth:`get_next_low_latency_combine_buffer`
                are sent, without a copy.
            async_finish: Whether the call is on the communication stream, and an event behind it is
                returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the sums.
            out: ``[n, H]`` bf16 for the sums; or None.
            combine_wait_recv_cost_stats: ``[R]`` i64: for each rank, the nanoseconds that the
                receive waited for its rows are added; or None. On GPUs that reach each other, with
                few tokens, it is the wait until the rank began to send.
            overlap: Whether experts may still be computing ``x``. Rows are not sent one by one, by
                the signals of their experts: the call waits for all work that the stream of the
                dispatch was given up to now. The experts have to be among it.
            comp_signal, src_signals: One of them is needed for ``overlap``; neither is read.
            packed_recv_count, block_m, threshold, num_sms, src_signal_expect_value: Not used.

        Returns:
            The sums, ``[n, H]`` bf16; an event; and the hook, or None.

        Raises:
            NotImplementedError: For an unknown keyword that is neither None nor False.
            RuntimeError: If the dispatch's hook has not been called, the handle is of another
                buffer, or a peer is lost or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        refuse_unknown("low_latency_combine", unknown)
        backend = self._there()
        self._check_stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        if zero_copy and use_logfmt:
            raise ValueError("zero_copy and use_logfmt exclude each other")
        if overlap and comp_signal is None and src_signals is None:
            raise ValueError("overlap needs comp_signal or src_signals, which the experts set")
        if handle.state is None:
            raise RuntimeError("the dispatch's hook has not been called")
        self._check_owner(handle)
        check("x", x, self._combine_shape(handle), torch.bfloat16, device=self.device)
        if zero_copy and handle.to_combine is not None:
            # As in DeepEP, the memory that the caller got is sent, even if `x` is another tensor.
            x, handle.to_combine = handle.to_combine, None
        options = low_latency_combine_options(
            bool(use_logfmt), bool(zero_copy), bool(return_recv_hook)
        )
        choices, results = (topk_idx, topk_weights), (out, combine_wait_recv_cost_stats)
        if overlap:
            wait_for_experts(backend.current_stream(), handle.stream)
        call = self._call(
            "low_latency_combine", backend, async_finish, None, False, x, *choices, *results
        )
        with call:
            combine = backend.low_latency_combine(x, choices, handle.state, results, options)
            if return_recv_hook:
                combine.begin()
            else:
                combine.finish()
        event = call.done(combine.out, keeps=True)
        if not return_recv_hook:
            return combine.out, event, None

        # The rows live until the hook has been called.
        @untraced
        def finish(x: torch.Tensor = x) -> None:
            combine.finish()

        return combine.out, event, finish

    def _combine_shape(self, handle: LowLatencyHandle) -> tuple[int, int, int]:
        """The shape of the experts' rows for a combine."""
        _, _, max_tokens, hidden, num_experts = handle
        return num_experts // self.group_size, handle.rank_bound * max_tokens, hidden

    def _check_stats(self, name: str, stats: torch.Tensor | None) -> None:
        if stats is not None:
            check(name, stats, (self.group_size,), torch.int64, device=self.device)

    @untraced
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Allocates memory for the experts' rows, which a combine with ``zero_copy`` does not copy.

        The handle's next combine with ``zero_copy`` sends this memory, even if its ``x`` is another
        tensor. Each call needs a new one.

        Args:
            handle: The dispatch's handle.

        Returns:
            ``[E/R, R*T, H]`` bf16, not initialised.

        Raises:
            RuntimeError: If the buffer has been destroyed.
        """
        rows = self._there().combine_input(self._combine_shape(handle))
        handle.to_combine = rows
        return rows

    @untraced
    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Waits for all ranks that take part, with the timeout of a call.

        There is nothing to clean: data of earlier calls is recognised by its call number.

        Args:
            num_max_dispatch_tokens_per_rank, hidden, num_experts: Not used.

        Raises:
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers.
        """
        self._there().barrier()

    #: DeepEP's names for these methods.
    low_latency_update_mask_buffer = BaseBuffer.update_mask_buffer
    low_latency_query_mask_buffer = BaseBuffer.query_mask_buffer
    low_latency_clean_mask_buffer = BaseBuffer.clean_mask_buffer


def wait_for_experts(stream: torch.cuda.Stream | None, experts: torch.cuda.Stream | None) -> None:
    """Makes the stream of a combine wait for the work of the experts' stream, if there is one."""
    if stream is None or experts is None or stream == experts:
        return
    try:
        stream.wait_stream(experts)
    except RuntimeError as why:
        raise RuntimeError(
            f"low_latency_combine: overlap cannot wait for the stream of the dispatch: {why}"
        ) from why


@lru_cache(maxsize=64)
def dispatch_options(
    num_worst_tokens: int, choice_dtype: torch.dtype | None, zero_copy: bool, max_blocks: int
) -> DispatchOptions:
    """The backend's options for a dispatch."""
    check_count("num_worst_tokens", num_worst_tokens)
    check_count("num_sms", max_blocks)
    return DispatchOptions(
        RowLayout(num_worst_tokens) if num_worst_tokens else None,
        choice_dtype=choice_dtype,
        zero_foreign_weights=True,
        zero_copy=zero_copy,
        max_blocks=max_blocks,
        uses_relays=True,
    )


def initialize_uccl(
    scratch: Any,
    scratch_nbytes: int,
    rank: int,
    num_ranks: int,
    group: Any,
    num_experts: int = 0,
    is_intranode: bool | None = None,
    use_normal_mode: bool = False,
    rdma_buffer_is_host_allocated: bool = False,
    **unknown: Any,
) -> tuple[list[Any], None]:
    """Does nothing: UCCL's programs call it before they make a :class:`Buffer`, which needs no
    preparation.

    Returns:
        An empty list of proxies, and None for their workers, for :func:`destroy_uccl`.

    Raises:
        NotImplementedError: For an unknown keyword that is neither None nor False.
    """
    refuse_unknown("initialize_uccl", unknown)
    return [], None


def destroy_uccl(proxies: Any, workers: Any) -> None:
    """Does nothing: UCCL's programs call it at their end."""
