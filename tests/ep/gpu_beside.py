"""Calls of ranks with a GPU each, beside kernels that wait for other GPUs, and on a part of a
GPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any
from unittest import mock

import torch
from few_tokens import FewTokens
from torch.distributed import distributed_c10d


def beside_collectives(group: Any, rounds: int) -> None:
    """NCCL collectives on another stream. One rank enqueues them before its calls, the next after
    them."""
    # Ranks of the world that do not take part would have to join a call of new_group.
    store = torch.distributed.PrefixStore("beside", distributed_c10d._get_default_store())
    nccl = torch.distributed.ProcessGroupNCCL(store, group.rank(), group.size())
    # Kernels load at first use, and loading waits for the GPU. So the same calls rehearse, one
    # after the other, before any kernel waits for another rank.
    _beside_collectives(group, nccl, rounds, together=False)
    _beside_collectives(group, nccl, rounds, together=True)


def _beside_collectives(group: Any, nccl: Any, rounds: int, together: bool) -> None:
    with mock.patch.dict(os.environ, UCCL_EP_RESERVED_SMS="32"):
        few = FewTokens(group, 600, device="cuda", timeout=60)
    other = torch.cuda.Stream()
    words = torch.ones(64 << 20, dtype=torch.int32, device="cuda")
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX

    def collective() -> None:
        with torch.cuda.stream(other):
            for _ in range(4):
                nccl.allreduce([words], options).wait()

    for number in range(rounds):
        torch.cuda.synchronize()
        torch.distributed.barrier(group)
        is_first = (number + group.rank()) % 2 == 0
        if is_first or not together:
            collective()
        if not together:
            torch.cuda.synchronize()
        few.two_at_a_time()
        if together and not is_first:
            collective()
        torch.cuda.synchronize()
        few.buffer.check()
        assert bool((words == 1).all())
    torch.distributed.barrier(group)
    few.buffer.destroy()


def in_different_order(group: Any, rounds: int) -> None:
    """Calls of two buffers, which fit on a GPU together, begin in another order on each rank."""
    half = torch.cuda.get_device_properties("cuda").multi_processor_count // 2
    with mock.patch.dict(os.environ, UCCL_EP_RESERVED_SMS=str(half)):
        pair = [FewTokens(group, 610 + number, device="cuda", timeout=60) for number in range(2)]
    streams = [torch.cuda.Stream() for _ in pair]
    for _ in range(rounds):
        calls = [few.call() for few in pair]
        returned: dict[int, Any] = {}
        torch.distributed.barrier(group)
        for number in (0, 1) if group.rank() % 2 == 0 else (1, 0):
            with torch.cuda.stream(streams[number]):
                returned[number] = pair[number].dispatch(calls[number], False)
        torch.cuda.synchronize()
        for few, call, got in zip(pair, calls, (returned[0], returned[1])):
            received = few.check_dispatch(call, got)
            combined, _, _ = few.combine(call, got[2], received)
            assert torch.equal(few.here(combined), few.wanted(call))
            few.buffer.check()
    torch.distributed.barrier(group)
    for few in pair:
        few.buffer.destroy()


def half_of_a_gpu() -> torch.cuda.Stream:
    """A stream of a green context that has half of the current GPU's multiprocessors."""
    driver, room = ctypes.CDLL("libcuda.so.1"), 1024

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    device = torch.cuda.current_device()
    every, part, rest = (ctypes.create_string_buffer(room) for _ in range(3))
    count, half = (
        ctypes.c_uint(1),
        torch.cuda.get_device_properties(device).multi_processor_count // 2,
    )
    description, green, stream = (ctypes.c_void_p() for _ in range(3))
    # 1: multiprocessors; 1: a stream that waits for no other.
    call("cuDeviceGetDevResource", device, every, 1)
    call("cuDevSmResourceSplitByCount", part, ctypes.byref(count), every, rest, 0, half)
    call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
    call("cuGreenCtxCreate", ctypes.byref(green), description, device, 1)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), green, 1, 0)
    return torch.cuda.ExternalStream(stream.value)


def on_half_of_a_gpu(group: Any, rounds: int) -> None:
    """Calls with more tokens than multiprocessors, on a stream that has half of these."""
    from cases import Sizes
    from oracle.routing import Shape

    sizes = Sizes(Shape(group.size(), 8 * group.size()), hidden=512, top_k=4, most=128)
    few = FewTokens(group, 620, sizes, device="cuda", timeout=60)
    with torch.cuda.stream(half_of_a_gpu()):
        for _ in range(rounds):
            few.two_at_a_time()
        torch.cuda.current_stream().synchronize()
        few.buffer.check()
    torch.distributed.barrier(group)
    few.buffer.destroy()
