"""The order of calls on streams, and the streams for which torch keeps memory.

A stand-in for CUDA's streams knows of each piece of work which other work precedes it. The rules
are DeepEP's (dd758ca); each test names their place there.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Iterator, cast
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from uccl.ep import Buffer, _base
from uccl.ep._cuda import streams
from uccl.ep._cuda.backend import CudaBackend
from uccl.ep._events import EventHandle, EventOverlap


class Stream:
    """A stream: the work that precedes its next work, and the graph that captures it."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream, self.priority = next(NUMBERS), priority
        self.done: set[str] = set()
        self.graph: Any = None
        STREAMS.append(self)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)

    def __enter__(self) -> Stream:
        CURRENT.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert CURRENT.pop() is self


class Event:
    """An event behind a stream's work."""

    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()
        self.graph: Any = None

    def record(self, stream: Stream) -> None:
        EVENTS.append(self)
        self.done, self.graph = frozenset(stream.done), stream.graph

    def wait(self, stream: Stream) -> None:
        if self.graph is None and stream.graph is not None:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        assert self.graph in (None, GRAPH[0]), "the event's graph has been captured"
        stream.graph = self.graph or stream.graph
        stream.done |= self.done


NUMBERS = itertools.count(1)
CURRENT: list[Stream] = []
STREAMS: list[Stream] = []
EVENTS: list[Event] = []
#: The graph that is being captured, and the work of graphs, which is not done yet.
GRAPH: list[Any] = [None]
CAPTURED: set[str] = set()


class Rank:
    """A rank's calls on its streams."""

    def __init__(self) -> None:
        self.compute, self.names = Stream(), itertools.count()
        self.before: dict[str, set[str]] = {}
        self.recorded: dict[int, list[Stream]] = {}
        CURRENT[:] = [self.compute]
        self.buffer = _base.BaseBuffer.__new__(_base.BaseBuffer)
        self.backend = CudaBackend.__new__(CudaBackend)
        cpu = torch.device("cpu")
        self.group = streams.Streams(cpu, streams.new_comm_stream(cpu))
        self.backend.group = cast(Any, self.group)
        self.comm = self.group.comm_stream

    def work(self, name: str, stream: Stream | None = None) -> str:
        """Enqueues work, on the current stream unless another one is given."""
        stream = stream or CURRENT[-1]
        self.before[name] = set(stream.done)
        if stream.graph is not None:
            CAPTURED.add(name)
        stream.done.add(name)
        return name

    def call(
        self,
        name: str,
        is_async: bool = True,
        event: Any = None,
        allocates: bool = False,
        epilogue: Any = None,
        tensors: tuple[Any, ...] = (),
    ) -> tuple[EventOverlap, Any]:
        """A call with a launch, and its result."""
        call = self.buffer._call(
            name,
            self.backend,
            is_async,
            event,
            allocates,
            *tensors,
            event_before_epilogue=epilogue,
        )
        with call:
            made = self.group.empty((1,), torch.int32)
            self.launch(name)
        return call.done(), made

    def launch(self, name: str) -> None:
        number = self.group.stream()
        self.work(name, next(one for one in STREAMS if one.cuda_stream == number))

    def is_on(self, name: str, stream: Stream) -> bool:
        return name in stream.done

    def streams_of(self, tensor: Any) -> list[Stream]:
        """The streams for which torch keeps a tensor's memory."""
        return self.recorded.get(tensor.data_ptr(), [])


@pytest.fixture
def rank() -> Iterator[Rank]:
    def record_stream(tensor: Any, stream: Stream) -> None:
        one.recorded.setdefault(tensor.data_ptr(), []).append(stream)

    fakes: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: CURRENT[-1],
        "is_current_stream_capturing": lambda: CURRENT[-1].graph is not None,
        "is_initialized": lambda: True,
    }
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(streams, "number_of_stream", lambda device: CURRENT[-1].cuda_stream),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
    ):
        one = Rank()
        yield one
    for shared in (CURRENT, STREAMS, EVENTS, CAPTURED):
        shared.clear()
    GRAPH[0] = None


