"""DeepEP's first interface: low latency and normal mode on one buffer."""

from __future__ import annotations

import os
from typing import Any

import torch

from uccl import _core
from uccl.ep._base import LOCAL_EXPERTS, MAX_TOP_K, Joined, Made
from uccl.ep._cuda.normal import NormalMode
from uccl.ep._cuda.normal_dispatch import Wanted
from uccl.ep._cuda.routing import Rows
from uccl.ep._cuda.workspace import Placed
from uccl.ep._device import place_of
from uccl.ep._events import EventHandle, EventOverlap
from uccl.ep._formats import GROUP, Format
from uccl.ep._group import (
    CPU,
    TOKENS,
    Hook,
    Ranks,
    address,
    align,
    align_all,
    biases,
    check,
    refuse_unknown,
    routing_of,
    scales_in,
    weights_address,
)
from uccl.ep._host.memory import Memory

#: Tokens of each rank in a typical call of training, or of serving in one piece. On GPUs twice as
#: many go at once.
DEFAULT_TOKENS = 2048
#: Ranks of a node in DeepEP's first interface.
RANKS_OF_NODE = 8


class Config:
    """Tuning of normal mode in DeepEP. Here only its size hints have a meaning, and ``num_sms`` on
    GPUs."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        if num_max_nvl_chunked_send_tokens >= num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens ({num_max_nvl_chunked_send_tokens}) is less than "
                f"num_max_nvl_chunked_recv_tokens ({num_max_nvl_chunked_recv_tokens})"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of a buffer for rows of ``hidden_bytes`` bytes.

        It holds two calls, each with ``UCCL_EP_TOKENS_AT_ONCE`` tokens of each rank, or 2048. On
        GPUs one call may use all of it: then each rank may have twice as many tokens, but no more.
        """
        return self._two_calls(hidden_bytes, (1, num_ranks))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes that relays need in addition, where ranks are on several nodes of
        eight, as DeepEP counts them; else 0."""
        nodes, rest = divmod(num_ranks, RANKS_OF_NODE)
        if rest or nodes < 2:
            return 0
        relayed = self._two_calls(hidden_bytes, (nodes, RANKS_OF_NODE))
        return relayed - self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)

    @staticmethod
    def _two_calls(hidden_bytes: int, spread: tuple[int, int]) -> int:
        length = _core.ep_dispatch_len(
            hidden_bytes, GROUP, MAX_TOP_K, LOCAL_EXPERTS, tokens_at_once(), spread
        )
        return 2 * align(length, 128)


def tokens_at_once() -> int:
    """Tokens of each rank that size hints have room for: the environment's number, or 2048."""
    text = os.environ.get(TOKENS, str(DEFAULT_TOKENS))
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{TOKENS} is a number of tokens, more than 0, not {text!r}")
    return int(text)


class NormalHandle(tuple):
    """A dispatch's handle for :meth:`Buffer.combine`: DeepEP's tuple, and the engine's handle."""

    native: Any
    num_tokens: int


class LowLatencyHandle(tuple):
    """``(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)``, and the
    engine's handle."""

    native: Any
    owner: Any
    to_combine: torch.Tensor | None
    """Memory that the caller got for its rows: a combine with ``zero_copy`` sends it."""


