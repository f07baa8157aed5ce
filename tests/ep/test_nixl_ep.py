"""``nixl_ep``: ranks that connect, leave, die and come back, on CPUs, GPUs and emulated ones; all
results equal the slow reference bit for bit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import nixl_ep_ranks  # noqa: E402
from nixl_ep_ranks import (  # noqa: E402
    HIDDEN,
    LOCAL,
    ROOM,
    TOKENS,
    Here,
    NixlEpRanks,
    connected,
    dies,
    disconnected,
    in_all_forms,
    let_in,
    made,
    masks,
    steps,
    survives,
)

pytestmark = [pytest.mark.xdist_group("nixl_ep"), pytest.mark.timeout(300)]

ALL = list(range(ROOM))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """The parts of the emulated GPU, compiled once."""
    import emulated

    parts: Path = tmp_path_factory.mktemp("emulated")
    emulated.compiled(parts)
    return parts


def options_of(request: Any, where: str) -> dict[str, Any]:
    """The options of processes with buffers on the CPU, on a GPU, or on an emulated one."""
    if where == "cpu":
        return {"device": "cpu"}
    if where == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("lacks a GPU")
        return {"device": "cuda"}
    if torch.cuda.is_available():
        pytest.skip("torch's streams are those of the GPU that is there")
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("lacks a C++ compiler")
    return {"device": "cuda", "emulated": str(request.getfixturevalue("folder"))}


@pytest.fixture(params=["cpu", "emulated", "gpu"])
def world(request: Any) -> Iterator[Callable[..., NixlEpRanks]]:
    options = options_of(request, request.param)
    worlds: list[NixlEpRanks] = []

    def make(**given: Any) -> NixlEpRanks:
        worlds.append(NixlEpRanks(**options, **given))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


def started(group: NixlEpRanks, ranks: list[int]) -> None:
    """Starts ranks that connect to each other."""
    group.start(*ranks)
    group.run(ranks, connected, ranks)


def join(old: list[int], new: list[int], activate: bool = True) -> dict[int, tuple[Any, ...]]:
    """The calls by which new ranks connect to old ones: those activate them at once, or later."""
    calls: dict[int, tuple[Any, ...]] = {rank: (connected, new, activate) for rank in old}
    return calls | {rank: (connected, sorted(old + new)) for rank in new}


def test_all_ranks_in_all_formats(world):
    group = world()
    started(group, ALL)
    group.run(ALL, in_all_forms, ALL)


def test_fewer_ranks_than_there_is_room_for(world):
    """Results have room for the ranks that the caller's number of experts stands for."""
    group, there = world(), [0, 1, 2]
    started(group, there)
    for num_experts in (None, 3 * LOCAL, ROOM * LOCAL):
        group.run(there, in_all_forms_of, there, num_experts)
    assert group.run(there, masks) == [[0, 0, 0, 1]] * 3


def in_all_forms_of(here: Here, there: list[int], num_experts: int | None) -> None:
    in_all_forms(here, there, num_experts=num_experts)


def test_one_rank_alone(world):
    group = world()
    started(group, [0])
    group.run([0], in_all_forms, [0])
    assert group.run([0], masks) == [[0, 1, 1, 1]]


def test_ranks_are_added_and_removed(world):
    """A plan of NIXL EP's: two ranks, all, three, and all again in new processes."""
    group = world()
    started(group, [0, 1])
    before = group.run([0, 1], steps, [1, 2], [0, 1])
    group.start(2, 3)
    group.together(join([0, 1], [2, 3]))
    grown = group.run(ALL, steps, [3, 4], ALL)
    # Ranks that leave tell nobody, and those that stay tell no other rank either.
    group.run([0, 1, 2], disconnected, [3])
    group.leave(3)
    assert group.run([0, 1, 2], masks) == [[0, 0, 0, 1]] * 3
    group.run([0, 1, 2], steps, [5, 6], [0, 1, 2])
    group.run([0], disconnected, [2])
    group.run([1], disconnected, [2])
    group.leave(2)
    assert group.run([0, 1], steps, [1, 2], [0, 1]) == before
    group.start(2, 3)
    group.together(join([0, 1], [2, 3]))
    assert group.run(ALL, steps, [3, 4], ALL) == grown