class Capture:
    """Captures a graph from a rank's compute stream."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __enter__(self) -> None:
        GRAPH[0] = self.rank.compute.graph = object()

    def __exit__(self, failure: Any, *_: object) -> None:
        if failure is None:
            joined = self.rank.compute.done
            for stream in STREAMS:
                assert stream.graph is None or stream.done <= joined, "a branch is not joined"
        for stream in STREAMS:
            stream.graph = None
            stream.done -= CAPTURED
        GRAPH[0] = None


def test_an_asynchronous_call_is_on_the_communication_stream_behind_the_current_one(rank) -> None:
    """csrc/legacy/buffer.hpp:359, csrc/elastic/buffer.hpp:546: without an event, the communication
    stream waits for the compute stream; :384, :563: and with async it records the event."""
    rank.work("experts")
    event, _ = rank.call("dispatch")
    rank.work("shared experts")
    assert rank.is_on("dispatch", rank.comm) and "experts" in rank.before["dispatch"]
    assert "dispatch" not in rank.before["shared experts"], "the current stream goes on"
    event.current_stream_wait()
    rank.work("next")
    assert {"dispatch", "shared experts"} <= rank.before["next"]


def test_with_an_event_a_call_waits_for_that_alone(rank) -> None:
    """csrc/legacy/buffer.hpp:357, csrc/elastic/buffer.hpp:544."""
    rank.work("router")
    event = EventOverlap(EventHandle())
    rank.work("experts of the other batch")
    rank.call("dispatch", event=event)
    assert rank.before["dispatch"] == {"router"}


def test_an_empty_event_is_none(rank) -> None:
    """deep_ep/buffers/legacy.py:392: the event of a synchronous call holds None."""
    rank.work("router")
    event, _ = rank.call("layout", is_async=False)
    assert event.event is None
    rank.call("dispatch", event=event)
    assert {"router", "layout"} <= rank.before["dispatch"]


def test_the_epilogues_event_is_waited_for_besides_the_current_stream(rank) -> None:
    """csrc/elastic/buffer.hpp:552; here the whole call waits, whose one launch has no epilogue."""
    other = Stream()
    with other:
        rank.work("bias")
        event = EventHandle()
    rank.work("experts")
    rank.call("combine", epilogue=event)
    assert rank.before["combine"] == {"experts", "bias"}
    rank.call("synchronous", is_async=False, epilogue=event)
    assert "bias" in rank.before["synchronous"]


def test_synchronous_calls_stay_on_the_current_stream_and_record_no_event(rank) -> None:
    """DeepEP makes them on its communication stream, with an event before and one behind
    (csrc/legacy/buffer.hpp:359, :396). On the current stream the order is the same."""
    for name in "abc":
        rank.call(name, is_async=False)
    assert rank.is_on("c", rank.compute) and not EVENTS


def test_calls_follow_each_other_on_all_streams(rank) -> None:
    """DeepEP's calls are all on one stream; here calls on several streams keep their order."""
    early = EventHandle()
    rank.call("a", is_async=False)
    rank.call("b", event=early)
    assert "a" in rank.before["b"], "also if the event is older"
    rank.work("experts")
    rank.call("c", event=early)
    assert rank.before["c"] == {"a", "b"}, "and asynchronous ones wait for nothing else"
    rank.call("d", is_async=False)
    assert "c" in rank.before["d"]
    before = len(EVENTS)
    rank.call("e", is_async=False)
    assert len(EVENTS) == before
    with Stream():
        rank.call("f")
    assert "e" in rank.before["f"]


def test_torch_keeps_memory_for_the_streams_that_use_it(rank) -> None:
    """csrc/legacy/buffer.hpp:385-388, :671-695, csrc/elastic/buffer.hpp:570: all tensors for the
    communication stream, and for the compute stream too. torch ignores the one that has allocated
    a tensor."""
    for way in ({}, {"allocates": True}):
        x, scales, elsewhere = torch.ones(1), torch.ones(1), torch.ones(1, device="meta")
        tensors = ((x, scales), None, elsewhere, 1.5)
        event, made = rank.call("dispatch", tensors=tensors, **way)
        for tensor in (x, scales, made):
            assert rank.streams_of(tensor) == [rank.comm, rank.compute]
        assert set(map(id, event.extra_tensors)) == {id(x), id(scales), id(made)}


