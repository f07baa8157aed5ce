"""The functions that the tests of ``uccl.collective`` run on each rank. The first argument is torch's group, which
they leave alone: the module takes the default one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def module(*args: Any, name: str = "uccl", **keywords: Any) -> Iterator[Any]:
    """``uccl.collective`` with a context of its own; ``wheel`` is the wheel's file, and ``wheel:PORT`` has it use the
    well-known ports from there on."""
    if name.startswith("wheel"):
        import wheel_file

        # It finds ranks of its host by these ports.
        os.environ["UCCL_P2P_BASE_PORT"] = name.partition(":")[2]
        collective = wheel_file.load()
        args = args or (dist.get_rank(), True)
    else:
        from uccl import collective

        args = args or (dist.get_rank(),)
    collective.init_collective(*args, **keywords)
    try:
        yield collective
    finally:
        dist.barrier()
        collective.finalize_collective()


def filled(count: int, sender: int, receiver: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * sender + 10 * receiver


def order(_group: Any, name: str) -> None:
    """Messages of several lengths, both ways at once, between all pairs."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    counts = [1, 3, 1000, 9000, 300_000]
    others = [rank for rank in range(ranks) if rank != own]
    with module(name=name) as collective:
        # The wheel keeps no tensor that is being sent.
        handles, received, sent = [], [], []
        for count in counts:
            for other in others:
                room = torch.zeros(count)
                received.append((room, filled(count, other, own)))
                handles.append(collective.irecv(room, other))
                sent.append(filled(count, own, other))
                handles.append(collective.isend(sent[-1], other))
        collective.wait_all(handles)
        assert all(collective.test(handle) for handle in handles)
        for room, expected in received:
            assert torch.equal(room, expected)


def ring(_group: Any, name: str) -> None:
    """A batch, with a message to the own rank, which is left out."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (own + 1) % ranks, (own - 1) % ranks
    with module(name=name) as collective:
        sent, room = filled(5000, own, after), torch.zeros(5000)
        handles = collective.batch_isend_irecv(
            [
                collective.P2POp(collective.isend, sent, after),
                ("recv", room, before),
                collective.P2POp("send", sent, own),
            ]
        )
        assert len(handles) == 2
        collective.wait_all(handles)
        assert torch.equal(room, filled(5000, before, own))


def gathered(_group: Any, name: str) -> None:
    own, ranks = dist.get_rank(), dist.get_world_size()
    with module(name=name) as collective:
        for shape in [(7,), (3, 1000), (400, 1000)]:
            room = torch.zeros(ranks, *shape)
            collective.allgather(torch.full(shape, float(own)), room)
            assert all(bool((room[rank] == rank).all()) for rank in range(ranks))
        # The wheel keeps neither tensor: freed too early, they would have bytes of others' written over the heap.
        sent, room = torch.full((5,), float(own)), torch.zeros(ranks * 5 + 1)
        handles = collective.iallgather(sent, room)
        assert len(handles) == 2 * (ranks - 1)
        collective.wait_all(handles)
        assert room.tolist() == [float(rank) for rank in range(ranks) for _ in range(5)] + [0.0]


def kind(call: Any) -> str:
    """The name of the exception that a call raises, or of its result's type."""
    try:
        return type(call()).__name__
    except Exception as error:
        return type(error).__name__


