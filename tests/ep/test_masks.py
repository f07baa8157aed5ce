"""Ranks that are masked and unmasked, barriers, and ranks that give up on a call."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases import answers

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(120)]

on_nodes = pytest.mark.parametrize("nodes", [1, 2])
TOKENS, HIDDEN, TOP_K = 9, 256, 3


class Few:
    """Dispatches and combines of low latency mode."""

    def __init__(self, buffer, experts: int) -> None:
        self.buffer, self.experts = buffer, experts

    def dispatch(self, x, chosen, weights):
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, chosen, TOKENS, self.experts, use_fp8=False
        )
        return rows, handle

    def combine(self, sent, chosen, weights):
        rows, handle = sent
        return self.buffer.low_latency_combine(rows, chosen, weights, handle)[0]


class Many(Few):
    """Dispatches and combines of normal mode, in rounds."""

    def dispatch(self, x, chosen, weights):
        per_rank, _, per_expert, token_in_rank, _ = self.buffer.get_dispatch_layout(
            chosen, self.experts
        )
        rows, _, got, _, handle, _ = self.buffer.dispatch(
            x, None, per_rank, None, token_in_rank, per_expert, chosen, weights
        )
        return rows, handle

    def combine(self, sent, chosen, weights):
        rows, handle = sent
        return self.buffer.combine(rows, handle)[0]


def back_again(group, kind: type[Few]) -> None:
    """Masks the last rank for some calls, on all ranks at the same call, and unmasks it."""
    from uccl.ep import Buffer

    me, ranks = group.rank(), group.size()
    experts, last = 4 * ranks, ranks - 1
    size = (
        Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, experts)
        if kind is Few
        else ranks * 8192
    )
    buffer = Buffer(group, size, 0, low_latency_mode=True)
    calls = kind(buffer, experts)
    others = [rank for rank in range(ranks) if rank != me and (me == last or rank == last)]
    there, seed, is_open = [True] * ranks, 0, None

    def mask(is_masked: bool) -> None:
        for rank in others:
            buffer.low_latency_update_mask_buffer(rank, is_masked)
            there[rank] = not is_masked

    def dispatch() -> None:
        nonlocal seed, is_open
        seed += 1
        random = torch.Generator().manual_seed(100 * seed + me)
        x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=random).bfloat16()
        chosen = torch.rand(TOKENS, experts, generator=random).topk(TOP_K).indices
        weights = torch.randint(1, 3, (TOKENS, TOP_K), generator=random).float()
        is_open = x, chosen, weights, list(there), calls.dispatch(x, chosen, weights)

    def combine() -> None:
        nonlocal is_open
        x, chosen, weights, sent_to, sent = is_open
        is_open = None
        of_rank = torch.tensor([a and b for a, b in zip(sent_to, there)])
        owner = chosen // 4
        if kind is Few:
            times = (weights * of_rank[owner]).sum(1)
        else:
            token_in_rank = torch.zeros(TOKENS, ranks, dtype=torch.bool).scatter_(1, owner, True)
            times = (token_in_rank & of_rank).sum(1)
        out = calls.combine(sent, chosen, weights)
        assert torch.equal(out, (x.float() * times[:, None]).bfloat16()), (me, seed, sent_to, there)

    def call() -> None:
        dispatch() if is_open is None else combine()

    for count in range(1, 10):
        for begins_open in (False, True):
            for _ in range(4 + begins_open):
                call()
            mask(True)
            for _ in range(count):
                call()
            mask(False)
            if is_open is not None:
                combine()
    for _ in range(18):
        call()


@on_nodes
@pytest.mark.parametrize("kind", [Few, Many])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_is_let_in_gives_and_gets_as_if_it_was_never_left_out(
    world, ranks, kind, nodes
):
    world.run(ranks, back_again, kind, nodes=nodes)


def barriers(group) -> list[int]:
    """Barriers of all ranks, and then of the present ones: rank 1 makes fewer than the others."""
    from uccl.ep import Buffer, ElasticBuffer

    buffer = Buffer(group, 0, 1 << 20, low_latency_mode=True, enable_shrink=True, timeout=2)
    elastic = ElasticBuffer(group, num_bytes=1 << 20)
    status = torch.zeros(group.size(), dtype=torch.int32)
    for _ in range(20):
        buffer.clean_low_latency_buffer(2, 512, 6)
        elastic.barrier()
    if group.rank() != 1:
        # Rank 1 is late, and masked from then on; there is no store to meet by.
        for _ in range(3):
            buffer.clean_low_latency_buffer(2, 512, 6)
        buffer.low_latency_query_mask_buffer(status)
    torch.distributed.barrier(group)
    return status.tolist()


@on_nodes
def test_a_barrier_leaves_out_late_and_masked_ranks(world, nodes):
    assert world.run(3, barriers, nodes=nodes) == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def late_barrier(group) -> str:
    """Rank 1 misses a barrier, and no rank is masked."""
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20, timeout=1)
    text = ""
    if group.rank() == 0:
        (text,) = answers([lambda: buffer.clean_low_latency_buffer(2, 512, 4)])
    torch.distributed.barrier(group)
    return text


def test_a_barrier_names_the_missing_rank(world):
    text, _ = world.run(2, late_barrier)
    assert "barrier on rank 0 is not over" in text and "rank 1: data of call 1" in text, text


def own_mask(group) -> str:
    from uccl.ep import Buffer

    buffer = Buffer(group, 0, 1 << 20)
    (text,) = answers([lambda: buffer.low_latency_update_mask_buffer(group.rank(), True)])
    buffer.low_latency_clean_mask_buffer()
    return text


def test_a_rank_does_not_leave_itself_out(world):
    for rank, text in enumerate(world.run(2, own_mask)):
        assert f"rank {rank} is this one" in text, text


def worst(group) -> tuple[str, str]:
    """Rank 0 has room for fewer rows than it receives."""
    from uccl.ep import Buffer

    ranks = group.size()
    buffer = Buffer(group, 4096, 0)
    x, chosen = torch.ones(64, 256).bfloat16(), torch.zeros(64, 1, dtype=torch.int64)
    per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(chosen, ranks)

    def dispatch():
        buffer.dispatch(
            x,
            None,
            per_rank,
            None,
            token_in_rank,
            per_expert,
            chosen,
            torch.ones(64, 1),
            num_worst_tokens=16,
        )

    (first,) = answers([dispatch])
    torch.distributed.barrier(group)
    return first


def test_a_rank_without_room_tells_the_others(world):
    # All tokens go to rank 0, in rounds, so rank 1 waits for it.
    mine, theirs = world.run(2, worst)
    assert "128 rows arrive, and there is room for 16" in mine, mine
    assert "rank 0 gave up on call 1" in theirs, theirs


def hints(group) -> tuple[int, int]:
    """Rank 0 asks for the hint several times, alone."""
    from uccl.ep import ElasticBuffer

    first = ElasticBuffer.get_buffer_size_hint(group, 8, 512, 2)
    again = (
        [ElasticBuffer.get_buffer_size_hint(group, 8, 512, 2) for _ in range(3)]
        if group.rank() == 0
        else []
    )
    torch.distributed.barrier(group)
    return first, len(set([first, *again]))


@on_nodes
def test_only_the_first_hint_of_a_group_is_collective(world, nodes):
    (first, count), (other, _) = world.run(2, hints, nodes=nodes)
    assert first == other and count == 1


def sms(group) -> list[int]:
    from uccl.ep import ElasticBuffer

    made = [
        ElasticBuffer(group, num_bytes=1 << 20, prefer_overlap_with_compute=overlaps)
        for overlaps in (True, False)
    ]
    return [buffer.get_theoretical_num_sms(256, 8) for buffer in made]


def test_more_sms_are_asked_for_where_nothing_is_computed_beside(world):
    for beside, alone in world.run(4, sms):
        assert 4 <= beside < 64 <= alone


class Store(dict):
    """A store in memory with the methods that a meeting uses; ``get`` waits for a missing key as
    long as torch's."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key, default=None):
        while key not in self:
            time.sleep(0.01)
        return as_bytes(self[key])

    def compare_set(self, key, expected, desired):
        return as_bytes(self.get_now(key, expected))

    def get_now(self, key, otherwise):
        return dict.get(self, key, otherwise)

    def delete_key(self, key):
        return self.pop(key, None) is not None


