"""DeepEP's second interface: one dispatch and one combine, for any number of tokens."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import BufferParams, DispatchOptions, NormalHandleState, combine_options
from uccl.ep._base import BaseBuffer
from uccl.ep._checks import NotHere, check, check_count, refuse_unknown
from uccl.ep._config import LOCAL_EXPERTS, MAX_TOP_K
from uccl.ep._events import EventHandle, EventOverlap
from uccl.ep._handles import EPHandle
from uccl.ep._ranks import Ranks, node_of_environment
from uccl.ep._row_layout import RowLayout
from uccl.ep._tensors import align, align_all
from uccl.ep._untraced import untraced

UNIT = 2 << 20
#: GB/s of a GPU's links to its peers, if the caller gives no number: an H200's.
NVLINK_GBS = 430.0
#: The least SMs of a call beside which nothing is computed.
ALONE = 64


@dataclass(frozen=True)
class ElasticOptions:
    """The options of a dispatch of the second interface: the caller's, or those of a handle."""

    num_experts: int
    num_ranks: int
    max_tokens: int
    """The most tokens of any rank."""
    top_k: int
    choice_dtype: torch.dtype
    alignment: int
    num_sms: int
    uses_relays: bool
    """Whether tokens for another node cross once, to a relay there."""
    do_cpu_sync: bool
    is_counted: bool
    """Whether there are exactly as many rows as arrive."""
    do_expand: bool
    do_zero_padding: bool
    is_col_major: bool
    """Whether the scales of one channel are contiguous."""
    zero_copy: bool
    """Whether received rows may be a view of the communication buffer."""

    @cached_property
    def dispatch(self) -> DispatchOptions:
        """The backend's options. Raises for options that exclude each other."""
        check_options(self)
        row_layout, alignment = None, self.alignment if self.do_expand else None
        if not self.is_counted:
            tokens, local_experts = self.num_ranks * self.max_tokens, self._local_experts()
            row_layout = RowLayout.upper_bound(tokens, alignment, self.top_k, local_experts)
        return DispatchOptions(
            row_layout,
            alignment,
            None if self.do_expand else self.choice_dtype,
            zero_gaps=self.do_zero_padding,
            is_col_major=self.is_col_major,
            zero_copy=self.zero_copy,
            max_tokens=self.max_tokens,
            max_blocks=self.num_sms,
            needs_counts=self.do_cpu_sync,
            uses_relays=self.uses_relays,
        )

    @cached_property
    def max_expanded_tokens(self) -> int:
        """The most rows by expert, with the gaps between experts."""
        tokens = self.num_ranks * self.max_tokens
        local_experts = self._local_experts()
        most = RowLayout.upper_bound(tokens, self.alignment, self.top_k, local_experts)
        return most.num_rows()

    def _local_experts(self) -> int:
        return self.num_experts // self.num_ranks


#: Makes options, or returns those of an earlier call: that takes a third of the time.
elastic_options = lru_cache(maxsize=64)(ElasticOptions)