@pytest.mark.parametrize("way", [{"allocates": True}, {"event": True}])
def test_memory_is_the_communication_streams_where_the_compute_stream_may_use_it(rank, way) -> None:
    """csrc/legacy/buffer.hpp:350-353; csrc/elastic/buffer.hpp:535-540: with an event, memory that
    the compute stream has freed may still be in use there, so V2 asks for both together."""
    for kind, stream in ((way, rank.comm), ({}, rank.compute)):
        event = EventHandle() if "event" in kind else None
        call = rank.buffer._call("dispatch", rank.backend, True, event, "allocates" in kind)
        with call:
            assert CURRENT[-1] is stream
            # torch's own work before a launch, as the copy of the choices.
            rank.work(f"copy {len(kind)}")
            rank.launch(f"launch {len(kind)}")
            with call.on_stream():
                rank.work(f"statistics {len(kind)}")
        call.done()
        assert CURRENT == [rank.compute]
        assert f"copy {len(kind)}" in rank.before[f"launch {len(kind)}"]
        assert f"launch {len(kind)}" in rank.before[f"statistics {len(kind)}"]


def test_memory_of_an_earlier_call_is_kept_for_the_stream_of_the_next(rank) -> None:
    handle = torch.ones(1)
    rank.group.keep_for(rank.compute.cuda_stream, rank.compute.cuda_stream, (handle,))
    assert rank.streams_of(handle) == []
    with rank.buffer._call("combine", rank.backend, True, None, False):
        number = rank.group.stream()
        rank.group.keep_for(number, rank.compute.cuda_stream, (handle,))
    assert rank.streams_of(handle) == [rank.comm]


def test_after_a_failure_the_current_stream_waits(rank) -> None:
    """The caller has no event, and drops the tensors of what was launched."""
    with pytest.raises(ValueError), rank.buffer._call("dispatch", rank.backend, True, None, True):
        rank.launch("dispatch")
        raise ValueError
    assert CURRENT == [rank.compute] and rank.group.asynchronous is None
    rank.work("next")
    assert "dispatch" in rank.before["next"]


def test_a_graph_has_parallel_branches(rank) -> None:
    """A wait for an event of the captured stream takes the communication stream into the graph;
    the wait for the call's event joins it."""
    rank.call("eager", is_async=False)
    for number in range(2):
        with Capture(rank):
            rank.work(f"router {number}")
            event, _ = rank.call(f"dispatch {number}")
            rank.work(f"shared {number}")
            event.current_stream_wait()
            rank.work(f"experts {number}")
            event, _ = rank.call(f"combine {number}", event=EventHandle())
            rank.work(f"more {number}")
            event.current_stream_wait()
            rank.call(f"last {number}", is_async=False)
        assert f"dispatch {number}" not in rank.before[f"shared {number}"]
        assert f"router {number}" in rank.before[f"dispatch {number}"]
        assert f"combine {number}" not in rank.before[f"more {number}"]
        assert f"more {number}" not in rank.before[f"combine {number}"]
        assert {f"dispatch {number}", f"combine {number}"} <= rank.before[f"last {number}"]
    # Calls in no graph wait for calls in no graph.
    with Stream():
        rank.call("later", is_async=False)
    assert rank.before["later"] == {"eager"}


def test_calls_of_a_graph_keep_their_order_without_the_callers_waits(rank) -> None:
    early = EventHandle()
    # The second graph begins where the first one's last call is on the communication stream.
    for names in ("abcdef", "ghijkl"):
        with Capture(rank):
            for name, event in zip(names, (None, early, None, EventHandle(), None)):
                rank.call(name, is_async=event is not None, event=event)
            event, _ = rank.call(names[-1])
            event.current_stream_wait()
        for one, next_one in zip(names, names[1:]):
            assert one in rank.before[next_one]
    with Capture(rank):
        event, _ = rank.call("first", event=early)
        assert rank.comm.graph is GRAPH[0], "also with an event that is older than the graph"
        event.current_stream_wait()


