"""UCCL-EP 0.1.1's normal mode within a host. Its wheel has the binding alone, which takes
addresses; this module makes the tensors, as the Python code in its repository does.

The wheel has a CUDA runtime of its own: its current device must be set too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Callable

import torch
import uccl.ep

from bench.ep.engine import Engine, Layout, Received, Tokens
from bench.ep.inputs import GROUP, Routing, Shape
from bench.ep.meeting import Meeting
from bench.ep.timing import times

#: The binding of that wheel, which has another interface than this repository's.
ep: Any = uccl.ep
#: Rows of a channel's queue, as in UCCL-EP's own tests.
QUEUE = 256
#: UCCL-EP's default chunks in rows, by ranks: of a dispatch and of a combine.
CHUNKS = {2: (24, 10), 4: (6, 9), 8: (6, 4)}
#: Chunks in rows that UCCL-EP's own tests try, of a dispatch and of a combine.
DISPATCH_CHUNKS, COMBINE_CHUNKS = range(4, 33, 2), range(1, 17)
#: UCCL-EP's code for bf16.
BF16 = 6
#: Sizes are multiples of this number of bytes.
ALIGNMENT = 128


@dataclass
class Handle:
    """State of a dispatch that a combine, or another dispatch to the same places, needs."""

    ranks: torch.Tensor
    channels: torch.Tensor
    recv_channels: torch.Tensor
    arrived: int
    sources: torch.Tensor
    token_in_rank: torch.Tensor
    heads: torch.Tensor


class Upstream(Engine):
    """``uccl.ep.Buffer`` of the wheel called uccl."""

    def __init__(self, most: Shape, sms: int, meeting: Meeting) -> None:
        """Makes a buffer for at most ``sms`` SMs."""
        self.sms, self._ranks = sms, most.ranks
        dispatch, combine = CHUNKS.get(most.ranks, (6, 6))
        self._chunks = {"fp8": dispatch, "bf16": dispatch, "combine": combine}
        device, rank = torch.cuda.current_device(), meeting.Get_rank()
        ep.set_device(device)
        # Nothing is written there, but the proxies need an address.
        self._nothing = torch.zeros(ALIGNMENT, dtype=torch.uint8, device="cuda")
        # On one host proxies carry nothing and are never started, but the buffer needs them.
        self._proxies = [
            ep.Proxy(
                thread_idx=thread,
                gpu_buffer_addr=self._nothing.data_ptr(),
                total_size=0,
                rank=rank,
                node_idx=0,
                local_rank=device,
                num_experts=most.experts,
                num_ranks=most.ranks,
                num_nodes=1,
                use_normal_mode=True,
                is_intranode=True,
            )
            for thread in range(ep.get_num_proxy_threads())
        ]
        ep.register_proxies(device, self._proxies)
        hint = ep.Config(sms, 6, QUEUE, 6, 128).get_nvl_buffer_size_hint(
            2 * most.hidden, most.ranks
        )
        size = -(-hint // ALIGNMENT) * ALIGNMENT
        self._buffer = ep.Buffer(rank, most.ranks, size, 0, False, True, most.ranks)
        card = json.dumps(
            [self._buffer.get_local_device_id(), self._buffer.get_local_ipc_handle().hex()]
        )
        devices, handles = zip(*map(json.loads, meeting.allgather(card.encode())))
        self._buffer.sync(
            list(devices), [bytes.fromhex(handle) for handle in handles], None, [None] * most.ranks
        )

    def layout(self, routing: Routing) -> Layout:
        tokens, top_k = routing.ids.shape
        per_rank, per_expert = _i32(self._ranks), _i32(routing.shape.experts)
        token_in_rank = torch.empty((tokens, self._ranks), dtype=torch.bool, device="cuda")
        self._buffer.get_dispatch_layout(
            topk_idx_ptr=routing.ids.data_ptr(),
            num_tokens=tokens,
            num_topk=top_k,
            num_experts=routing.shape.experts,
            num_tokens_per_rank_ptr=per_rank.data_ptr(),
            num_tokens_per_rdma_rank_ptr=0,
            num_tokens_per_expert_ptr=per_expert.data_ptr(),
            is_token_in_rank_ptr=token_in_rank.data_ptr(),
            compute_stream_ptr=_stream(),
        )
        return per_rank, token_in_rank, per_expert

    def dispatch(self, x: Tokens, routing: Routing, layout: Layout) -> Received:
        per_rank, token_in_rank, per_expert = layout
        (tokens, top_k), channels = routing.ids.shape, self.sms // 2
        ranks, sent = _i32(self._ranks, self._ranks), _i32(self._ranks, channels)
        config = self._config(_form(x))
        arrived, counted, _ = self._buffer.intranode_prepare(
            num_tokens_per_rank_ptr=per_rank.data_ptr(),
            is_token_in_rank_ptr=token_in_rank.data_ptr(),
            num_tokens_per_expert_ptr=per_expert.data_ptr(),
            num_tokens=tokens,
            num_experts=routing.shape.experts,
            rank_prefix_matrix_ptr=ranks.data_ptr(),
            channel_prefix_matrix_ptr=sent.data_ptr(),
            expert_alignment=1,
            num_worst_tokens=0,
            config=config,
            compute_stream_ptr=_stream(),
        )
        # An empty tensor has no address.
        room = max(arrived, 1)
        handle = Handle(
            ranks,
            sent,
            _i32(self._ranks, channels),
            arrived,
            _i32(room),
            token_in_rank,
            _i32(tokens, self._ranks),
        )
        ids = torch.empty((room, top_k), dtype=torch.int64, device="cuda")
        weights = torch.empty((room, top_k), dtype=torch.float32, device="cuda")
        received = self._send(
            x,
            handle,
            config,
            topk_idx_ptr=routing.ids.data_ptr(),
            num_topk=top_k,
            topk_weights_ptr=routing.weights.data_ptr(),
            num_experts=routing.shape.experts,
            cached_mode=False,
            recv_topk_idx_ptr=ids.data_ptr(),
            recv_topk_weights_ptr=weights.data_ptr(),
        )
        return Received(received, ids[:arrived], weights[:arrived], counted, handle)

    def dispatch_reusing(self, x: Tokens, handle: Handle) -> Tokens:
        return self._send(
            x,
            handle,
            self._config(_form(x)),
            topk_idx_ptr=0,
            num_topk=0,
            topk_weights_ptr=0,
            num_experts=0,
            cached_mode=True,
            recv_topk_idx_ptr=0,
            recv_topk_weights_ptr=0,
        )

    def combine(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        tokens, hidden = handle.heads.shape[0], rows.shape[1]
        sums = torch.empty((tokens, hidden), dtype=rows.dtype, device="cuda")
        self._buffer.intranode_combine(
            x_ptr=rows.data_ptr(),
            num_tokens=rows.shape[0],
            hidden=hidden,
            x_dtype_code=BF16,
            x_element_size=rows.element_size(),
            topk_weights_ptr=0,
            num_topk=0,
            bias_0_ptr=0,
            bias_1_ptr=0,
            src_idx_ptr=handle.sources.data_ptr(),
            num_recv_tokens=tokens,
            rank_prefix_matrix_ptr=handle.ranks.data_ptr(),
            channel_prefix_matrix_ptr=handle.recv_channels.data_ptr(),
            send_head_ptr=handle.heads.data_ptr(),
            config=self._config("combine"),
            recv_x_ptr=sums.data_ptr(),
            recv_topk_weights_ptr=0,
            compute_stream_ptr=_stream(),
        )
        return sums

    def tune(
        self, routing: Routing, meet: Callable[[], Any], agree: Callable[[float], float]
    ) -> str:
        """Chooses chunks as UCCL-EP's own tests do: by dispatches with a handle, and by
        combines."""
        first = self.dispatch(routing.x, routing, self.layout(routing))
        tried: dict[str, tuple[range, Callable[[], Any]]] = {
            "fp8": (
                DISPATCH_CHUNKS,
                lambda: self.dispatch_reusing(routing.quantised, first.handle),
            ),
            "bf16": (DISPATCH_CHUNKS, lambda: self.dispatch_reusing(routing.x, first.handle)),
            "combine": (COMBINE_CHUNKS, lambda: self.combine(first.tokens, first.handle)),
        }
        for what, (chunks, call) in tried.items():
            taken = {}
            for chunk in chunks:
                self._chunks[what] = chunk
                taken[chunk] = agree(min(times("queued", 2, call, meet)))
            self._chunks[what] = min(taken, key=lambda chunk: taken[chunk])
        return "rows at once: " + ", ".join(
            f"{what} {chunk}" for what, chunk in self._chunks.items()
        )

    def _config(self, what: str) -> Any:
        return ep.Config(self.sms, self._chunks[what], QUEUE, 6, 128)

    def _send(self, x: Tokens, handle: Handle, config: Any, **addresses: int) -> Tokens:
        """Enqueues a dispatch, and returns the received rows."""
        rows, scales = x if isinstance(x, tuple) else (x, None)
        (tokens, hidden), room = rows.shape, max(handle.arrived, 1)
        received = torch.empty((room, hidden), dtype=rows.dtype, device="cuda")
        of_scales = None
        if scales is not None:
            of_scales = torch.empty((room, hidden // GROUP), dtype=scales.dtype, device="cuda")
        self._buffer.intranode_dispatch(
            x_ptr=rows.data_ptr(),
            num_tokens=tokens,
            hidden=hidden,
            x_element_size=rows.element_size(),
            x_scales_ptr=0 if scales is None else scales.data_ptr(),
            num_scales=0 if scales is None else scales.shape[1],
            scale_token_stride=0 if scales is None else scales.stride(0),
            scale_hidden_stride=0 if scales is None else scales.stride(1),
            is_token_in_rank_ptr=handle.token_in_rank.data_ptr(),
            rank_prefix_matrix_ptr=handle.ranks.data_ptr(),
            channel_prefix_matrix_ptr=handle.channels.data_ptr(),
            num_worst_tokens=0,
            config=config,
            num_recv_tokens=handle.arrived,
            recv_x_ptr=received.data_ptr(),
            recv_x_scales_ptr=0 if of_scales is None else of_scales.data_ptr(),
            recv_channel_prefix_matrix_ptr=handle.recv_channels.data_ptr(),
            recv_src_idx_ptr=handle.sources.data_ptr(),
            send_head_ptr=handle.heads.data_ptr(),
            compute_stream_ptr=_stream(),
            **addresses,
        )
        received = received[: handle.arrived]
        return received if of_scales is None else (received, of_scales[: handle.arrived])


def _form(x: Tokens) -> str:
    return "fp8" if isinstance(x, tuple) else "bf16"


def _i32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