class ElasticBuffer(BaseBuffer):
    """Memory of a group of ranks, and the calls that move tokens through it.

    Making a buffer is collective; dropping it is not. ``comm``, ``store``, ``rank``, ``num_ranks``,
    ``device`` and ``use_fabric`` are as in :class:`Buffer`.

    Args:
        group: The ranks' ``torch.distributed`` group, of gloo or NCCL.
        num_bytes: Bytes for calls, which use no more. If it is None, :meth:`get_buffer_size_hint`
            computes it.
        num_cpu_bytes: 0: anything else is refused.
        num_max_tokens_per_rank: The most tokens of any rank, in calls that give no other number.
        hidden: Values of a row, for the size.
        num_topk: The most choices of a token, for the size; 0: 32.
        use_fp8_dispatch: Whether dispatched rows are FP8 with scales, for the size.
        deterministic: Only recorded: calls are.
        allow_hybrid_mode: Whether tokens for another node cross once, to a relay there.
        allow_multiple_reduction: Whether expanded rows of a token are summed and rounded by each
            rank, and by each node, before they go back.
        prefer_overlap_with_compute: Whether :meth:`get_theoretical_num_sms` leaves SMs to kernels
            that run beside a call.
        num_cpu_timeout_secs: Seconds that a call waits for its peers on the CPU; and, with GPUs,
            that the host waits for counts.
        num_gpu_timeout_secs: Seconds that a call waits for its peers on a GPU.
        explicitly_destroy: Only recorded.
        sl_idx, num_allocated_qps: Not used.

    Raises:
        NotImplementedError: For ``num_cpu_bytes``, or an unknown keyword that is neither None nor
            False.
        ValueError: Without ``num_bytes`` and the sizes that it follows from, or as :class:`Buffer`.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        use_fabric: bool = False,
        comm: Any = None,
        store: Any = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        device: torch.device | str | int | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("ElasticBuffer", {**unknown, "num_cpu_bytes": num_cpu_bytes or None})
        ranks = Ranks(group, comm, store, rank, num_ranks)
        if num_bytes is None:
            if group is None or not num_max_tokens_per_rank or not hidden:
                raise ValueError(
                    "give num_bytes, or a group, num_max_tokens_per_rank, hidden and num_topk"
                )
            num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        check_count("num_bytes", num_bytes)
        check_count("num_max_tokens_per_rank", num_max_tokens_per_rank)
        self.rank_idx, self.num_ranks = ranks.rank, ranks.size
        # Callers write 0 and 1 too.
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        params = BufferParams(
            num_bytes,
            num_cpu_timeout_secs,
            num_gpu_timeout_secs,
            count_timeout=num_cpu_timeout_secs,
            in_fabric=bool(use_fabric),
            says_fabric=bool(use_fabric),
            shares_comm_stream=True,
        )
        super().__init__(ranks, params, device)
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = None

    def _join(self, gpu: torch.device | None) -> None:
        super()._join(gpu)
        self._look_at_nodes()

    def _look_at_nodes(self) -> None:
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def _regroup(self, ranks: set[int], store: Any) -> None:
        super()._regroup(ranks, store)
        self._look_at_nodes()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Computes the size of a buffer for a dispatch and a combine, one after the other, with
        relays if the group has several nodes.

        Collective in hybrid mode, the first time for a group: see :func:`get_logical_domain_size`.

        Args:
            group: The ranks' group.
            num_max_tokens_per_rank: The most tokens of any rank.
            hidden: Values of a row.
            num_topk: The most choices of a token; 0: 32.
            use_fp8_dispatch: Whether dispatched rows are FP8 with scales; else they are bf16.
            allow_hybrid_mode: As in the buffer.
            allow_multiple_reduction: As in the buffer.

        Returns:
            Bytes, a multiple of 2 MiB.

        Raises:
            ValueError: For a negative number.
        """
        check_count("num_max_tokens_per_rank", num_max_tokens_per_rank)
        check_count("hidden", hidden)
        check_count("num_topk", num_topk)
        count, ranks = get_logical_domain_size(group, allow_hybrid_mode)
        # Nodes of one rank have nothing to relay.
        nodes = _core.EpNodes(count, ranks) if ranks > 1 else _core.EpNodes(1, group.size())
        tokens, top_k = num_max_tokens_per_rank, num_topk or MAX_TOP_K
        payload, scales = (hidden, -(-hidden // 32)) if use_fp8_dispatch else (2 * hidden, 0)
        # One more token: room for the gaps between ranks in zero-copy rows.
        dispatch = _core.ep_dispatch_len(
            payload=payload,
            scales=scales,
            top_k=top_k,
            local_experts=LOCAL_EXPERTS,
            slots=tokens + 1,
            nodes=nodes,
        )
        slots = _core.ep_row_slots(top_k, nodes) if allow_multiple_reduction else top_k
        combine = _core.ep_row_place_len(
            values=2 * hidden, weights=top_k, slots=slots, tokens=tokens
        )
        return align(max(dispatch, combine), UNIT)

    @untraced
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits for all ranks that take part, with the timeout of a call.

        Args:
            with_cpu_sync: Whether the host waits, and raises the failure of an earlier call.
                Otherwise the current stream waits on a GPU.
            use_comm_stream, sequential: Not used.

        Raises:
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises it, without
                ``with_cpu_sync``.
        """
        backend = self._there()
        backend.barrier()
        if with_cpu_sync:
            backend.synchronize()
            backend.check()

    @staticmethod
    @untraced
    def capture() -> EventHandle:
        """Makes an event behind the current stream's work up to now.

        Returns:
            The event; on the CPU one that is over.
        """
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns the number of nodes, and of ranks on each.

        It is one node unless all nodes have as many ranks, one behind the other.
        """
        nodes = self._there().native.nodes
        return nodes.count, nodes.ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns the number of nodes, and of ranks on each, as dispatch sees them.

        It is one node without ``allow_hybrid_mode``.
        """
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0.0,
        nvlink_gbs: float = 0.0,
        sm_read_gbs: float = 200.0,
        sm_write_gbs: float = 50.0,
    ) -> int:
        """Estimates the SMs of a GPU that would keep its links busy, from the bytes that each token
        reads, writes and sends.

        Args:
            num_experts: Experts of all ranks.
            num_topk: Choices of a token.
            num_scaleout_topk: Not used.
            rdma_gbs: Not used.
            nvlink_gbs: GB/s of the GPU's links; 0: an H200's.
            sm_read_gbs: GB/s that an SM reads.
            sm_write_gbs: GB/s that an SM writes.

        Returns:
            An even number of SMs: at least 64 with ``prefer_overlap_with_compute=False``, and at
            most those of the buffer's GPU.
        """
        ranks, gbs = self.num_ranks, nvlink_gbs or NVLINK_GBS
        most = sms_of(self.device)
        if ranks == 1:
            # No data crosses a link: all SMs copy.
            return most or 4
        missed = math.comb(num_experts - num_experts // ranks, num_topk) / math.comb(
            num_experts, num_topk
        )
        copies = ranks * (1 - missed)
        rate = gbs / (1 - 1 / ranks)
        sms = math.ceil(1.25 * max(rate / copies / sm_read_gbs, rate / sm_write_gbs))
        sms = align(max(4, sms), 2)
        if not self.prefer_overlap_with_compute:
            sms = max(sms, ALONE)
        return min(sms, most) if most else sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns the number of queue pairs that DeepEP would use for ``num_sms`` SMs. It has no
        effect here."""
        return min(num_sms, 9)

    def get_local_buffer_tensor(self, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Makes a view of this rank's own memory, which the next call overwrites.

        Args:
            dtype: The view's dtype.
            offset: Bytes before it.

        Returns:
            A view of one dimension, up to the end of the memory.

        Raises:
            ValueError: If ``offset`` is behind the end.
        """
        return self._pool_tensor(dtype, offset, None)

    @untraced
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        zero_copy: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to each rank that has one of its experts.

        Received rows are in order of rank and token: one for each token, or, with ``do_expand``,
        one for each token and local expert. Rows behind the received ones are not written;
        ``recv_topk_idx`` is -1 there.

        Args:
            x: ``[n, H]`` of any dtype, in rows of a multiple of 32 bytes; or this and its opaque
                scales, ``[n, S]`` of four bytes each.
            topk_idx: ``[n, K]`` i64 or i32: each token's experts; negative: none.
            topk_weights: ``[n, K]`` f32; or None.
            cumulative_local_expert_recv_stats: ``[E/R]`` i32: the tokens of each local expert are
                added; or None.
            num_experts: Experts of all ranks, E.
            num_max_tokens_per_rank: The most tokens of any rank, T; the same on all ranks. None:
                the buffer's.
            expert_alignment: Each expert's first row is a multiple of it, with ``do_expand``; it
                also rounds up counts.
            num_sms: On GPUs, the most blocks of a launch; 0: as many as the group has.
            previous_event: An event that the call waits for. An asynchronous call waits for the
                current stream's work if it is None.
            previous_event_before_epilogue: Another event that the call waits for.
            async_with_compute_stream: Whether the call is on the communication stream, and an event
                behind it is returned.
            allocate_on_comm_stream: Whether memory of an asynchronous call belongs to the
                communication stream. With ``previous_event`` it does.
            handle: The handle of an earlier dispatch: tokens go to the same places.
            do_handle_copy: Whether the handle keeps a copy of ``topk_idx``.
            do_cpu_sync: Whether the host waits for counts, so that outputs have the exact size.
                None: yes, unless there is a handle.
            do_expand: Whether a token has a row for each of its local experts.
            do_zero_padding: Whether the rows between experts become 0, with ``do_expand``.
            use_tma_aligned_col_major_sf: Whether scales of one channel are contiguous, padded to a
                multiple of four rows.
            zero_copy: Whether ``recv_x`` may be a view of the buffer, as in
                :meth:`Buffer.dispatch`. Excludes ``do_cpu_sync``, ``do_expand`` and
                ``use_tma_aligned_col_major_sf``.
            num_qps: Not used.

        Returns:
            ``recv_x`` ``[m, H]``, or this and its scales ``[m, S]``; ``recv_topk_idx`` ``[m, K]``,
            with numbers of this rank's experts, or -1 for others, and None with ``do_expand``;
            ``recv_topk_weights`` f32, ``[m, K]``, or ``[m]`` with ``do_expand``, or None; a handle;
            and an event.

        Raises:
            RuntimeError: If the handle is of another buffer, or a peer is lost or makes another
                call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        rows, scales = x if isinstance(x, tuple) else (x, None)
        backend = self._begin(rows)
        check("x", rows, (None, None), device=self.device)
        row_bytes = rows.shape[1] * rows.element_size()
        if row_bytes % 32:
            raise ValueError(f"rows of x are a multiple of 32 bytes, not {row_bytes}")
        if scales is not None and scales.dim() == 1:
            scales = scales.unsqueeze(1)
        stats = cumulative_local_expert_recv_stats
        if handle is None:
            if topk_idx is None or num_experts is None:
                raise ValueError("topk_idx and num_experts are needed, or a handle")
            choices = topk_idx
        else:
            if topk_idx is not None or stats is not None:
                raise ValueError(
                    "with a handle, topk_idx and cumulative_local_expert_recv_stats are None"
                )
            self._check_owner(handle)
            choices, num_experts, do_expand = handle.topk_idx, handle.num_experts, handle.do_expand
            expert_alignment = handle.expert_alignment
            num_max_tokens_per_rank = handle.num_max_tokens_per_rank
        if num_max_tokens_per_rank is None:
            num_max_tokens_per_rank = self.num_max_tokens_per_rank
        do_cpu_sync = handle is None if do_cpu_sync is None else bool(do_cpu_sync)
        options = elastic_options(
            num_experts,
            self.num_ranks,
            num_max_tokens_per_rank,
            choices.shape[-1],
            choices.dtype,
            expert_alignment or 1,
            num_sms,
            self.allow_hybrid_mode,
            do_cpu_sync,
            # The host counts rows anew that it has counted for the handle.
            do_cpu_sync or bool(handle and handle.num_recv_tokens_per_expert_list),
            bool(do_expand),
            bool(do_zero_padding),
            bool(use_tma_aligned_col_major_sf),
            bool(zero_copy),
        )
        of_backend = options.dispatch
        call = self._call(
            "dispatch",
            backend,
            async_with_compute_stream,
            previous_event,
            allocate_on_comm_stream,
            x,
            topk_idx,
            topk_weights,
            stats,
            event_before_epilogue=previous_event_before_epilogue,
        )
        with call:
            if handle is None:
                choices = choices.clone() if do_handle_copy else choices
                routing = backend.by_choices(choices, num_experts)
            else:
                routing = backend.by_handle(handle.state)
            received, state, counts = backend.dispatch(
                (rows, scales), topk_weights, routing, of_backend
            )
            if handle is None:
                handle = self._new_handle(options, choices, state, counts, received.choices)
                if stats is not None:
                    with call.on_stream():
                        stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        recv_x = received.returned()
        event = call.done(recv_x, received.choices, received.weights, choices)
        return recv_x, received.choices, received.weights, handle, event

    def _new_handle(
        self,
        options: ElasticOptions,
        topk_idx: torch.Tensor,
        state: NormalHandleState,
        counts: list[int],
        received: torch.Tensor | None,
    ) -> EPHandle:
        """DeepEP's handle of a dispatch. ``received`` are the received choices of rows by token."""
        alignment, scaleup_ranks = options.alignment, self.num_scaleup_ranks
        aligned = align_all(counts, alignment)
        expanded = sum(aligned) if options.do_cpu_sync else options.max_expanded_tokens
        return EPHandle(
            do_expand=options.do_expand,
            num_experts=options.num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=options.max_tokens,
            num_sms=options.num_sms,
            topk_idx=topk_idx,
            num_recv_tokens=state.num_recv_tokens,
            num_expanded_tokens=expanded,
            num_recv_tokens_per_expert_list=aligned,
            num_unaligned_recv_tokens_per_expert=state.per_expert(),
            make_rank_ends=lambda: state.rank_ends(scaleup_ranks),
            make_expert_ends=state.expert_ends
            if options.do_expand
            else lambda: aligned_sums(state.per_expert(), alignment),
            make_source_metadata=lambda: state.source_metadata(received),
            state=state,
            owner=self,
        )

    @untraced
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums the rows that ranks return for each token, without weights.

        Sums are made in f32, beginning with the biases, in order of each rank's last choice of the
        token, and rounded once. With ``allow_multiple_reduction``, expanded rows of one rank are
        summed and rounded first, and then, in hybrid mode on several nodes, the rows of each node;
        without it each row counts by itself.

        Args:
            x: ``[m, H]`` bf16: rows where the dispatch's rows were.
            handle: The dispatch's handle.
            topk_weights: ``[m, K]`` f32, or ``[m]`` for expanded rows, to be returned to the
                tokens' ranks; or None.
            bias: ``[n, H]`` bf16, or two of them; or None.
            num_sms: On GPUs, the most blocks of a launch; 0: the dispatch's.
            previous_event: An event that the call waits for. An asynchronous call waits for the
                current stream's work if it is None.
            previous_event_before_epilogue: Another event that the call waits for.
            async_with_compute_stream: Whether the call is on the communication stream, and an event
                behind it is returned.
            allocate_on_comm_stream: Whether memory of an asynchronous call belongs to the
                communication stream. With ``previous_event`` it does.
            num_qps: Not used.

        Returns:
            The sums, ``[n, H]`` bf16; the weights that the ranks of the choices return, ``[n, K]``
            f32, or None; and an event.

        Raises:
            RuntimeError: If the handle is of another buffer, or a peer is lost or makes another
                call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For tensors with wrong shapes, dtypes or devices; or for weights of expanded
                rows without ``allow_multiple_reduction``.
        """
        backend = self._there()
        self._check_owner(handle)
        sends = "row"
        if handle.do_expand:
            sends = "sum" if self.allow_multiple_reduction else "each"
        if sends == "each" and topk_weights is not None:
            raise ValueError("expanded rows have no topk_weights without allow_multiple_reduction")
        options = combine_options(
            "choice", sends, self.allow_multiple_reduction, num_sms or handle.num_sms
        )
        call = self._call(
            "combine",
            backend,
            async_with_compute_stream,
            previous_event,
            allocate_on_comm_stream,
            x,
            topk_weights,
            bias,
            event_before_epilogue=previous_event_before_epilogue,
        )
        with call:
            out, out_weights = backend.combine(x, handle.state, topk_weights, bias, options)
        return out, out_weights, call.done(out, out_weights)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("engram_", "pp_", "agrs_")) or name in EXPERIMENTAL:
            raise NotHere(f"ElasticBuffer.{name} is experimental in DeepEP, and not here")
        if name == "runtime":
            # The property has raised AttributeError, and Python tries this method next.
            return self._there().runtime
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def check_options(options: ElasticOptions) -> None:
    """Raises for options that exclude each other."""
    check_count("expert_alignment", options.alignment, 1)
    check_count("num_experts", options.num_experts)
    check_count("num_max_tokens_per_rank", options.max_tokens)
    check_count("num_sms", options.num_sms)
    if options.zero_copy and (options.do_cpu_sync or options.do_expand or options.is_col_major):
        raise ValueError(
            "zero_copy has no do_cpu_sync, do_expand and use_tma_aligned_col_major_sf: rows stay "
            "as they arrive"
        )


def aligned_sums(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Inclusive sums of the aligned counts."""
    if alignment > 1:
        counts = (counts + (alignment - 1)).div_(alignment, rounding_mode="floor").mul_(alignment)
    return counts.cumsum(0, dtype=torch.int32)


def sms_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 for the CPU."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )


#: DeepEP's experimental functions, which no framework calls.
EXPERIMENTAL = frozenset(
    {
        "get_engram_storage_size_hint",
        "get_pp_buffer_size_hint",
        "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint",
        "create_agrs_session",
        "destroy_agrs_session",
        "all_gather",
    }
)


#: Nodes of a group, and ranks of each, while the group lives: its ranks do not move, and all have
#: asked once.
KNOWN_NODES: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Finds the nodes of a group. Collective the first time, as ranks exchange their hosts.

    Args:
        group: The ranks' ``torch.distributed.ProcessGroup``. Any other group has one node.

    Returns:
        The number of nodes, and of ranks on each. It is one node unless all nodes have as many
        ranks, one behind the other.
    """
    if group.size() == 1 or not isinstance(group, torch.distributed.ProcessGroup):
        return 1, group.size()
    known = KNOWN_NODES.get(group)
    if known is None:
        nodes = Ranks(group).exchange(_core.ep_node(node_of_environment()))
        found = _core.ep_nodes([node for node in nodes if node is not None])
        known = KNOWN_NODES[group] = found.count, found.ranks
    return known


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Finds the nodes of a group, as dispatch sees them. Collective the first time, in hybrid mode.

    Args:
        group: The ranks' ``torch.distributed.ProcessGroup``.
        allow_hybrid_mode: As in the buffer.

    Returns:
        The number of nodes, and of ranks on each; one node without hybrid mode.
    """
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())
