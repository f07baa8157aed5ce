"""The streams that calls are enqueued on: the caller's current one, and the communication stream.

A call gets its number when a GPU executes it, in an order that must be the same on all ranks. So
each call waits for the call before it, if that is on another stream.

The rules of asynchronous calls are DeepEP's: docs/ep/streams.md has them in a table.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch

from uccl.ep._events import EventHandle, EventOverlap, Events

#: The communication streams of elastic buffers, by GPU and rank: a rank's buffers share one, so
#: their calls begin in the order of the program.
SHARED: dict[tuple[int | None, int], torch.cuda.Stream] = {}


def new_comm_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the highest priority: its launches come before those of the caller's streams."""
    _, highest = torch.cuda.Stream.priority_range()
    return torch.cuda.Stream(device=device, priority=highest)


def shared_comm_stream(device: torch.device, rank: int) -> torch.cuda.Stream:
    """The communication stream of all elastic buffers of a rank."""
    key = device.index, rank
    stream = SHARED.get(key)
    if stream is None:
        stream = SHARED[key] = new_comm_stream(device)
    return stream


def number_of_stream(device: int) -> int:
    """The number of a GPU's current stream, without a new object where torch has a function for
    it."""
    number = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if number is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(number(device))


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether a graph is being captured from this stream."""
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


class Streams:
    """The order of one rank's calls on its streams."""

    def __init__(self, device: torch.device, comm_stream: torch.cuda.Stream) -> None:
        self.device, self.comm_stream = device, comm_stream
        #: The asynchronous call that is being enqueued.
        self.asynchronous: AsyncCall | None = None
        #: The stream of the last call that is in no graph.
        self._last: torch.cuda.Stream | None = None
        self._last_number = -1
        #: Whether the last call of the last graph is on the communication stream.
        self._is_captured_on_comm = False

    def stream(self) -> int:
        """The number of the stream of a launch, which waits for the calls on other streams: the
        current stream, or the communication stream in an asynchronous call. In a graph the order
        of calls on the caller's streams is the caller's."""
        if self.asynchronous is not None:
            return self.asynchronous.stream_of_launch()
        number = number_of_stream(self.device.index)
        if number != self._last_number or self._is_captured_on_comm:
            self._follow(number)
        return number

    def _follow(self, number: int) -> None:
        """Makes the current stream wait for the last call, if that is on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            # The last call may be one of an earlier graph, which this one cannot wait for.
            if self._is_captured_on_comm and is_capturing(self.comm_stream):
                stream.wait_stream(self.comm_stream)
            self._is_captured_on_comm = False
            return
        self._is_captured_on_comm = False
        if number != self._last_number:
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._last_number = stream, number

    def follow_on_comm(self, compute: torch.cuda.Stream, event: EventHandle | None) -> None:
        """Makes the communication stream wait for an event, or else for all work of the compute
        stream up to now; and for the last call, if that is on another stream."""
        comm, waits_for_compute = self.comm_stream, event is None
        if event is None:
            comm.wait_stream(compute)
        else:
            event.current_stream_wait(comm)
        if torch.cuda.is_current_stream_capturing():
            # An event may be older than the graph, and an earlier call may be on the compute
            # stream. Behind a call of this graph the communication stream is in the right place.
            is_behind = self._is_captured_on_comm and is_capturing(comm)
            if not (waits_for_compute or is_behind):
                comm.wait_stream(compute)
            self._is_captured_on_comm = True
            return
        self._is_captured_on_comm = False
        if self._last_number != comm.cuda_stream:
            is_waited_for = waits_for_compute and self._last_number == compute.cuda_stream
            if self._last is not None and not is_waited_for:
                comm.wait_stream(self._last)
            self._last, self._last_number = comm, comm.cuda_stream

    def current_stream(self) -> torch.cuda.Stream:
        """The current stream. That of the last call is at hand, which saves torch a new object."""
        if self._last is not None and number_of_stream(self.device.index) == self._last_number:
            return self._last
        return torch.cuda.current_stream(self.device)

    def keep_for(self, number: int, made_on: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """Makes torch keep tensors for the launches of a call on the stream of this number, unless
        they are of an earlier call there."""
        if number != made_on:
            stream = self.current_stream() if self.asynchronous is None else self.comm_stream
            for tensor in tensors:
                tensor.record_stream(stream)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, on this GPU."""
        # For a tuple torch first checks whether it names dimensions, which takes as long as the
        # rest.
        tensor = torch.empty(*shape, dtype=dtype, device=self.device)
        if self.asynchronous is not None:
            self.asynchronous.tensors.append(tensor)
        return tensor


