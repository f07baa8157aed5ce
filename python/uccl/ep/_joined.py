"""What both buffers are: one rank's end of a group."""

from __future__ import annotations

from typing import Any

import torch

from uccl.ep._gpu import LowLatency
from uccl.ep._group import CPU, Ranks
from uccl.ep._memory import Memory

MAX_TOP_K = 32
#: The experts of a rank that size hints have room for.
LOCAL_EXPERTS = 256


class Joined:
    """One rank's end of a group, and the memory that its calls return tensors in."""

    def __init__(
        self,
        ranks: Ranks,
        pool: int,
        timeout: float | None,
        masks_late: bool,
        device: torch.device | None = None,
    ) -> None:
        self._ranks = ranks
        self.group = ranks.group
        self._memory = Memory()
        self.device = CPU if device is None else device
        self._gpu = None if device is None else LowLatency(ranks, pool, timeout, masks_late, device)
        self._native = ranks.join(pool, timeout, masks_late) if self._gpu is None else self._gpu.native

    @property
    def runtime(self) -> Any:
        """The engine's end of the group."""
        if self._native is None:
            raise RuntimeError("the buffer has been destroyed")
        if self._gpu is not None:
            raise NotImplementedError(f"the buffer is on {self.device}, where only low latency mode is there so far")
        return self._native

    def destroy(self) -> None:
        """Lets go of the buffer's memory. Local: it says nothing to other ranks."""
        self._native = self._gpu = None

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that calls are enqueued on: the current one, or None on the CPU."""
        return None if self._gpu is None else torch.cuda.current_stream(self.device)
