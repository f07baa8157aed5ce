"""The backend of ranks with tensors on GPUs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from uccl.ep._backend import BufferParams, Exchange, LowLatencyDispatchOptions
from uccl.ep._checks import NotHere
from uccl.ep._cuda.group import CudaGroup
from uccl.ep._cuda.low_latency import LowLatencyMode
from uccl.ep._cuda.normal import NormalMode
from uccl.ep._cuda.routing import CudaHandle
from uccl.ep._cuda.streams import AsyncCall
from uccl.ep._events import Events
from uccl.ep._formats import GROUP, UNSCALED
from uccl.ep._ranks import Ranks


class CudaBackend(NormalMode, LowLatencyMode):
    """One rank's end of a group of GPUs."""

    def __init__(
        self, ranks: Ranks, params: BufferParams, timeout: float, device: torch.device
    ) -> None:
        group = CudaGroup(ranks, params, timeout, device)
        # Earlier work on the stream may wait for its peers too.
        super().__init__(group, params.count_timeout or 2 * timeout)
        self.device, self.native = device, group.native

    @property
    def runtime(self) -> NoReturn:
        """Raises: DeepEP's runtime is not here."""
        raise NotHere(f"the buffer is on {self.device}, and has no runtime of DeepEP's")

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far."""
        return self.native.generation

    def check(self) -> None:
        """Raises the failure of a call that has ended. It waits for no call."""
        self.native.check()

    def current_stream(self) -> torch.cuda.Stream:
        """The stream that synchronous calls are enqueued on: the current one."""
        return self.group.current_stream()

    def comm_stream(self) -> torch.cuda.Stream:
        """The stream that asynchronous calls are enqueued on."""
        return self.group.comm_stream

    def asynchronous(
        self,
        name: str,
        events: Events,
        allocates_on_comm: bool,
        tensors: tuple[Any, ...],
        state: Any = None,
    ) -> AsyncCall:
        """A call on the communication stream: that of the handle's buffer, if there is a handle."""
        group = state.group if isinstance(state, CudaHandle) else self.group
        return AsyncCall(group, name, events, allocates_on_comm, tensors)

    def synchronize(self) -> None:
        """Makes the host wait for the calls on the current stream."""
        self.current_stream().synchronize()

    def barrier(self) -> None:
        """Makes the current stream wait for all ranks that take part."""
        # A dispatch without tokens, which waits for the headers of all ranks.
        x = torch.empty((0, GROUP), dtype=torch.bfloat16, device=self.device)
        choices = torch.empty((0, 1), dtype=torch.int64, device=self.device)
        ranks, row_format = self.group.ranks, UNSCALED["bytes"]
        options = LowLatencyDispatchOptions(1, ranks, row_format, None, None, False, ranks)
        self.low_latency_dispatch(x, choices, options).receive()

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Leaves a rank out of later calls of the stream, or readmits it."""
        if is_masked:
            self.group.mask(left_out=[rank])
        else:
            self.group.mask(let_in=[rank])

    def read_masks(self, status: torch.Tensor) -> None:
        """Writes 1 to ``status``, ``[R]`` i32, for each rank that is masked or gone, else 0."""
        self.group.mask(status=status)

    def masks(self) -> list[bool]:
        """By rank, whether it is masked or gone, behind the work on the current stream."""
        return self.native.masks(stream=self.group.stream())

    def clear_masks(self) -> None:
        """Readmits all ranks that are there."""
        present = enumerate(self.native.present())
        self.group.mask(let_in=[rank for rank, is_there in present if is_there])

    def regroup(self, exchange: Exchange) -> None:
        """Joins the group anew, with the ranks that exchange bytes now."""
        self.group.regroup(exchange)

    def combine_input(self, shape: tuple[int, ...]) -> torch.Tensor:
        """New memory for rows of bf16. Any memory will do: rows are written once, straight to the
        windows of the ranks that sum them."""
        return self.group.empty(shape, torch.bfloat16)