@pytest.mark.parametrize("when", ["before", "anywhere"])
def test_a_rank_dies_and_a_new_process_takes_its_place(world, when):
    group, rest = world(), [0, 2, 3]
    started(group, ALL)
    before = group.run(ALL, steps, [1, 2], ALL)
    group.tell(1, dies, when, ALL)
    for rank in rest:
        group.tell(rank, survives, 40 if when == "anywhere" else 3, ALL)
    group.lose(1)
    assert [group.heard(rank) for rank in rest] == [[0, 1, 0, 0]] * 3
    group.run(rest, steps, [3, 4], rest)
    # One survivor has disconnected it, as frameworks do, and the others have not.
    group.run([0], disconnected, [1])
    group.start(1)
    group.together(join(rest, [1]))
    assert group.run(ALL, masks) == [[0] * ROOM] * ROOM
    assert group.run(ALL, steps, [1, 2], ALL) == before


def test_a_dead_rank_that_nobody_disconnects_is_no_obstacle(world):
    group = world()
    started(group, [0, 1])
    group.tell(1, dies, "before", [0, 1])
    group.tell(0, survives, 3, [0, 1])
    group.lose(1)
    assert group.heard(0) == [0, 1, 1, 1]
    for new, rest in ((2, [0]), (3, [0, 2])):
        group.start(new)
        group.together(join(rest, [new]))
        there = [*rest, new]
        assert group.run(there, masks) == [[int(rank not in there) for rank in ALL]] * len(there)
        group.run(there, steps, [new], there)
    for text in group.run([0, 2, 3], not_let_in):
        assert "rank 1" in text and "connect_ranks" in text


def not_let_in(here: Here) -> str:
    with pytest.raises(ValueError) as raised:
        here.buffer.update_mask_buffer(1, False)
    here.buffer.clean_mask_buffer()
    return str(raised.value)


def test_masks_are_set_and_cleaned(world):
    group = world()
    started(group, ALL)
    group.run(ALL, masked_and_cleaned)


def masked_and_cleaned(here: Here) -> None:
    there = [rank for rank in ALL if rank != 3]
    if here.rank == 3:
        for rank in there:
            here.buffer.update_mask_buffer(rank, mask=True)
        steps(here, [1, 2], [3])
    else:
        here.buffer.update_mask_buffer(3, True)
        steps(here, [1, 2], there)
    here.buffer.barrier()
    here.settle()
    # As vLLM cleans buffers: it clears the memory, too.
    here.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    here.buffer.clean_mask_buffer()
    here.buffer.clean_buffer(TOKENS, HIDDEN, ROOM * LOCAL)
    here.settle()
    assert masks(here) == [0] * ROOM
    here.buffer.barrier()
    here.settle()
    steps(here, [3, 4], ALL)


def test_masks_of_the_caller_outlive_a_meeting(world):
    group = world()
    started(group, [0, 1])
    for rank in (0, 1):
        group.run([rank], masked, 1 - rank)
    group.start(2)
    group.together(join([0, 1], [2]))
    assert group.run([0, 1, 2], masks) == [[0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 1]]
    group.run([0, 1], let_in, [0, 1])
    group.run([0, 1, 2], steps, [1], [0, 1, 2])


def masked(here: Here, rank: int) -> None:
    here.buffer.update_mask_buffer(rank, mask=True)


def test_waits_are_added_by_rank(world):
    group, there = world(), [0, 1]
    started(group, there)
    group.run(there, waits)