class Buffer(Joined):
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
        num_qps_per_rank, allow_mnnvl, is_intranode: Not used.

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
        is_intranode: bool | None = None,
        timeout: float | None = None,
        store: Any = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        device: torch.device | str | int | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Buffer", unknown)
        ranks = Ranks(group, comm, store, rank, num_ranks)
        # Both modes share one group, and so the path between its ranks.
        by_host = not allow_nvlink_for_low_latency_mode
        made = Made(
            num_nvl_bytes + num_rdma_bytes, timeout, timeout, bool(enable_shrink), by_host=by_host
        )
        super().__init__(ranks, made, place_of(ranks, device, self.prefers_gpu))
        self.rank, self.group_size = ranks.rank, ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the most SMs of a call in normal mode without a ``config``: an even number above 0.
        The CPU has none."""
        if new_num_sms <= 0 or new_num_sms % 2:
            raise ValueError(f"num_sms is even and more than 0, not {new_num_sms}")
        cls.num_sms = new_num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns whether FP8 is there; it always is."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event behind the current stream's work up to now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of low latency mode: two dispatches and two combines at a time, of any
        top-k.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens of any rank.
            hidden: Values of a row.
            num_ranks: Ranks of the group.
            num_experts: Experts of all ranks.
        """
        tokens, local = num_max_dispatch_tokens_per_rank, num_experts // num_ranks
        top_k = min(MAX_TOP_K, num_experts)
        dispatch = _core.ep_dispatch_len(2 * hidden, 0, top_k, local, tokens, (1, num_ranks))
        packed = hidden // GROUP * (2 * GROUP + 4)
        combine = _core.ep_row_place_len(packed, 0, top_k, tokens)
        return align(2 * (dispatch + combine), 128)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for dispatch; all are the same here."""
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for combine; all are the same here."""
        return Config(cls.num_sms)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Returns a view of this rank's own memory, which the next call overwrites.

        Args:
            dtype: The view's dtype.
            size: Its shape; one dimension, up to the end, if it is None.
            offset: Bytes before it.
            use_rdma_buffer: Whether ``offset`` counts from the end of ``num_nvl_bytes``.

        Raises:
            ValueError: If the memory ends before the view does.
        """
        start = offset + (self.num_nvl_bytes if use_rdma_buffer else 0)
        count = None if size is None else size.numel()
        flat = self._pool_tensor(dtype, start, count)
        return flat if size is None else flat.view(size)

    # Normal mode.

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
            previous_event: An event that the current stream waits for before the call.
            async_finish: Whether an event behind the call is returned.
            allocate_on_comm_stream: Not used.

        Returns:
            Tokens by rank, ``[R]`` i32; None, for tokens by node; tokens by expert, ``[E]`` i32;
            whether each token goes to each rank, ``[n, R]`` bool; and an event, empty without
            ``async_finish``.
        """
        self._begin(topk_idx)
        self._wait_for(previous_event)
        if self._normal is not None:
            counted = self._normal.layout(topk_idx, num_experts)
            event = self._done(async_finish, topk_idx)
            return counted[0], None, counted[1], counted[2], event
        routing = routing_of(topk_idx, num_experts, self.group_size)
        goes = where_to(routing, self.group_size)
        per_rank = torch.tensor(routing.per_rank(), dtype=torch.int32)
        per_expert = torch.tensor(routing.per_expert(), dtype=torch.int32)
        return per_rank, None, per_expert, goes, self._done(async_finish, topk_idx)

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
                counts is then empty. 0: as many as arrive.
            config: On GPUs, its ``num_sms`` is the most blocks of a launch.
            previous_event: An event that the current stream waits for before the call.
            async_finish: Whether an event behind the call is returned.
            allocate_on_comm_stream: Not used.
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
        self._begin(rows)
        self._wait_for(previous_event)
        if handle is not None and (topk_idx is not None or topk_weights is not None):
            raise ValueError("with a handle, topk_idx and topk_weights are None")
        if handle is None and topk_idx is not None and num_tokens_per_expert is None:
            raise ValueError("num_tokens_per_expert is missing; get_dispatch_layout has it")
        if (
            handle is None
            and topk_idx is None
            and (is_token_in_rank is None or num_tokens_per_expert is None)
        ):
            raise ValueError(
                "without topk_idx, is_token_in_rank and num_tokens_per_expert are needed"
            )
        if zero_copy and handle is None and not num_worst_tokens:
            raise ValueError(
                "zero_copy needs num_worst_tokens: rows that stay in the buffer are not counted on the host"
            )
        if self._normal is not None:
            routed = (handle, topk_idx, is_token_in_rank, num_tokens_per_expert)
            sizes = (expert_alignment, num_worst_tokens, self._blocks(config))
            returned = self._dispatch_on_gpu(
                self._normal, (rows, scales), topk_weights, routed, sizes, zero_copy
            )
            return *returned, self._done(async_finish, rows, returned[0])
        check("x", rows, (None, None))
        if handle is not None:
            handle.native.check_is_last()
            routing = handle.native.routing
        elif topk_idx is not None:
            routing = routing_of(topk_idx, num_tokens_per_expert.numel(), self.group_size)
        else:
            routing = self._routing_by_rank(rows.shape[0], is_token_in_rank, num_tokens_per_expert)
        if routing.tokens != rows.shape[0]:
            raise ValueError(f"x has {rows.shape[0]} tokens, and {routing.tokens} are routed")
        if topk_weights is not None:
            check("topk_weights", topk_weights, (routing.tokens, routing.top_k), torch.float32)
        native = _core.EpDispatch(
            self.runtime,
            routing,
            rows=address(rows),
            stride=rows.shape[1] * rows.element_size(),
            kind="bytes",
            len=rows.shape[1] * rows.element_size(),
            scales=scales_in(scales, rows.shape[0]),
            weights=address(topk_weights),
            room=self._room(),
            relays=True,
        )
        with native:
            counts, per_expert = native.counts()
            arrived, top_k = sum(counts), routing.top_k
            have = num_worst_tokens or arrived
            recv = self._memory.empty((have, rows.shape[1]), rows.dtype)
            recv_scales = (
                None
                if scales is None
                else torch.empty((have, *scales.shape[1:]), dtype=scales.dtype)
            )
            idx = weights = None
            if handle is None and topk_idx is not None:
                idx = torch.empty((have, top_k), dtype=topk_idx.dtype)
                idx[arrived:] = -1
            if handle is None and topk_weights is not None:
                weights = torch.empty((have, top_k), dtype=torch.float32)
            words = 0 if recv_scales is None else recv_scales[0:1].numel()
            got = native.receive(
                len=have,
                rows=address(recv),
                stride=recv.shape[1] * recv.element_size(),
                scales=None if recv_scales is None else (address(recv_scales), words, 0, 1),
                choices=address(idx),
                is_64=idx is not None and idx.dtype == torch.int64,
                weights=address(weights),
                zeroes_foreign=True,
            )
        recv_x = recv if recv_scales is None else (recv, recv_scales)
        event = self._done(async_finish, rows, recv)
        if handle is not None:
            return recv_x, None, None, None, None, event
        per_expert = [] if num_worst_tokens else align_all(per_expert, expert_alignment)
        return recv_x, idx, weights, per_expert, self._normal_handle(got, is_token_in_rank), event

    def _blocks(self, config: Config | None) -> int:
        """The most blocks of a launch on a GPU."""
        return self.num_sms if config is None else config.num_sms

    def _room(self) -> int:
        """Bytes of a call in normal mode: two are in flight at a time."""
        return self.runtime.pool_len // 2 // 64 * 64

    def _dispatch_on_gpu(
        self,
        mode: NormalMode,
        x: tuple[torch.Tensor, torch.Tensor | None],
        weights: torch.Tensor | None,
        by: tuple[
            NormalHandle | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
        ],
        sizes: tuple[int, int, int],
        zero_copy: bool,
    ) -> tuple[
        Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None
    ]:
        """Dispatches on a GPU.

        ``by`` are a handle, choices, the ranks of tokens, and counts by expert; ``sizes`` are the
        alignment of counts, the rows if the host counts nothing, and the most blocks of a launch.
        """
        (handle, idx, goes, per_expert), (alignment, worst, blocks) = by, sizes
        if handle is not None:
            routed = mode.again(rows_of(handle))
        elif idx is not None:
            routed = mode.by_choices(idx, per_expert.numel(), goes)
        else:
            routed = mode.by_ranks(goes, per_expert)
        placed = None
        if routed.again is not None:
            placed = Placed(routed.again.layout.tokens)
        elif worst:
            placed = Placed(worst)
        wanted = Wanted(
            placed,
            choices=None if idx is None else idx.dtype,
            zeroes_foreign=True,
            # Without choices, nothing marks the rows that have no token.
            may_stay=bool(zero_copy) and routed.top_k > 0,
            blocks=blocks,
        )
        got, native, counts = mode.dispatch(x, weights, routed, wanted)
        recv_x = got.rows if got.scales is None else (got.rows, got.scales)
        if handle is not None:
            return recv_x, None, None, None, None
        channels = mode.channels
        told = native.prefixes(), channels, channels, native.source_tokens()
        made = NormalHandle((*told, channels if goes is None else goes, channels))
        made.native, made.num_tokens = native, routed.tokens
        return recv_x, got.choices, got.weights, align_all(counts, alignment), made

    def _routing_by_rank(self, tokens: int, goes: torch.Tensor, per_expert: torch.Tensor) -> Any:
        check("is_token_in_rank", goes, (tokens, self.group_size), torch.bool)
        return _core.EpRouting.by_rank(
            goes=address(goes), tokens=tokens, per_expert=per_expert.tolist(), ranks=self.group_size
        )

    def _normal_handle(self, native: Any, goes: torch.Tensor | None) -> NormalHandle:
        routing, ranks, counts = native.routing, self.group_size, native.counts()
        prefix = torch.zeros((ranks, ranks), dtype=torch.int32)
        prefix[:, self.rank] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
        tokens = source_metadata(native, sum(counts), 0, routing.top_k)[:, 0].contiguous()
        goes = where_to(routing, ranks) if goes is None else goes
        channels = prefix.new_empty((ranks, 0))
        handle = NormalHandle((prefix, channels, channels, tokens, goes, goes.int() - 1))
        handle.native, handle.num_tokens = native, routing.tokens
        return handle

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
            previous_event: An event that the current stream waits for before the call.
            async_finish: Whether an event behind the call is returned.
            allocate_on_comm_stream: Not used.

        Returns:
            The sums, ``[n, H]`` bf16; the sums of weights, ``[n, K]`` f32, or None; and an event.

        Raises:
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For tensors with wrong shapes, dtypes or devices.
        """
        self._wait_for(previous_event)
        if isinstance(handle.native, Rows):
            self._check_is_there()
            if self._normal is None:
                raise RuntimeError("the handle is of a buffer on a GPU, and this one is on the CPU")
            out, out_weights = self._normal.combine(
                x, handle.native, topk_weights, bias, "rank", blocks=self._blocks(config)
            )
            return out, out_weights, self._done(async_finish, x, out)
        routing = handle.native.routing
        arrived = sum(handle.native.counts())
        check("x", x, (None, None), torch.bfloat16)
        if x.shape[0] < arrived:
            raise ValueError(f"x has {x.shape[0]} rows, and {arrived} tokens arrived")
        out, out_weights = combined_tensors(self._memory, routing, x.shape[1], topk_weights)
        if topk_weights is not None:
            check("topk_weights", topk_weights, (x.shape[0], routing.top_k), torch.float32)
        combine = _core.EpCombine(
            handle.native,
            rows=address(x),
            len=x.shape[0],
            stride=2 * x.shape[1],
            hidden=x.shape[1],
            sends="row",
            weights=weights_address(topk_weights),
            stays=True,
            relays="rank",
        )
        combine.finish(
            rows=address(out),
            sums="rank",
            bias=biases(bias, out),
            weights=address(out_weights),
        )
        return out, out_weights, self._done(async_finish, x, out)

    def internode_dispatch(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`dispatch`."""
        return self.dispatch(*args, **keywords)

    def internode_combine(self, *args: Any, **keywords: Any) -> Any:
        """As :meth:`combine`."""
        return self.combine(*args, **keywords)

    # Low latency mode.

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
            async_finish: Whether an event behind the call is returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the tensors.
            use_nvfp4: Whether rows are E2M1, with an E4M3 scale for 16 values, ``amax / 6 *
                x_global_scale``. ``use_fp8`` is then not read.
            x_global_scale: NVFP4's global scale: a number, or a tensor of one f32; 1 if it is None.

        Returns:
            The rows, or a pair of rows and scales; ``count`` ``[E/R]`` i32; a handle; an event; and
            the hook, or None. Rows are ``[E/R, R*T, H]`` bf16 or E4M3. FP8's scales are ``[E/R,
            R*T, H/128]`` f32, or ``[E/R, R*T, H/512]`` i32 with ``use_ue8m0``; those of one group
            of channels are contiguous. NVFP4's rows are ``[R*T, H/2, E/R]`` u8, the first of two values in the
            lower half of a byte. Its scales are in tiles of 128 rows by 4 scales: scale ``s`` of
            row ``r`` of expert ``e`` is ``[r % 32, r % 128 // 32, r // 128, s % 4, s // 4, e]``.

        Raises:
            NotImplementedError: For an unknown keyword that is neither None nor False.
            RuntimeError: If a peer is lost, or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        refuse_unknown("low_latency_dispatch", unknown)
        self._begin(x)
        self._check_stats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        form = Format.of(use_fp8, round_scale, use_ue8m0, use_nvfp4, x_global_scale)
        check("x", x, (None, None), torch.bfloat16, device=self.device)
        (tokens, hidden), most = x.shape, num_max_dispatch_tokens_per_rank
        if hidden % GROUP:
            raise ValueError(f"hidden is a multiple of {GROUP}, not {hidden}")
        if self._low_latency is not None:
            stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            call = self._low_latency.dispatch(x, topk_idx, (most, num_experts), form, stats)
            handle = self._low_latency_handle((*call.told, most, hidden, num_experts))

            def arrive() -> None:
                handle.native = call.receive()

            if return_recv_hook:
                call.begin()
            else:
                arrive()
            event = self._done(async_finish, x, call.returned)
            return call.returned, call.count, handle, event, arrive if return_recv_hook else None
        routing = routing_of(topk_idx, num_experts, self.group_size)
        if routing.tokens != tokens:
            raise ValueError(f"x has {tokens} tokens, and topk_idx {routing.tokens}")
        local, rows = num_experts // self.group_size, self.group_size * most
        arriving = form.arriving(self._memory, self.runtime, (local, rows, hidden))
        count = torch.empty(local, dtype=torch.int32)
        src_info = torch.empty((local, rows), dtype=torch.int32)
        layout_range = torch.empty((local, self.group_size), dtype=torch.int64)
        handle = self._low_latency_handle((src_info, layout_range, most, hidden, num_experts))
        native = _core.EpDispatch(
            self.runtime,
            routing,
            rows=address(x),
            stride=2 * hidden,
            kind=form.kind,
            len=2 * hidden if form.kind == "bytes" else hidden,
            global_scale=form.global_scale_on(CPU)[0],
            slots=most,
            stays=not return_recv_hook,
        )

        def receive() -> None:
            with native:
                _, per_expert = native.counts()
                if dispatch_wait_recv_cost_stats is not None:
                    dispatch_wait_recv_cost_stats.add_(torch.tensor(native.waited()))
                handle.native = native.receive(
                    len=local * rows,
                    rows=address(arriving.values),
                    stride=arriving.values.stride(1) * arriving.values.element_size(),
                    **arriving.scales,
                    starts=[expert * rows for expert in range(local)],
                )
            count.copy_(torch.tensor(per_expert, dtype=torch.int32))
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(count)
            handle.native.fill_low_latency(src_info.data_ptr(), layout_range.data_ptr(), rows)

        if not return_recv_hook:
            receive()
        event = self._done(async_finish, x, arriving.values)
        return arriving.returned, count, handle, event, receive if return_recv_hook else None

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
            async_finish: Whether an event behind the call is returned.
            return_recv_hook: Whether the call only sends. The hook receives, and fills the sums.
            out: ``[n, H]`` bf16 for the sums; or None.
            combine_wait_recv_cost_stats: ``[R]`` i64: for each rank, the nanoseconds that the
                receive waited for its rows are added; or None. On GPUs that reach each other, with
                few tokens, it is the wait until the rank began to send.
            overlap: Sending rows as their experts finish; it is refused.
            packed_recv_count, comp_signal, block_m, threshold, num_sms, src_signals,
                src_signal_expect_value: Only for ``overlap``.

        Returns:
            The sums, ``[n, H]`` bf16; an event; and the hook, or None.

        Raises:
            NotImplementedError: For ``overlap``, or an unknown keyword that is neither None nor
                False.
            RuntimeError: If the dispatch's hook has not been called, the handle is of another
                buffer, or a peer is lost or makes another call.
            TimeoutError: If peers are late. On GPUs the next call raises failures of peers, unless
                the host waits for counts.
            ValueError: For arguments that exclude each other, or have wrong shapes, dtypes or
                devices.
        """
        if overlap:
            unknown["overlap"] = overlap
        refuse_unknown("low_latency_combine", unknown)
        self._check_stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        if zero_copy and use_logfmt:
            raise ValueError("zero_copy and use_logfmt exclude each other")
        self._check_is_there()
        if handle.native is None:
            raise RuntimeError("the dispatch's hook has not been called")
        self._check_owner(handle)
        _, _, most, hidden, num_experts = handle
        local, rows = num_experts // self.group_size, self.group_size * most
        check("x", x, (local, rows, hidden), torch.bfloat16, device=self.device)
        if zero_copy and handle.to_combine is not None:
            # As in DeepEP, the memory that the caller got is sent, even if `x` is another tensor.
            x, handle.to_combine = handle.to_combine, None
        if self._low_latency is not None:
            to = out, combine_wait_recv_cost_stats
            back = self._low_latency.combine(
                x, (topk_idx, topk_weights), handle.native, to, bool(use_logfmt)
            )
            if return_recv_hook:
                back.begin()
            else:
                back.finish()
            event = self._done(async_finish, x, back.out)

            def end(x: torch.Tensor = x) -> None:
                back.finish()

            return back.out, event, end if return_recv_hook else None
        if zero_copy and not self.runtime.has_block(address(x), x.numel() * x.element_size()):
            raise ValueError(
                "with zero_copy, x is what get_next_low_latency_combine_buffer returned"
            )
        routing = handle.native.routing
        shape = (routing.tokens, routing.top_k)
        check("topk_idx", topk_idx, shape, torch.int64, torch.int32)
        check("topk_weights", topk_weights, shape, torch.float32)
        if out is None:
            out = self._memory.empty((routing.tokens, hidden), torch.bfloat16)
        check("out", out, (routing.tokens, hidden), torch.bfloat16)
        combine = _core.EpCombine(
            handle.native,
            rows=address(x),
            len=local * rows,
            stride=2 * hidden,
            hidden=hidden,
            sends="each",
            is_packed=bool(use_logfmt),
            stays=bool(zero_copy) or not return_recv_hook,
            leaves=bool(return_recv_hook),
        )

        def receive(x: torch.Tensor = x) -> None:
            waited = combine.finish(
                rows=address(out),
                sums="weighted",
                choice_weights=address(topk_weights),
                experts=address(topk_idx),
                is_64=topk_idx.dtype == torch.int64,
            )
            if combine_wait_recv_cost_stats is not None:
                combine_wait_recv_cost_stats.add_(torch.tensor(waited))

        if not return_recv_hook:
            receive()
        return out, self._done(async_finish, x, out), receive if return_recv_hook else None

    def _low_latency_handle(
        self, told: tuple[torch.Tensor, torch.Tensor, int, int, int]
    ) -> LowLatencyHandle:
        handle = LowLatencyHandle(told)
        handle.native, handle.owner, handle.to_combine = None, self, None
        return handle

    def _check_stats(self, name: str, stats: torch.Tensor | None) -> None:
        if stats is not None:
            check(name, stats, (self.group_size,), torch.int64, device=self.device)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Returns new memory for the experts' rows, which a combine with ``zero_copy`` does not
        copy.

        The handle's next combine with ``zero_copy`` sends this memory, even if its ``x`` is another
        tensor. Each call needs a new one.

        Args:
            handle: The dispatch's handle.

        Returns:
            ``[E/R, R*T, H]`` bf16.
        """
        _, _, most, hidden, num_experts = handle
        shape = (num_experts // self.group_size, self.group_size * most, hidden)
        if self._gpu is not None:
            made = self._gpu.empty(shape, torch.bfloat16)
        else:
            made = self._memory.shared(self.runtime, shape, torch.bfloat16)
        handle.to_combine = made
        return made

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Waits for all ranks that take part, with the timeout of a call.

        There is nothing to clean: data of earlier calls is recognised by its call number. The
        arguments are not used.
        """
        self._barrier()

    #: DeepEP's names for these methods.
    low_latency_update_mask_buffer = Joined.update_mask_buffer
    low_latency_query_mask_buffer = Joined.query_mask_buffer
    low_latency_clean_mask_buffer = Joined.clean_mask_buffer


def rows_of(handle: NormalHandle) -> Rows:
    """The rows of a dispatch on a GPU."""
    if not isinstance(handle.native, Rows):
        raise RuntimeError("the handle is of a buffer on the CPU")
    return handle.native


def where_to(routing: Any, ranks: int) -> torch.Tensor:
    """``[n, R]`` bool: whether each token goes to each rank."""
    goes = torch.empty((routing.tokens, ranks), dtype=torch.bool)
    routing.fill_goes(address(goes))
    return goes


def source_metadata(native: Any, arrived: int, most: int, top_k: int) -> torch.Tensor:
    """``[m, K + 2]`` i32 for the received tokens: ``rank * most + token``, ``rank * K + last
    choice`` of this rank's experts, and for each choice its row where rows are by expert, or -1."""
    table = torch.empty((arrived, 2 + top_k), dtype=torch.int32)
    if arrived:
        native.fill_source_metadata(table.data_ptr(), most)
    return table


def combined_tensors(
    memory: Memory, routing: Any, hidden: int, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tensors for the sums of a rank's tokens, and of their weights if there are any."""
    out = memory.empty((routing.tokens, hidden), torch.bfloat16)
    if weights is None:
        return out, None
    return out, torch.empty((routing.tokens, routing.top_k), dtype=torch.float32)


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
    help."""
    refuse_unknown("initialize_uccl", unknown)
    return [], None


def destroy_uccl(proxies: Any, workers: Any) -> None:
    """Does nothing: UCCL's programs call it at their end."""
