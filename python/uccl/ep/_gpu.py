"""Low latency mode of ranks that have GPUs.

A call enqueues kernels on torch's current stream and returns. Tensors that it makes are of this stream too, so torch gives
their memory only to work behind the call's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable

import torch

from uccl import _core
from uccl.ep._arriving import Format
from uccl.ep._group import Ranks, address, check, node_of_environment, timeout_of

#: Where tensors are, for callers that cannot say ``device``: "cpu", "cuda" or "cuda:1".
DEVICE = "UCCL_EP_DEVICE"


def device_of(group: Any, device: Any) -> torch.device | None:
    """The GPU of a buffer, or None for the CPU: what the caller says, or the environment, or else, with a group of NCCL, the current one."""
    asked = device if device is not None else os.environ.get(DEVICE) or None
    if asked is None and torch.cuda.is_available() and backend_of(group) == "nccl":
        asked = "cuda"
    if asked is None:
        return None
    found = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ValueError(f"a buffer's device is a GPU of CUDA or the CPU, not {found}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"the buffer's device is {found}, and torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def backend_of(group: Any) -> str:
    """The name of the only backend that a torch group has, or an empty one."""
    if not isinstance(group, getattr(torch.distributed, "ProcessGroup", ())):
        return ""
    return str(torch.distributed.get_backend(group))


@dataclass(frozen=True)
class Rows:
    """What a dispatch returned, and a combine needs."""

    native: Any
    src_info: torch.Tensor
    origin: torch.Tensor
    layout_range: torch.Tensor
    scratch: torch.Tensor
    shape: tuple[int, int]
    """Tokens of this rank, and the choices of each."""
    stream: torch.cuda.Stream

    def table(self) -> tuple[int, int, int]:
        """Addresses of what was told of the rows."""
        return self.src_info.data_ptr(), self.origin.data_ptr(), self.layout_range.data_ptr()

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Has torch keep the tensors for work of another stream."""
        if stream != self.stream:
            for tensor in (self.src_info, self.origin, self.layout_range, self.scratch):
                tensor.record_stream(stream)


@dataclass(frozen=True)
class Begun:
    """A dispatch that was begun."""

    returned: Any
    """Rows, and their scales."""
    count: torch.Tensor
    told: tuple[torch.Tensor, torch.Tensor]
    """``src_info`` and ``layout_range``."""
    receive: Callable[[], Rows]
    """Enqueues the arrival of all of it."""


@dataclass(frozen=True)
class Returning:
    """A combine that was begun, and what its sums need."""

    native: Any
    scratch: torch.Tensor
    chosen: tuple[torch.Tensor, torch.Tensor]
    out: torch.Tensor
    waits: torch.Tensor | None

    def finish(self) -> None:
        """Enqueues the sums."""
        experts, weights = self.chosen
        self.native.finish(
            rows=address(self.out), weights=address(weights), experts=address(experts), waits=address(self.waits)
        )