def waits(here: Here) -> None:
    given = nixl_ep_ranks.Inputs(1, [0, 1])
    x, chosen, weights = (
        nixl_ep_ranks.moved(here, each[here.rank])
        for each in (given.xs, given.choices, given.weights)
    )
    # An emulated GPU would write to the memory of a tensor that is gone.
    for ranks in (ROOM,) if "emulated" in sys.modules else (2, ROOM):
        times = nixl_ep_ranks.moved(here, torch.zeros(ranks, dtype=torch.int64))
        for has_hook in (False, True):
            rows, _, handle, _, hook = here.buffer.low_latency_dispatch(
                x,
                chosen,
                TOKENS,
                ranks * LOCAL,
                use_fp8=False,
                dispatch_wait_recv_cost_stats=times,
                return_recv_hook=has_hook,
            )
            hook() if hook else None
            here.settle()
            _, _, hook = here.buffer.low_latency_combine(
                rows,
                chosen,
                weights,
                handle,
                combine_wait_recv_cost_stats=times,
                return_recv_hook=has_hook,
            )
            hook() if hook else None
            here.settle()
        assert (times >= 0).all()
    with pytest.raises(ValueError, match="dispatch_wait_recv_cost_stats has the shape"):
        here.buffer.dispatch(
            x,
            chosen,
            TOKENS,
            2 * LOCAL,
            dispatch_wait_recv_cost_stats=torch.zeros(3, dtype=torch.int64, device=here.device),
        )


def test_the_high_throughput_mode(world):
    group = world()
    group.start(*ALL)
    group.run(ALL, high_throughput)


def high_throughput(here: Here) -> None:
    """The calls of NIXL EP's own test of that mode."""
    import nixl_ep

    made(here, low_latency_mode=False)
    here.buffer.connect_ranks([rank for rank in ALL if rank != here.rank])
    given = nixl_ep_ranks.Inputs(1, ALL)
    x, chosen, weights = (
        nixl_ep_ranks.moved(here, each[here.rank])
        for each in (given.xs, given.choices, given.weights)
    )
    nixl_ep.Buffer.set_num_sms(4)
    config = nixl_ep.Buffer.get_dispatch_config(ROOM)
    per_rank, _, per_expert, token_in_rank, _ = here.buffer.get_dispatch_layout(
        chosen, ROOM * LOCAL
    )
    got, ids, got_weights, counts, handle, event = here.buffer.ht_dispatch(
        x=x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=chosen,
        topk_weights=weights,
        config=config,
        async_finish=False,
    )
    here.settle()
    assert sum(counts) == (ids >= 0).sum() and len(got) == len(got_weights)
    again, *nothing, _ = here.buffer.ht_dispatch(x=x, handle=handle, config=config)
    assert nothing == [None] * 4
    bias = nixl_ep_ranks.moved(here, torch.ones(len(x), HIDDEN).bfloat16())
    out, _, _ = here.buffer.ht_combine(x=again, handle=handle, bias=(bias, bias), config=config)
    here.settle()
    copies = token_in_rank.sum(1, keepdim=True).float()
    expected = (x.float() * copies + 2).bfloat16()
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0.02)


def test_a_missing_rank_is_named(world):
    group = world()
    group.start(0, 1)
    for rank in (0, 1):
        group.tell(rank, impatient, [0, 1, 2])
    texts = [group.heard(rank) for rank in (0, 1)]
    assert any("of ranks [0, 1, 2], 2 is missing" in text for text in texts), texts
    # The failed meeting leaves no obstacle for the next one.
    group.run([0, 1], connected, [0, 1])
    group.run([0, 1], steps, [1], [0, 1])


def impatient(here: Here, ranks: list[int]) -> str:
    from nixl_ep import _meetings

    made(here)
    before, _meetings.CONNECT_SECS = _meetings.CONNECT_SECS, 2.0
    try:
        with pytest.raises(TimeoutError) as raised:
            here.buffer.connect_ranks(ranks)
    finally:
        _meetings.CONNECT_SECS = before
    return str(raised.value)