def test_a_graphs_event_keeps_the_tensors_of_low_latency_calls(rank) -> None:
    """deep_ep/buffers/legacy.py:617-621, :669-670: the event holds them, as a graph does not reuse
    memory that is recorded for a stream."""
    x = torch.ones(1)
    with Capture(rank):
        call = rank.buffer._call("low_latency_dispatch", rank.backend, True, None, False, x)
        with call:
            rank.launch("dispatch")
        event = call.done(keeps=True)
        event.current_stream_wait()
        assert rank.streams_of(x) == [] and event.extra_tensors == (x,)
        event, _ = rank.call("dispatch", tensors=(x,))
        event.current_stream_wait()
        assert rank.streams_of(x) and event.extra_tensors is None
    y = torch.ones(1)
    call = rank.buffer._call("low_latency_dispatch", rank.backend, True, None, False, y)
    with call:
        rank.launch("in no graph")
    event = call.done(keeps=True)
    event.current_stream_wait()
    assert rank.comm in rank.streams_of(y) and event.extra_tensors is None


class FewTokens(CudaBackend):
    """A backend whose low latency calls are launches of a rank's."""

    rank: Rank

    def low_latency_dispatch(self, *_: Any) -> Any:
        return SimpleNamespace(
            receive=lambda: self.rank.launch("dispatch"),
            returned=None,
            count=None,
            tables=(None, None),
        )

    def low_latency_combine(self, *_: Any) -> Any:
        self.group.stream()
        return SimpleNamespace(finish=lambda: self.rank.launch("combine"), out=None)


@pytest.mark.parametrize("is_async", [False, True])
def test_with_overlap_a_combine_waits_for_its_experts(rank, is_async) -> None:
    """sglang/srt/layers/moe/token_dispatcher/deepep.py:926 of 0.5.23: the combine is on another
    stream, behind an event before the experts, whose signals it gets."""
    buffer = Buffer.__new__(Buffer)
    backend = buffer._backend = FewTokens.__new__(FewTokens)
    backend.group, backend.rank, buffer.group_size, buffer.rank = rank.group, rank, 1, 0
    buffer.device, buffer._may_move = torch.device("cpu"), False
    x = torch.ones((1, 128), dtype=torch.bfloat16)
    ids, weights = torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1))
    *_, handle, event, _ = buffer.low_latency_dispatch(
        x, ids, 1, 1, use_fp8=False, async_finish=is_async
    )
    handle.state = object()
    if is_async:
        event.current_stream_wait()
    before, other, rows = Event(), Stream(), x.view(1, 1, 128)
    before.record(rank.compute)
    rank.work("experts")
    before.wait(other)
    signals = torch.zeros(1, dtype=torch.int32)
    with other:
        with pytest.raises(ValueError, match="overlap needs comp_signal or src_signals"):
            buffer.low_latency_combine(rows, ids, weights, handle, overlap=True)
        buffer.low_latency_combine(rows, ids, weights, handle)
        rank.work("next experts", rank.compute)
        buffer.low_latency_combine(rows, ids, weights, handle, overlap=False)
        assert "next experts" not in rank.before["combine"]
        for name in ("comp_signal", "src_signals"):
            rank.work("more experts", rank.compute)
            buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **{name: signals})
            assert {"next experts", "more experts"} <= rank.before["combine"]


def test_an_error_names_the_call(rank) -> None:
    early = EventHandle()
    with Capture(rank):
        event, _ = rank.call("a")
        with pytest.raises(RuntimeError, match="^combine: the communication stream cannot wait"):
            rank.call("combine", event=early)
        event.current_stream_wait()
    with pytest.raises(TypeError, match="^dispatch: previous_event is .*, not a SimpleNamespace"):
        rank.call("dispatch", event=SimpleNamespace())


def test_the_communication_stream_has_the_highest_priority_and_elastic_buffers_share_it(
    rank,
) -> None:
    """csrc/legacy/buffer.hpp:98: one of high priority for each buffer; csrc/elastic/utils.hpp:8: one
    for all. Here the buffers of one rank share it, as ranks may be threads of one process."""
    assert rank.comm.priority == -3
    device = torch.device("cuda", 0)
    with mock.patch.dict(streams.SHARED, clear=True):
        first = streams.shared_comm_stream(device, 0)
        assert streams.shared_comm_stream(device, 0) is first
        assert streams.shared_comm_stream(device, 1) is not first
