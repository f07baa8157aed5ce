"""The functions that the tests of the backend run on each rank: the same call on a group of ``uccl`` and on one of
gloo, whose results are compared."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

_groups: dict[str, Any] = {}


def group() -> Any:
    """The group of the backend, made once in each process."""
    import uccl.distributed  # noqa: F401

    if "uccl" not in _groups:
        limit = datetime.timedelta(seconds=40)
        _groups["uccl"] = dist.new_group(backend="uccl", timeout=limit)
    return _groups["uccl"]


def tensor(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


GATHERED_BY_GLOO = [torch.float32, torch.int64, torch.uint8]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def copies(gloo: Any) -> None:
    """Collectives that copy, of several types and lengths."""
    ours, own, ranks = group(), dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in (1, 5, 3000, 100_000):
            given = tensor(count, dtype, own)
            found = []
            for of in (ours, gloo):
                results = []
                outputs = [torch.zeros_like(given) for _ in range(ranks)]
                dist.all_gather(outputs, given, group=of)
                results.append(torch.cat(outputs))
                flat = torch.zeros(ranks * count, dtype=dtype)
                dist.all_gather_into_tensor(flat, given, group=of)
                results.append(flat)
                one = given.clone()
                dist.broadcast(one, src=ranks - 1, group=of)
                results.append(one)
                one = torch.zeros_like(given)
                parts = (
                    [given + i for i in range(ranks)] if dtype != torch.bool else [given] * ranks
                )
                dist.scatter(one, parts if own == 1 else None, src=1, group=of)
                results.append(one)
                outputs = [torch.zeros_like(given) for _ in range(ranks)] if own == 0 else None
                if of is gloo and dtype not in GATHERED_BY_GLOO:
                    results += results[0].split(count) if own == 0 else ()
                else:
                    dist.gather(given, outputs, dst=0, group=of)
                    results += outputs or []
                flat = torch.zeros(ranks * count, dtype=dtype)
                dist.all_to_all_single(flat, torch.cat(parts), group=of)
                results.append(flat)
                found.append(results)
            for mine, theirs in zip(*found):
                assert torch.equal(mine, theirs), (dtype, count)


def splits(gloo: Any) -> None:
    """all_to_all with parts of unlike lengths, some without rows, and rows of several elements."""
    ours, own, ranks = group(), dist.get_rank(), dist.get_world_size()
    rows = [[(3 * a + 5 * b) % 4 for b in range(ranks)] for a in range(ranks)]
    inputs = rows[own]
    outputs = [rows[other][own] for other in range(ranks)]
    given = torch.arange(sum(inputs) * 7, dtype=torch.float32).view(-1, 7) + 100 * own
    found = []
    for of in (ours, gloo):
        room = torch.zeros(sum(outputs), 7)
        dist.all_to_all_single(room, given, outputs, inputs, group=of)
        found.append(room)
    assert torch.equal(*found)
    # gloo has no all_to_all of lists.
    room_list = [torch.zeros(count, 7) for count in outputs]
    dist.all_to_all(room_list, list(given.split(inputs)), group=ours)
    assert torch.equal(torch.cat(room_list), found[1])


def reductions(gloo: Any) -> list[bytes]:
    """Reductions on CPUs: exact ones as gloo's, and each in the order of the ranks on every rank."""
    ours, own, ranks = group(), dist.get_rank(), dist.get_world_size()
    kinds = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    kinds += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
    for kind in kinds:
        found = []
        for of in (ours, gloo):
            one = tensor(1000, torch.int64, own)
            dist.all_reduce(one, kind, group=of)
            two = tensor(1000, torch.int64, own)
            dist.reduce(two, 1, kind, group=of)
            found.append((one, two if own == 1 else one))
        assert all(torch.equal(a, b) for a, b in zip(*found)), kind
    floats = [tensor(1000, torch.float32, rank) for rank in range(ranks)]
    total = floats[0].clone()
    for part in floats[1:]:
        total += part
    one = floats[own].clone()
    dist.all_reduce(one, group=ours)
    assert torch.equal(one, total), "in the order of the ranks"
    dist.all_reduce(mean := floats[own].clone(), dist.ReduceOp.AVG, group=ours)
    assert torch.equal(mean, total / ranks)
    room = torch.zeros(1000)
    dist.reduce_scatter(room, [floats[own] + i for i in range(ranks)], group=ours)
    expected = floats[0] + own
    for part in floats[1:]:
        expected = expected + (part + own)
    assert torch.equal(room, expected)
    room = torch.zeros(1000)
    dist.reduce_scatter_tensor(room, torch.cat([floats[own]] * ranks), group=ours)
    assert torch.equal(room, total)
    for wrong in (torch.zeros(3, device="meta"),):
        try:
            dist.all_reduce(wrong, group=ours)
        except RuntimeError as error:
            assert "nccl" in str(error)
        else:
            raise AssertionError("a reduction that is not on a CPU")
    return [one.numpy().tobytes()]


