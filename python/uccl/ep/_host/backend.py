"""The backend of ranks with tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from uccl import _core
from uccl.ep._backend import BufferParams, Exchange
from uccl.ep._checks import CPU
from uccl.ep._events import EndedCall, Events
from uccl.ep._host.low_latency import LowLatencyMode
from uccl.ep._host.memory import Memory
from uccl.ep._host.normal import NormalMode
from uccl.ep._ranks import Ranks, node_of_environment


class HostBackend(NormalMode, LowLatencyMode):
    """One rank's end of a group, and the memory of the tensors that its calls return."""

    device = CPU

    def __init__(self, ranks: Ranks, params: BufferParams, timeout: float) -> None:
        self.native = _core.EpGroup(
            rank=ranks.rank,
            ranks=ranks.size,
            pool=max(params.pool_bytes, 1),
            timeout=timeout,
            masks_late=params.masks_late,
            node=node_of_environment(),
            exchange=ranks.exchange,
        )
        self.memory = Memory(self.native)

    @property
    def runtime(self) -> _core.EpGroup:
        """The engine's end of the group."""
        return self.native

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far."""
        return self.native.generation

    def check(self) -> None:
        """Does nothing: calls raise their failures themselves."""

    def current_stream(self) -> None:
        """None: a call's work is done when it returns, or when its hook does."""

    def comm_stream(self) -> None:
        """None, as there is no stream."""

    def asynchronous(
        self,
        name: str,
        events: Events,
        allocates_on_comm: bool,
        tensors: tuple[Any, ...],
        state: Any = None,
    ) -> EndedCall:
        """A call that has ended when it returns."""
        for event in events:
            if event is not None:
                event.current_stream_wait()
        return EndedCall(tensors)

    def synchronize(self) -> None:
        """Does nothing: no call is under way."""

    def barrier(self) -> None:
        """Waits for all ranks that take part, as a call does."""
        self.native.barrier()

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Leaves a rank out of later calls, or readmits it."""
        self.native.mask(rank, is_masked)

    def read_masks(self, status: torch.Tensor) -> None:
        """Writes 1 to ``status``, ``[R]`` i32, for each rank that is masked or gone, else 0."""
        status.copy_(torch.tensor(self.native.masks(), dtype=torch.int32))

    def masks(self) -> list[bool]:
        """By rank, whether it is masked or gone."""
        return self.native.masks()

    def clear_masks(self) -> None:
        """Readmits all ranks that are there."""
        for rank, is_there in enumerate(self.native.present()):
            if is_there:
                self.native.mask(rank, False)

    def regroup(self, exchange: Exchange) -> None:
        """Joins the group anew, with the ranks that exchange bytes now."""
        self.native = self.native.regroup(exchange)
        # Tensors that callers hold keep the memory that was shared with the ranks before.
        self.memory = Memory(self.native)

    def combine_input(self, shape: tuple[int, ...]) -> torch.Tensor:
        """New memory for rows of bf16, which peers read in place."""
        return self.memory.shared(shape, torch.bfloat16)
