"""The base of both buffers: one rank's end of a group, where ranks may come and go."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch

from uccl.ep._cuda.group import GpuGroup
from uccl.ep._cuda.low_latency import LowLatency
from uccl.ep._cuda.normal import NormalMode
from uccl.ep._device import Place
from uccl.ep._events import EventHandle, EventOverlap
from uccl.ep._formats import GROUP, Format
from uccl.ep._group import CPU, NotHere, Ranks, check, pool_tensor, timeout_of
from uccl.ep._host.memory import Memory
from uccl.ep._meeting import Meeting

MAX_TOP_K = 32
#: Experts of a rank that size hints have room for.
LOCAL_EXPERTS = 256


@dataclass(frozen=True)
class Made:
    """A buffer's parameters, for the CPU and for GPUs."""

    pool: int
    """Bytes."""
    timeout: float | None
    """Seconds that a call waits for its peers."""
    gpu_timeout: float | None
    """Seconds that a call on a GPU waits for its peers."""
    masks_late: bool = False
    count_timeout: float | None = None
    """With GPUs, seconds that the host waits for counts. None: twice the timeout, because earlier
    work on the stream may wait for its peers too."""
    by_host: bool = False
    """Whether ranks do not reach each other's GPU memory, and use host memory."""


class Joined:
    """One rank's end of a group, and the memory of the tensors that its calls return."""

    #: Whether a buffer is on the current GPU, if there is one, where no argument or setting names a
    #: device.
    prefers_gpu = False

    def __init__(self, ranks: Ranks, made: Made, place: Place) -> None:
        self._ranks, self._made = ranks, made
        self.group = ranks.group
        self._memory = Memory()
        #: Whether the first tensor decides where the buffer is.
        self._may_move = place.may_move
        self._last_meeting: Meeting | None = None
        self._join(place.gpu)

    def _join(self, gpu: torch.device | None) -> None:
        """Joins the group. Collective."""
        made = self._made
        timeout = made.timeout if gpu is None else made.gpu_timeout
        self._timeout = timeout_of(timeout)
        self.device = CPU if gpu is None else gpu
        self._gpu: GpuGroup | None = None
        self._low_latency: LowLatency | None = None
        self._normal: NormalMode | None = None
        if gpu is None:
            self._native = self._ranks.join(made.pool, timeout, made.masks_late)
        else:
            self._gpu = GpuGroup(
                self._ranks, made.pool, timeout, made.masks_late, gpu, made.by_host
            )
            self._native = self._gpu.native
            self._low_latency = LowLatency(self._gpu)
            self._normal = NormalMode(self._gpu, made.count_timeout or 2 * self._timeout)

    def _begin(self, tensor: torch.Tensor) -> None:
        """Begins a call. In the first one, if no rank has named a device and the tensor is on a
        GPU, all ranks make the buffer again on their GPUs."""
        self._check_is_there()
        if self._may_move:
            self._may_move = False
            if tensor.device.type == "cuda":
                self._join(tensor.device)

    @property
    def runtime(self) -> Any:
        """The engine's end of the group."""
        self._check_is_there()
        if self._gpu is not None:
            raise self._not_on_gpus()
        return self._native

    def _not_on_gpus(self) -> NotHere:
        return NotHere(
            f"the buffer is on {self.device}, and this is there for buffers on the CPU only so far"
        )

    def check(self) -> None:
        """Raises the failure of a call on a GPU that has ended. It waits for no call. On the CPU
        calls raise it themselves."""
        if self._gpu is not None:
            self._gpu.native.check()

    def _pool_tensor(self, dtype: torch.dtype, offset: int, count: int | None) -> torch.Tensor:
        self._check_is_there()
        return pool_tensor(self._native, dtype, offset, count, self.device)

    def _check_is_there(self) -> None:
        if self._native is None:
            raise RuntimeError("the buffer has been destroyed")

    def destroy(self) -> None:
        """Drops the buffer's memory. Local: other ranks are not told."""
        self._native = self._gpu = self._low_latency = self._normal = None

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that calls are enqueued on: the current one, or None on the CPU."""
        return None if self._gpu is None else self._gpu.current_stream()

    def _wait_for(self, event: EventHandle | EventOverlap | None) -> None:
        """Makes the stream of the next call wait for an event of any of the kinds that callers
        pass."""
        if isinstance(event, EventOverlap):
            event = event.event
        if event is not None:
            event.current_stream_wait(self.get_comm_stream())

    def _done(self, is_async: bool, *tensors: Any) -> EventOverlap:
        """The event that a call returns: of its stream if the call is asynchronous, or else empty."""
        return (
            EventOverlap(EventHandle(self.get_comm_stream()), tensors)
            if is_async
            else EventOverlap()
        )

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far. A handle of an earlier generation is refused."""
        return self.runtime.generation

    def connect_ranks(self, ranks: Iterable[int], activate: bool = True, store: Any = None) -> None:
        """Lets ranks take part that are new, or have come back.

        Every rank that takes part calls this with the ranks that it does not know yet; new ones
        name all others. They meet by ``store``, or the store of the buffer; without any, all ranks
        of the group meet by the group.

        Args:
            ranks: The ranks that this one does not know yet.
            activate: Whether they take part at once. Otherwise they are masked until
                :meth:`update_mask_buffer` readmits them; until then all ranks have to make as many
                calls.
            store: A ``torch.distributed.Store``.

        Raises:
            NotImplementedError: If the buffer is on GPUs.
            TimeoutError: If a rank does not come to the meeting in time.
            ValueError: For a rank that the buffer has no room for, or without a store if some ranks
                of the group are missing.
        """
        new = self._checked(ranks)
        self._regroup(self._active() | new, store)
        if not activate:
            for rank in new - {self._ranks.rank}:
                self.runtime.mask(rank, True)

    def disconnect_ranks(self, ranks: Iterable[int], store: Any = None) -> None:
        """Drops ranks, and the mapped memory of theirs.

        Every rank that stays calls this, as :meth:`connect_ranks`; those that leave destroy their
        buffers, or have ended.

        Args:
            ranks: The ranks that leave.
            store: A ``torch.distributed.Store``; None: the store of the buffer.

        Raises:
            NotImplementedError: If the buffer is on GPUs.
            TimeoutError: If a rank does not come to the meeting in time.
            ValueError: If this rank is among them; it leaves by :meth:`destroy`.
        """
        gone = self._checked(ranks)
        if self._ranks.rank in gone:
            raise ValueError(f"rank {self._ranks.rank} is this one; it leaves by destroy()")
        self._regroup(self._active() - gone, store)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of later calls, or readmits it.

        Args:
            rank_to_mask: The rank.
            mask: Whether it is left out.
        """
        if self._gpu is None:
            self.runtime.mask(rank_to_mask, mask)
            return
        self._checked([rank_to_mask])
        if mask:
            self._gpu.mask(left_out=1 << rank_to_mask)
        else:
            self._gpu.mask(let_in=1 << rank_to_mask)

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes to ``mask_status``, ``[R]`` i32, a 1 for each rank that is masked or gone, else 0."""
        check("mask_status", mask_status, (self._ranks.size,), torch.int32, device=self.device)
        if self._gpu is not None:
            self._gpu.mask(status=mask_status)
            return
        mask_status.copy_(torch.tensor(self.runtime.masks(), dtype=torch.int32))

    def clean_mask_buffer(self) -> None:
        """Readmits all ranks that are there."""
        if self._gpu is not None:
            self._gpu.mask(let_in=(1 << self._ranks.size) - 1)
            return
        for rank, is_there in enumerate(self.runtime.there()):
            if is_there:
                self.runtime.mask(rank, False)

    def _active(self) -> set[int]:
        return {rank for rank, is_masked in enumerate(self.runtime.masks()) if not is_masked} | {
            self._ranks.rank
        }

    def _checked(self, ranks: Iterable[int]) -> set[int]:
        given, size = set(ranks), self._ranks.size
        strangers = sorted(rank for rank in given if not 0 <= rank < size)
        if strangers:
            raise ValueError(f"no rank {strangers[0]}: the buffer was made for {size} ranks")
        return given

    def _regroup(self, ranks: set[int], store: Any) -> None:
        self._native = self._meet(ranks, store, self.runtime.regroup)
        self._may_move = False
        # Tensors that callers hold keep the memory that was shared with the ranks before.
        self._memory = Memory()

    def _barrier(self) -> None:
        """Waits for all ranks that take part, like any call, with the buffer's timeout and masks.
        On a GPU the stream waits."""
        self._check_is_there()
        if self._low_latency is None:
            self._native.barrier()
            return
        # A dispatch without tokens, which waits for the headers of all ranks.
        size = self._ranks.size
        x = torch.empty((0, GROUP), dtype=torch.bfloat16, device=self.device)
        chosen = torch.empty((0, 1), dtype=torch.int64, device=self.device)
        form = Format.of(False, False, False, False, None)
        self._low_latency.dispatch(x, chosen, (1, size), form, (None, None)).receive()

    def _meet(self, ranks: set[int], store: Any, meet: Callable[[Any], Any]) -> Any:
        """Returns the result of ``meet``, which gets a function by which these ranks exchange
        bytes."""
        all_of_them, store = sorted(ranks), store or self._ranks.store
        if store is None:
            if not self._ranks.is_whole(all_of_them):
                raise ValueError(
                    f"ranks {all_of_them} of {self._ranks.size} need a store to meet by"
                )
            return meet(self._ranks.exchange)
        meeting = Meeting(store, self._ranks.rank, all_of_them, self._ranks.size, self._timeout)
        met = meet(meeting.exchange)
        before, self._last_meeting = self._last_meeting, meeting
        if before is not None:
            # All ranks have met. A store that is gone by now has nothing left to remove.
            with contextlib.suppress(RuntimeError):
                before.clear()
        return met

    def _check_owner(self, handle: Any) -> None:
        if handle.owner is not self:
            raise RuntimeError("the handle is of another buffer")