def messages(_gloo: Any) -> None:
    """send, recv, their batches and asynchronous forms."""
    ours, own, ranks = group(), dist.get_rank(), dist.get_world_size()
    after, before = (own + 1) % ranks, (own - 1) % ranks
    sent, room = torch.full((5000,), float(own)), torch.zeros(5000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, group=ours),
            dist.P2POp(dist.irecv, room, before, group=ours),
        ]
    )
    for work in works:
        assert work.wait()
    assert bool((room == before).all())
    work = dist.irecv(room, after, group=ours)
    dist.send(sent * 2, before, group=ours)
    work.wait()
    assert work.is_completed() and work.is_success() and bool((room == 2 * after).all())
    try:
        dist.recv(room, group=ours)
    except RuntimeError as error:
        assert "any source" in str(error)
    else:
        raise AssertionError("a receive from any source")


def shapes(_gloo: Any) -> None:
    """Tensors with gaps, without elements, that require gradients; objects; asynchronous calls and futures."""
    ours, own, ranks = group(), dist.get_rank(), dist.get_world_size()
    base = torch.zeros(6, 8)
    dist.broadcast(base[:, ::2] if own else (base[:, ::2].fill_(3)), src=0, group=ours)
    assert bool((base[:, ::2] == 3).all()) and bool((base[:, 1::2] == 0).all())
    outputs = [torch.zeros(4, 3).t() for _ in range(ranks)]
    dist.all_gather(outputs, torch.full((3, 4), float(own)), group=ours)
    assert all(bool((one == rank).all()) for rank, one in enumerate(outputs))
    dist.all_gather([torch.zeros(0)] * ranks, torch.zeros(0), group=ours)
    leaf = torch.full((5,), float(own), requires_grad=True)
    with torch.no_grad():
        dist.broadcast(leaf, src=1, group=ours)
    assert leaf.tolist() == [1] * 5
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": own}, group=ours)
    assert objects == [{"rank": rank} for rank in range(ranks)]
    works = []
    rooms = [torch.zeros(ranks * 100) for _ in range(20)]
    for i, room in enumerate(rooms):
        given = torch.full((100,), float(100 * i + own))
        works.append(dist.all_gather_into_tensor(room, given, group=ours, async_op=True))
    for i, work in reversed(list(enumerate(works))):
        assert work.get_future().wait() is not None
        expected = torch.arange(ranks).repeat_interleave(100) + 100.0 * i
        assert torch.equal(rooms[i], expected)
    dist.barrier(group=ours)
    for _ in range(20):
        dist.barrier(group=ours, async_op=True).wait()


def subgroups(_gloo: Any) -> None:
    """Groups of some of the ranks, made and ended."""
    group()
    own, ranks = dist.get_rank(), dist.get_world_size()
    for first in range(ranks - 1):
        members = [first, ranks - 1]
        pair = dist.new_group(members, backend="uccl")
        if own in members:
            room = [torch.zeros(1) for _ in members]
            dist.all_gather(room, torch.full((1,), float(own)), group=pair)
            assert [one.item() for one in room] == members
            dist.barrier(group=pair)
            dist.destroy_process_group(pair)


def loses_a_rank(_gloo: Any, way: str) -> Any:
    """Rank 1 dies. The others name it, and go on as two."""
    import uccl.distributed

    ours, own = group(), dist.get_rank()
    dist.barrier(group=ours)
    room = torch.full((300_000,), float(own))
    if own == 1:
        if way == "in a call":
            dist.all_gather(
                [torch.empty_like(room) for _ in range(3)], room, group=ours, async_op=True
            )
        os._exit(1)
    try:
        while True:
            if way == "not its call":
                # Rank 2 hears of it from rank 0 alone.
                dist.broadcast(room, src=0, group=ours)
            else:
                dist.all_gather([torch.empty_like(room) for _ in range(3)], room, group=ours)
    except RuntimeError as error:
        assert "rank 1 is lost" in str(error), error
    assert uccl.distributed.lost(ours) == [1]
    pair = uccl.distributed.shrink(ours, timeout=30)
    assert dist.get_process_group_ranks(pair) == [0, 2]
    outputs = [torch.empty(1000) for _ in range(2)]
    dist.all_gather(outputs, torch.full((1000,), float(own)), group=pair)
    dist.broadcast(room.fill_(float(own)), src=2, group=pair)
    dist.barrier(group=pair)
    return [one[0].item() for one in outputs], room[0].item()
