"""The base of both buffers: one rank's end of a group, where ranks may come and go."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Iterable

import torch

from uccl.ep._backend import Backend, BufferParams
from uccl.ep._checks import CPU, check
from uccl.ep._cuda.backend import CudaBackend
from uccl.ep._device import choose_device
from uccl.ep._events import SYNCHRONOUS, AnyCall, EventHandle, EventOverlap
from uccl.ep._host.backend import HostBackend
from uccl.ep._meeting import Meeting
from uccl.ep._ranks import Ranks, timeout_of
from uccl.ep._tensors import pool_tensor


class BaseBuffer:
    """One rank's end of a group."""

    #: Whether a buffer is on the current GPU, if there is one, where no argument or setting names a
    #: device.
    prefers_gpu = False

    def __init__(self, ranks: Ranks, params: BufferParams, device: Any) -> None:
        """Joins the group. Collective."""
        self._ranks, self._params = ranks, params
        self.group = ranks.group
        choice = choose_device(ranks, device, self.prefers_gpu)
        #: Whether the first tensor decides where the buffer is.
        self._may_move = choice.may_move
        self._last_meeting: Meeting | None = None
        self._join(choice.gpu)

    def _join(self, gpu: torch.device | None) -> None:
        """Makes the backend. Collective."""
        ranks, params = self._ranks, self._params
        self._timeout = timeout_of(params.timeout if gpu is None else params.gpu_timeout)
        self.device = CPU if gpu is None else gpu
        self._backend: Backend | None
        if gpu is None:
            self._backend = HostBackend(ranks, params, self._timeout)
            if params.says_fabric and not self._may_move:
                logging.getLogger("uccl").warning("use_fabric has no effect: ranks are on the CPU")
        else:
            self._backend = CudaBackend(ranks, params, self._timeout, gpu)

    def _begin(self, tensor: torch.Tensor) -> Backend:
        """Begins a call. In the first one, if no rank has named a device and the tensor is on a
        GPU, all ranks make the buffer again on their GPUs."""
        backend = self._backend
        if backend is None:
            raise destroyed()
        if self._may_move:
            self._may_move = False
            if tensor.device.type == "cuda":
                self._join(tensor.device)
                return self._there()
        return backend

    def _there(self) -> Backend:
        """The backend. Raises if the buffer has been destroyed."""
        if self._backend is None:
            raise destroyed()
        return self._backend

    @property
    def runtime(self) -> Any:
        """The engine's end of the group. Raises on GPUs."""
        return self._there().runtime

    def check(self) -> None:
        """Raises the failure of a call on a GPU that has ended.

        It waits for no call. On the CPU calls raise their failures themselves.

        Raises:
            RuntimeError: If a call has failed: a peer is lost, or made another call.
            TimeoutError: If peers were late.
        """
        if self._backend is not None:
            self._backend.check()

    def _pool_tensor(self, dtype: torch.dtype, offset: int, count: int | None) -> torch.Tensor:
        return pool_tensor(self._there().native, dtype, offset, count, self.device)

    def destroy(self) -> None:
        """Drops the buffer's memory. Local: other ranks do not learn of it."""
        self._backend = None

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream that asynchronous calls are enqueued on; None on the CPU."""
        return None if self._backend is None else self._backend.comm_stream()

    def _call(
        self,
        name: str,
        backend: Backend,
        is_async: bool,
        event: EventHandle | EventOverlap | None,
        allocates_on_comm: bool,
        *tensors: Any,
        event_before_epilogue: EventHandle | EventOverlap | None = None,
        state: Any = None,
    ) -> AnyCall:
        """The context of a call of this name: on the communication stream if it is asynchronous,
        else on the current one. It waits for the events. ``tensors`` are the caller's, which it
        reads or writes, and ``state`` is the backend's handle of an earlier dispatch."""
        if not is_async and event is None and event_before_epilogue is None:
            return SYNCHRONOUS
        events = handle_of(name, event), handle_of(name, event_before_epilogue)
        if is_async:
            return backend.asynchronous(name, events, bool(allocates_on_comm), tensors, state)
        for given in events:
            if given is not None:
                given.current_stream_wait(backend.current_stream())
        return SYNCHRONOUS

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far. A handle of an earlier generation is
        refused."""
        return self._there().generation

    def connect_ranks(self, ranks: Iterable[int], activate: bool = True, store: Any = None) -> None:
        """Lets ranks take part that are new, or have come back.

        Every rank that takes part calls this with the ranks that it does not know yet; new ones
        name all others. They meet by ``store``, or the store of the buffer; without any, all ranks
        of the group meet by the group. On GPUs it waits for the calls on the current stream and on
        the communication stream; none may be on other streams.

        Args:
            ranks: The ranks that this one does not know yet.
            activate: Whether they take part at once. Otherwise they are masked until
                :meth:`update_mask_buffer` readmits them; until then all ranks have to make as many
                calls.
            store: A ``torch.distributed.Store``.

        Raises:
            TimeoutError: If a rank does not come to the meeting in time.
            ValueError: For a rank that the buffer has no room for, or without a store if some ranks
                of the group are missing.
        """
        new = self._checked(ranks)
        self._regroup(self._active() | new, store)
        if not activate:
            for rank in new - {self._ranks.rank}:
                self._there().set_mask(rank, True)

    def disconnect_ranks(self, ranks: Iterable[int], store: Any = None) -> None:
        """Drops ranks, and the mapped memory of theirs.

        Every rank that stays calls this, as :meth:`connect_ranks`; those that leave destroy their
        buffers, or have ended.

        Args:
            ranks: The ranks that leave.
            store: A ``torch.distributed.Store``; None: the store of the buffer.

        Raises:
            TimeoutError: If a rank does not come to the meeting in time.
            ValueError: If this rank is among them; it leaves by :meth:`destroy`.
        """
        gone = self._checked(ranks)
        if self._ranks.rank in gone:
            raise ValueError(f"rank {self._ranks.rank} is this one; it leaves by destroy()")
        self._regroup(self._active() - gone, store)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of later calls, or readmits it. Tells no other rank.

        Args:
            rank_to_mask: The rank.
            mask: Whether it is left out.

        Raises:
            ValueError: For a rank that the buffer has no room for.
        """
        backend = self._there()
        self._checked([rank_to_mask])
        backend.set_mask(rank_to_mask, mask)

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Reads the masks.

        Args:
            mask_status: ``[R]`` i32: it gets a 1 for each rank that is masked or gone, else 0.

        Raises:
            ValueError: For a tensor with a wrong shape, dtype or device.
        """
        backend, shape = self._there(), (self._ranks.size,)
        check("mask_status", mask_status, shape, torch.int32, device=self.device)
        backend.read_masks(mask_status)

    def clean_mask_buffer(self) -> None:
        """Readmits all ranks that are there."""
        self._there().clear_masks()

    def _active(self) -> set[int]:
        return {rank for rank, is_masked in enumerate(self._there().masks()) if not is_masked} | {
            self._ranks.rank
        }

    def _checked(self, ranks: Iterable[int]) -> set[int]:
        given, size = set(ranks), self._ranks.size
        strangers = sorted(rank for rank in given if not 0 <= rank < size)
        if strangers:
            raise ValueError(f"no rank {strangers[0]}: the buffer was made for {size} ranks")
        return given

    def _regroup(self, ranks: set[int], store: Any) -> None:
        self._meet(ranks, store, self._there().regroup)
        self._may_move = False

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


def destroyed() -> RuntimeError:
    """The error of calls on a destroyed buffer."""
    return RuntimeError("the buffer has been destroyed")


def handle_of(name: str, event: Any) -> EventHandle | None:
    """The event of any of the kinds that callers pass to the call of this name."""
    if isinstance(event, EventOverlap):
        event = event.event
    if event is not None and not isinstance(event, EventHandle):
        raise TypeError(
            f"{name}: previous_event is an EventOverlap or an EventHandle, not a "
            f"{type(event).__name__}"
        )
    return event