def as_bytes(value) -> bytes:
    return value.encode() if isinstance(value, str) else value


def test_a_rank_that_gives_up_between_two_looks_is_waited_for_no_longer_than_the_meeting():
    from uccl.ep._meeting import Meeting

    class Leaves(Store):
        """The request of rank 1 disappears after ``check`` has seen it."""

        def check(self, keys):
            seen = super().check(keys)
            self.pop("uccl.ep/0.1/asked/1", None)
            return seen

    store = Leaves({"uccl.ep/0.1/asked/1": "somebody"})
    raised = []

    def meet() -> None:
        try:
            Meeting(store, 0, [0, 1], 2, 0.2).exchange(b"mine")
        except TimeoutError as e:
            raised.append(str(e))

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(20)
    assert raised and "of ranks [0, 1], 1 is missing" in raised[0], raised


def test_ranks_have_met_also_if_nothing_can_be_removed_from_the_store():
    from uccl.ep._base import BaseBuffer

    buffer: Any = BaseBuffer.__new__(BaseBuffer)
    ranks = SimpleNamespace(rank=0, size=1, store=Store())
    buffer._ranks, buffer._timeout, buffer._last_meeting = ranks, 5.0, None
    assert buffer._meet({0}, None, lambda exchange: exchange(b"one")) == [b"one"]

    def gone(key):
        raise RuntimeError("the store has gone")

    before = buffer._last_meeting
    store = Store()
    before._store = type("Gone", (Store,), {"delete_key": lambda self, key: gone(key)})()
    assert buffer._meet({0}, store, lambda exchange: exchange(b"two")) == [b"two"]
    assert buffer._last_meeting is not before