class AsyncCall:
    """A call whose launches are on the communication stream; a context of the call's body."""

    def __init__(
        self,
        streams: Streams,
        name: str,
        events: Events,
        allocates_on_comm: bool,
        tensors: tuple[Any, ...],
    ) -> None:
        """``tensors`` are the caller's, which the call reads or writes."""
        self._streams, self._name = streams, name
        self._event, self._event_before_epilogue = events
        # Memory of the compute stream may still be in use by work behind the event.
        self._is_current = allocates_on_comm or self._event is not None
        self._has_followed = self._is_captured = False
        #: The tensors of the call on this GPU, and those that it has made.
        self.tensors = list(flat(tensors, streams.device))

    def __enter__(self) -> AsyncCall:
        streams = self._streams
        self._compute = torch.cuda.current_stream(streams.device)
        self._is_captured = torch.cuda.is_current_stream_capturing()
        if self._is_current:
            self._follow()
            self._context = torch.cuda.stream(streams.comm_stream)
            self._context.__enter__()
        streams.asynchronous = self
        return self

    def stream_of_launch(self) -> int:
        """The number of the communication stream, which waits for what the call has to follow."""
        if not self._is_current:
            # Only now, so that it waits for what torch has been given in this call.
            self._follow()
        return int(self._streams.comm_stream.cuda_stream)

    def _follow(self) -> None:
        streams, epilogue = self._streams, self._event_before_epilogue
        try:
            streams.follow_on_comm(self._compute, self._event)
            if epilogue is not None:
                epilogue.current_stream_wait(streams.comm_stream)
        except RuntimeError as why:
            raise RuntimeError(
                f"{self._name}: the communication stream cannot wait for the current stream, or "
                f"for previous_event: {why}"
            ) from why
        self._has_followed = True

    def on_stream(self) -> Any:
        """A context in which torch's own operations are behind the call's launches."""
        return torch.cuda.stream(self._streams.comm_stream)

    def __exit__(self, failure: Any, *_: object) -> None:
        streams = self._streams
        streams.asynchronous = None
        if self._is_current:
            self._context.__exit__(None, None, None)
        if failure is not None and self._has_followed:
            # The caller has no event, and may drop the tensors of launches that are under way.
            self._compute.wait_stream(streams.comm_stream)

    def done(self, *made: Any, keeps: bool = False) -> EventOverlap:
        """The event behind the call. torch keeps the memory of all tensors for both streams.

        In a graph, calls that ``keep`` leave this to the event, which holds the tensors as long as
        it lives: torch would not reuse recorded memory before the end of the capture.
        """
        comm, device = self._streams.comm_stream, self._streams.device
        tensors = (*self.tensors, *flat(made, device))
        keeps = keeps and self._is_captured
        if not keeps:
            # torch ignores the stream that has allocated a tensor. It may be either one, as a call
            # leaves memory to the next one on the communication stream.
            for tensor in tensors:
                tensor.record_stream(comm)
                tensor.record_stream(self._compute)
        return EventOverlap(EventHandle(comm), tensors, keeps)


def flat(tensors: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """The tensors on a device in nested tuples, without other values."""
    for one in tensors:
        if isinstance(one, torch.Tensor):
            # A global scale, for one, may be on the CPU, where torch records no stream.
            if one.device == device:
                yield one
        elif isinstance(one, tuple):
            yield from flat(one, device)