class LowLatency:
    """One rank's end of a group whose ranks have GPUs."""

    def __init__(
        self, ranks: Ranks, pool: int, timeout: float | None, masks_late: bool, device: torch.device
    ) -> None:
        torch.cuda.init()
        self.device, self.ranks = device, ranks.size
        self._last: torch.cuda.Stream | None = None
        self.native = _core.EpCudaGroup(
            rank=ranks.rank,
            ranks=ranks.size,
            pool=max(pool, 1),
            timeout=timeout_of(timeout),
            masks_late=masks_late,
            device=device.index,
            blocks=blocks_of(ranks, device),
            node=node_of_environment(),
            exchange=ranks.exchange,
        )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: tuple[int, int],
        form: Format,
        added_to: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> Begun:
        """Begins to send tokens; ``sizes`` are the most tokens of a rank and the number of experts. Counts by expert, and nanoseconds that
        ranks were waited for, are added to two tensors if there are any."""
        (most, num_experts), (stats, waits) = sizes, added_to
        check("x", x, (None, None), torch.bfloat16, device=self.device)
        (tokens, hidden), local, rows = x.shape, num_experts // self.ranks, self.ranks * most
        check("topk_idx", topk_idx, (tokens, None), torch.int64, torch.int32, device=self.device)
        if stats is not None:
            check("cumulative_local_expert_recv_stats", stats, (local,), torch.int32, device=self.device)
        stream, top_k = self._stream(), topk_idx.shape[1]
        arriving = form.arriving(self, self.native, (local, rows, hidden))
        count = self.empty((local,), torch.int32)
        src_info, origin = (self.empty((local, rows), torch.int32) for _ in range(2))
        layout_range = self.empty((local, self.ranks), torch.int64)
        scratch = self.empty((_core.ep_cuda_scratch_len(tokens, top_k, num_experts, self.ranks),), torch.uint8)
        native = _core.EpCudaDispatch(
            self.native,
            rows=address(x),
            stride=2 * hidden,
            kind=form.kind,
            len=2 * hidden if form.kind == "bytes" else hidden,
            global_scale=form.global_scale_on(self.device),
            experts=address(topk_idx),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            slots=most,
            scratch=scratch.data_ptr(),
            stream=stream.cuda_stream,
        )

        def receive() -> Rows:
            handle = native.receive(
                rows=address(arriving.values),
                stride=arriving.values.stride(1) * arriving.values.element_size(),
                **arriving.scales,
                count=address(count),
                stats=address(stats),
                waits=address(waits),
                table=(address(src_info), address(origin), address(layout_range)),
            )
            return Rows(handle, src_info, origin, layout_range, scratch, (tokens, top_k), stream)

        return Begun(arriving.returned, count, (src_info, layout_range), receive)

    def combine(
        self,
        x: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        to: tuple[torch.Tensor | None, torch.Tensor | None],
        is_packed: bool,
    ) -> Returning:
        """Begins to send rows back, as LogFMT-10 if ``is_packed``; ``chosen`` are experts and weights, ``to`` are tensors for the sums
        and for waits, if the caller has any."""
        hidden, (topk_idx, topk_weights), (out, waits) = x.shape[-1], chosen, to
        check("topk_idx", topk_idx, rows.shape, torch.int64, torch.int32, device=self.device)
        check("topk_weights", topk_weights, rows.shape, torch.float32, device=self.device)
        if out is None:
            out = self.empty((rows.shape[0], hidden), torch.bfloat16)
        check("out", out, (rows.shape[0], hidden), torch.bfloat16, device=self.device)
        stream = self._stream()
        rows.used_on(stream)
        scratch = self.empty((_core.ep_cuda_combine_scratch_len(),), torch.uint8)
        native = _core.EpCudaCombine(
            self.native,
            rows.native,
            rows=address(x),
            hidden=hidden,
            table=rows.table(),
            is_packed=is_packed,
            scratch=scratch.data_ptr(),
            stream=stream.cuda_stream,
        )
        return Returning(native, scratch, chosen, out, waits)

    def mask(self, left_out: int = 0, let_in: int = 0, status: torch.Tensor | None = None) -> None:
        """Enqueues that ranks, a bit for each, are left out or take part again; ``status`` then says by rank which are left out."""
        self.native.mask(
            left_out=left_out, let_in=let_in, status=address(status), stream=self._stream().cuda_stream
        )

    def _stream(self) -> torch.cuda.Stream:
        """The current stream, behind the calls that other streams were given. Calls are numbered when a GPU comes to them, and have
        to be so in the same order on all ranks. In a graph the order is the caller's."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            return stream
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return stream

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, on this GPU."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def shared(self, native: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for rows that may go back. Any will do: they are written once, straight to the windows of those that sum them."""
        return self.empty(shape, dtype)


def blocks_of(ranks: Ranks, device: torch.device) -> int:
    """Blocks of a launch. Kernels of ranks that share a GPU wait for each other, so all have to fit on it together."""
    facts = torch.cuda.get_device_properties(device)
    sharing = ranks.exchange(str(facts.uuid).encode()).count(str(facts.uuid).encode())
    return max(1, facts.multi_processor_count // sharing)