def errors(_group: Any, name: str) -> dict[str, str]:
    """The kinds of errors and results, by the call."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    tensor, gaps = torch.zeros(4), torch.zeros(4, 4).t()
    other = (own + 1) % ranks
    found: dict[str, str] = {}
    if name.startswith("wheel"):
        import wheel_file

        collective = wheel_file.load()
    else:
        from uccl import collective

    found["send before init"] = kind(lambda: collective.send(tensor, other))
    found["context before init"] = kind(collective.get_collective)
    found["finalize before init"] = kind(collective.finalize_collective)
    context = collective.CollectiveContext(own, True)
    found["register in no context"] = kind(lambda: context.register_tensor(tensor))
    found["finalize no context"] = kind(context.finalize)
    with module(name=name) as collective:
        context = collective.get_collective()
        found["initialized"] = str(context.initialized)
        found["local"] = str(context.local_connections)
        found["no connection to itself"] = str(
            [i for i, conn in enumerate(context.send_connections) if conn is None] == [own]
        )
        found["send to nobody"] = kind(lambda: collective.send(tensor, ranks))
        found["recv from nobody"] = kind(lambda: collective.irecv(tensor, ranks + 7))
        found["send to itself"] = kind(lambda: collective.send(tensor, own))
        found["isend to itself"] = str(collective.isend(tensor, own))
        found["recv from itself"] = str(collective.irecv(tensor, own))
        found["test of a message to itself"] = str(collective.test(-1))
        found["wait for a message to itself"] = kind(lambda: collective.wait(-1))
        found["send of a tensor with gaps"] = kind(lambda: collective.send(gaps, other))
        found["register a tensor with gaps"] = kind(lambda: collective.register_tensor(gaps))
        found["an unknown handle"] = kind(lambda: collective.wait(1 << 40))
        found["small room"] = kind(lambda: collective.allgather(tensor, torch.zeros(4 * ranks - 1)))
        found["op"] = kind(lambda: collective.P2POp("put", tensor, other))
        found["op of a function"] = kind(lambda: collective.P2POp(sum, tensor, other))
        found["op of a number"] = kind(lambda: collective.P2POp(1, tensor, other))
        found["register"] = kind(lambda: context.register_tensor(tensor))
        found["check"] = kind(lambda: context.check_tensor_registered(tensor[1:]))
        found["check another"] = kind(lambda: context.check_tensor_registered(gaps.clone()))
        found["deregister a part"] = str(context.deregister_tensor(tensor[1:]))
        found["deregister"] = str(context.deregister_tensor(tensor))
        found["deregister again"] = str(context.deregister_tensor(tensor))
        found["module's register"] = kind(lambda: collective.register_tensor(tensor))
        found["init again"] = kind(context.init)
    found["after the end"] = kind(lambda: collective.send(tensor, other))
    found["end again"] = kind(collective.finalize_collective)
    return found


def other_hosts(_group: Any) -> None:
    """Ranks with addresses of their own are hosts of their own: memory has to be registered."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (own + 1) % ranks, (own - 1) % ranks
    os.environ["UCCL_P2P_BIND"] = f"127.0.0.{own + 2}"
    try:
        with module() as collective:
            assert not any(collective.get_collective().local_connections)
            sent, room = filled(5000, own, after), torch.zeros(5000)
            for call in (
                lambda: collective.send(sent, after),
                lambda: collective.irecv(room, before),
                lambda: collective.batch_isend_irecv([("send", sent, after)]),
            ):
                assert kind(call) == "RuntimeError"
            collective.register_tensor(sent)
            collective.register_tensor(room)
            handle = collective.irecv(room, before)
            collective.send(sent, after)
            collective.wait(handle)
            assert torch.equal(room, filled(5000, before, own))
            # A part of it is registered as well.
            handle = collective.irecv(room[:10], before)
            collective.send(sent[10:20], after)
            collective.wait(handle)
            assert torch.equal(room[:10], filled(5000, before, own)[10:20])
    finally:
        del os.environ["UCCL_P2P_BIND"]


def forms(_group: Any) -> None:
    """The arguments of the wheel and of the older form."""
    from uccl import collective

    own, context = dist.get_rank(), collective.CollectiveContext
    os.environ["LOCAL_RANK"] = str(own)
    try:
        assert context().local_gpu_idx == own
        assert context(own).local_gpu_idx == own
        assert context(5, 7).local_gpu_idx == 7
        assert context(own, True).use_copy_engine_for_intra is True
        assert context(num_cpus=3, local_gpu_idx=6).local_gpu_idx == 6
        # No machine has so many GPUs: it is the number of CPUs.
        many = context(4000)
        assert (many.local_gpu_idx, many._num_cpus) == (own, 4000)
    finally:
        del os.environ["LOCAL_RANK"]
    with module(2, own) as module_of_it:
        handle = module_of_it.irecv(torch.zeros(3), (own + 1) % dist.get_world_size())
        module_of_it.send(torch.zeros(3), (own - 1) % dist.get_world_size())
        module_of_it.wait(handle)
    made = context(own)
    for _ in range(3):
        made.init()
        room = torch.zeros(dist.get_world_size())
        made.allgather(torch.full((1,), float(own)), room)
        assert room.tolist() == list(range(dist.get_world_size()))
        dist.barrier()
        made.finalize()
        assert made.ep is None and not made.initialized