def test_ranks_with_other_sizes_are_refused_on_all(world):
    group = world()
    group.start(0, 1)
    texts = group.run([0, 1], of_other_sizes)
    wanted = "num_experts_per_rank of update_memory_buffers differs: 2 on rank 0, 3 on rank 1"
    assert texts == [wanted] * 2


def of_other_sizes(here: Here) -> str:
    import nixl_ep

    here.buffer = nixl_ep.Buffer(rank=here.rank, tcp_store_group=here.store)
    here.buffer.update_memory_buffers(ROOM, 2 + here.rank, 1 << 20)
    with pytest.raises(ValueError) as raised:
        here.buffer.connect_ranks([0, 1])
    return str(raised.value)


def test_requests_that_are_not_supported_say_so(world):
    group = world()
    started(group, [0, 1])
    group.run([0, 1], refusals)
    group.run([0, 1], steps, [1], [0, 1])


def refusals(here: Here) -> None:
    import nixl_ep

    buffer, other = here.buffer, 1 - here.rank
    short = torch.zeros(2, dtype=torch.int32, device=here.device)
    refused = {
        "the list of ranks is empty": lambda: buffer.connect_ranks([]),
        "no rank 4: .* made room for 4": lambda: buffer.connect_ranks([ROOM]),
        "is this one; it leaves by destroy": lambda: buffer.disconnect_ranks([here.rank]),
        "rank 2 is not connected$": lambda: buffer.disconnect_ranks([2]),
        "never masked": lambda: buffer.update_mask_buffer(here.rank, True),
        "connect_ranks comes first": lambda: buffer.update_mask_buffer(2, False),
        "mask_status has the shape": lambda: buffer.query_mask_buffer(short),
        "num_experts is a multiple of 2, from 4 .* to 8 .*, not 2": lambda: calls(buffer, LOCAL),
        "not 5$": lambda: calls(buffer, 5),
        "not 10$": lambda: calls(buffer, 10),
        "There is no way by etcd": lambda: with_store(buffer, None).connect_ranks([2]),
        "rank is 0 to num_ranks - 1": lambda: nixl_ep.Buffer(rank=4).update_memory_buffers(4, 2, 0),
        "timeout_ms is at least 1": lambda: nixl_ep.Buffer(timeout_ms=0),
        "group and comm exclude": lambda: nixl_ep.Buffer(group=1, comm=1),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="is called once"):
        buffer.update_memory_buffers(ROOM, LOCAL, 0)
    with pytest.raises(RuntimeError, match="update_memory_buffers comes first"):
        nixl_ep.Buffer(rank=0).connect_ranks([1])
    with pytest.raises(NotImplementedError, match="nixl_ep.Buffer does not have nvlink_backend"):
        nixl_ep.Buffer(rank=0, nvlink_backend="ipc")
    # Keywords of earlier releases that change nothing.
    nixl_ep.Buffer(rank=0, enable_shrink=True, nvlink_backend=None)
    with_store(buffer, here.store).connect_ranks([other])
    assert nixl_ep.Buffer.is_sm90_compiled() and nixl_ep.Buffer.capture().event is not None


def with_store(buffer: Any, store: Any) -> Any:
    buffer.set_tcp_store_group(store)
    return buffer


def calls(buffer: Any, num_experts: int) -> Any:
    x = torch.zeros(1, HIDDEN).bfloat16()
    return buffer.dispatch(x, torch.zeros(1, 1).long(), TOKENS, num_experts)


def test_a_dead_rank_is_noticed_long_before_the_deadline(world):
    # A call waits for a rank longer than this test may take.
    group = world(timeout=2000)
    started(group, [0, 1])
    group.tell(1, dies, "before", [0, 1])
    group.tell(0, survives, 3, [0, 1])
    group.lose(1)
    assert group.heard(0) == [0, 1, 1, 1]
