"""Runs a suite of DeepEP's whose ranks are threads of this process, on the CPU or on the emulated GPU of ``tests/ep``.

    python in_threads.py cpu|emulated SCRIPT ARGUMENTS...

The suite is as it is. What it asks torch for is answered here: tensors of GPUs are the CPU's, processes are threads, and a process group of NCCL is a
board that threads meet at. Nothing is timed.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any, Callable

#: Seconds that ranks wait for each other at the board. The limit of `run.py` is below it.
LIMIT = 1800

ON = sys.argv[1]
# Suites say nothing of the device, and torch finds none.
os.environ["UCCL_EP_DEVICE"] = "cpu"

import torch
from torch.overrides import TorchFunctionMode

RANK = threading.local()


class WithoutGpus(TorchFunctionMode):
    """Makes tensors that are asked for on a GPU on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.randn and kwargs.get("dtype") == torch.bfloat16:
            # As a GPU draws. On the CPU one of 256 numbers would be 0, which LogFMT has few digits beside.
            return function(*args, **{**kwargs, "dtype": torch.float32}).bfloat16()
        return function(*args, **kwargs)


class Group:
    """What ranks in threads meet at."""

    def __init__(self, ranks: int) -> None:
        self._board: list[Any] = [None] * ranks
        self.at_once = threading.Barrier(ranks, timeout=LIMIT)

    def rank(self) -> int:
        """This thread's."""
        return int(RANK.number)

    def size(self) -> int:
        """How many there are."""
        return len(self._board)

    def allgather(self, mine: Any) -> list[Any]:
        """What all ranks give."""
        self._board[self.rank()] = mine
        self.at_once.wait()
        everyone = list(self._board)
        self.at_once.wait()
        return everyone

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.allgather(None)


class World:
    """What stands for ``torch.distributed``: one group of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._group = Group(ranks)
        self.at_once = self._group.at_once

    def init_process_group(self, *_: Any, **__: Any) -> None:
        """There is nothing to do."""

    destroy_process_group = init_process_group

    def new_group(self, *_: Any, **__: Any) -> Group:
        """All ranks."""
        return self._group

    def get_rank(self, group: Any = None) -> int:
        """This thread's."""
        return self._group.rank()

    def get_world_size(self, group: Any = None) -> int:
        """How many ranks there are."""
        return self._group.size()

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits for all ranks."""
        self._group.barrier()

    def all_gather_object(self, everyone: list[Any], mine: Any, group: Any = None) -> None:
        """What all ranks give."""
        everyone[:] = self._group.allgather(mine)

    def all_gather(self, everyone: list[Any], mine: torch.Tensor, group: Any = None) -> None:
        """The tensors of all ranks."""
        for to, given in zip(everyone, self._group.allgather(mine.clone())):
            to.copy_(given)

    def all_gather_into_tensor(self, everyone: torch.Tensor, mine: torch.Tensor, group: Any = None) -> None:
        """The tensors of all ranks, one behind the other."""
        everyone.copy_(torch.stack(self._group.allgather(mine.clone())).view(everyone.shape))

    def all_reduce(self, mine: torch.Tensor, group: Any = None) -> None:
        """The sum of the tensors of all ranks."""
        mine.copy_(torch.stack(self._group.allgather(mine.clone())).sum(0))

    def all_to_all_single(self, to: torch.Tensor, mine: torch.Tensor, _: Any = None, parts: Any = None, group: Any = None) -> None:
        """What each rank has for this one, one behind the other."""
        given = mine.clone().view(torch.uint8) if mine.element_size() == 1 else mine.clone()
        everyone = self._group.allgather(given.split(parts or [1] * self.get_world_size()))
        arrived = torch.cat([parts[self.get_rank()] for parts in everyone])
        to.copy_(arrived.view(to.dtype) if mine.element_size() == 1 else arrived)


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int, **_: Any) -> None:
    """Calls a function on threads instead of processes."""
    world = World(nprocs)
    for name in dir(World):
        if not name.startswith("_") and name != "at_once":
            setattr(torch.distributed, name, getattr(world, name))

    def call(number: int) -> None:
        RANK.number = number
        try:
            with WithoutGpus():
                function(number, *args)
        except BaseException:
            traceback.print_exc()
            world.at_once.abort()
            raise

    with ThreadPoolExecutor(nprocs) as pool:
        for done in [pool.submit(call, number) for number in range(nprocs)]:
            done.result()


def once(function: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, float, float]:
    """Calls what was to be timed."""
    function()
    return 1.0, 1.0, 1.0


def never(_: Any, kernel_names: Any, *__: Any, num_kernels_per_period: int = 1, **___: Any) -> Any:
    """Calls nothing: on a CPU the work that is to be overlapped would take minutes."""
    one: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else tuple(one for _ in kernel_names)


def twice(function: Callable[[], Any], *_: Any, **__: Any) -> float:
    """Calls barriers: the loop that is timed has a thousand of them."""
    for _ in range(2):
        function()
    return 1.0


def settled(method: Callable[..., Any], settle: Callable[[], None]) -> Callable[..., Any]:
    """A call whose work has ended when it returns, as that of its hook has: torch reads tensors of the CPU at once."""

    def call(*args: Any, **keywords: Any) -> Any:
        answer = method(*args, **keywords)
        settle()
        if isinstance(answer, tuple):
            return tuple(settled(part, settle) if isinstance(part, FunctionType) or hasattr(part, "__func__") else part for part in answer)
        return answer

    return call


def emulate(folder: str) -> Callable[[], None]:
    """Has buffers take the CPU for the emulated GPU; returns what waits for this thread's stream."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ep"))
    import emulated

    emulated.load(Path(folder))
    import deep_ep

    def settle() -> None:
        emulated.current_stream().synchronize()

    for kind in (deep_ep.Buffer, deep_ep.ElasticBuffer):
        for name in ("get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "low_latency_query_mask_buffer"):
            if hasattr(kind, name):
                setattr(kind, name, settled(getattr(kind, name), settle))
    return settle


def main() -> None:
    """Runs the suite."""
    torch.set_num_threads(1)
    del sys.argv[:2]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    with tempfile.TemporaryDirectory() as folder:
        settle = emulate(folder) if ON == "emulated" else lambda: None
        from deep_ep.utils import testing

        testing.bench, testing.bench_kineto = once, never
        torch.multiprocessing.spawn = spawn
        torch.cuda.set_device, torch.cuda.synchronize = lambda _: None, settle
        torch.set_default_device = lambda _: None
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
