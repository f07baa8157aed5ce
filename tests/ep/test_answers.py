"""Results of calls beside tensors: events, handles, and names that are missing."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_devices import Alone
from test_devices import Backend as Group
from test_devices import gpus as gpus  # noqa: F401  (a fixture)
from uccl.ep import EventHandle

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]


class Event(EventHandle):
    """A stand-in for an event: it counts the waits."""

    def __init__(self) -> None:
        self.waited = 0

    def current_stream_wait(self, stream: Any = None) -> None:
        """Counts a wait."""
        self.waited += 1


def test_an_event_is_called_for_a_with_statement():
    from uccl.ep import EventOverlap

    for release in (False, True):
        event = Event()
        overlap = EventOverlap(event)
        hooks: list[int] = []
        overlap.register_hook_after_wait(partial(hooks.append, 1))
        with overlap(release_handle=release) as same:
            assert same is overlap and event.waited == 0
        assert event.waited == 1 and hooks == [1]
        assert (overlap.event is None) == release
    # A `release_handle` of an earlier call has no effect on this one.
    overlap.event = event
    with overlap():
        pass
    assert overlap.event is event and event.waited == 2
    with EventOverlap():
        pass
    with pytest.raises(RuntimeError, match="was not asynchronous"):
        EventOverlap().current_stream_wait()


def test_an_event_that_was_waited_for_keeps_no_tensors():
    from uccl.ep import EventOverlap

    rows = torch.zeros(4)
    kept, overlap = weakref.ref(rows), EventOverlap(Event(), (rows,))
    del rows
    assert kept() is not None
    overlap.current_stream_wait()
    gc.collect()
    assert kept() is None and overlap.event is not None


def handles() -> list[Any]:
    """Two handles of equal dispatches."""
    from uccl.ep import ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 20, num_max_tokens_per_rank=4, comm=Alone(), device="cpu")
    x, choices = torch.zeros((3, 64)).bfloat16(), torch.tensor([[0, 1], [1, -1], [3, 2]])
    return [buffer.dispatch(x, choices, num_experts=4)[3] for _ in range(2)]


def test_handles_are_compared_by_identity():
    one, other = handles()
    assert one == one and one != other and one in [other, one] and len({one, other}) == 2
    both = [other, one]
    both.remove(one)
    assert both == [other]


def test_handles_have_deepeps_names():
    handle, _ = handles()
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
    # One rank: each token has one slot there, at the place of its last choice.
    assert handle.dst_buffer_slot_idx.tolist() == [[-1, 0], [1, -1], [-1, 2]]
    assert handle.recv_src_metadata.tolist() == [[0, 1, 0, 0], [1, 0, 1, -1], [2, 1, 2, 2]]
    # Callers cut the table.
    handle.recv_src_metadata = handle.recv_src_metadata[:2]
    assert handle.recv_src_metadata.shape == (2, 4)


def test_a_destroyed_buffer_refuses_combines():
    from uccl.ep import ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 20, num_max_tokens_per_rank=4, comm=Alone(), device="cpu")
    x, choices = torch.zeros((3, 64)).bfloat16(), torch.tensor([[0, 1], [1, -1], [3, 2]])
    rows, _, _, handle, _ = buffer.dispatch(x, choices, num_experts=4)
    buffer.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.combine(rows, handle)


def test_an_alignment_below_one_is_refused():
    from uccl.ep import ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 20, num_max_tokens_per_rank=4, comm=Alone(), device="cpu")
    x, choices = torch.zeros((3, 64)).bfloat16(), torch.tensor([[0, 1], [1, -1], [3, 2]])
    with pytest.raises(ValueError, match="expert_alignment is at least 1, not -2"):
        buffer.dispatch(x, choices, num_experts=4, expert_alignment=-2)


def test_names_that_are_not_here_are_not_there(gpus):  # noqa: F811
    from uccl.ep import Buffer, ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 20, comm=Alone(), device="cpu")
    for name in ("pp_send", "engram_fetch", "all_gather", "nothing"):
        assert not hasattr(buffer, name)
    with pytest.raises(NotImplementedError, match="pp_send is experimental"):
        buffer.pp_send(None, 0)
    for on_gpu in (
        Buffer(None, 1 << 20, comm=Alone(), device=0),
        ElasticBuffer(None, 1 << 20, comm=Alone(), device=0),
    ):
        assert getattr(on_gpu, "runtime", None) is None


def negative_numbers() -> list[tuple[str, Any]]:
    """Calls with a negative number, and the name of each argument."""
    from uccl.ep import Buffer, Config, ElasticBuffer

    buffer = Buffer(None, 1 << 20, comm=Alone(), device="cpu")
    elastic = ElasticBuffer(None, 1 << 20, num_max_tokens_per_rank=4, comm=Alone(), device="cpu")
    x, choices = torch.zeros((3, 128)).bfloat16(), torch.tensor([[0, 1], [1, -1], [3, 2]])
    sent = {"topk_idx": choices, "num_tokens_per_expert": torch.zeros(4, dtype=torch.int32)}
    rows, _, _, handle, _ = elastic.dispatch(x, choices, num_experts=4)
    hint = Buffer.get_low_latency_rdma_size_hint
    elastic_hint = ElasticBuffer.get_buffer_size_hint

    def of_store(**given: Any) -> Buffer:
        return Buffer(None, 1 << 20, store=object(), device="cpu", **given)

    return [
        ("num_worst_tokens", lambda: buffer.dispatch(x, **sent, num_worst_tokens=-1)),
        ("expert_alignment", lambda: buffer.dispatch(x, **sent, expert_alignment=-1)),
        ("expert_alignment", lambda: buffer.dispatch(x, **sent, expert_alignment=0)),
        ("num_experts", lambda: buffer.get_dispatch_layout(choices, -4)),
        ("num_max_dispatch", lambda: buffer.low_latency_dispatch(x, choices, -1, 4)),
        ("num_experts", lambda: buffer.low_latency_dispatch(x, choices, 4, -4)),
        ("num_sms", lambda: buffer.dispatch(x, **sent, config=Config(-2))),
        (
            "num_max_tokens",
            lambda: elastic.dispatch(x, choices, num_experts=4, num_max_tokens_per_rank=-1),
        ),
        ("num_experts", lambda: elastic.dispatch(x, choices, num_experts=-4)),
        ("num_sms", lambda: elastic.dispatch(x, choices, num_experts=4, num_sms=-1)),
        ("num_sms", lambda: elastic.combine(rows, handle, num_sms=-1)),
        ("num_max_dispatch", lambda: hint(-1, 128, 2, 4)),
        ("hidden", lambda: hint(4, -128, 2, 4)),
        ("num_ranks", lambda: hint(4, 128, -2, 4)),
        ("num_experts", lambda: hint(4, 128, 2, -4)),
        ("hidden_bytes", lambda: Config().get_nvl_buffer_size_hint(-256, 2)),
        ("num_ranks", lambda: Config().get_nvl_buffer_size_hint(256, -2)),
        ("hidden_bytes", lambda: Config().get_rdma_buffer_size_hint(-256, 16)),
        ("num_max_tokens", lambda: elastic_hint(Group("gloo"), -1, 128, allow_hybrid_mode=False)),
        ("hidden", lambda: elastic_hint(Group("gloo"), 4, -128, allow_hybrid_mode=False)),
        ("num_topk", lambda: elastic_hint(Group("gloo"), 4, 128, -1, allow_hybrid_mode=False)),
        ("num_nvl_bytes", lambda: Buffer(None, -1, comm=Alone(), device="cpu")),
        ("num_rdma_bytes", lambda: Buffer(None, 0, -1, comm=Alone(), device="cpu")),
        ("num_bytes", lambda: ElasticBuffer(None, -1, comm=Alone(), device="cpu")),
        (
            "num_max_tokens",
            lambda: ElasticBuffer(None, 1, num_max_tokens_per_rank=-1, comm=Alone(), device="cpu"),
        ),
        ("rank", lambda: of_store(rank=-1, num_ranks=2)),
        ("rank", lambda: of_store(rank=2, num_ranks=2)),
        ("rank", lambda: of_store(rank=0, num_ranks=-1)),
    ]


def test_negative_numbers_are_refused_by_name():
    for name, call in negative_numbers():
        with pytest.raises(ValueError, match=f"^{name}"):
            call()
