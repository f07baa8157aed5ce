"""Runs one of DeepEP's suites with threads of this process as ranks, on the CPU or on the emulated
GPU of ``tests/ep``.

    python in_threads.py cpu|emulated SCRIPT ARGUMENTS...

The suite is unchanged. This module replaces torch's GPU calls: tensors of GPUs are tensors of the
CPU, processes are threads, and a process group of NCCL is a board at which threads meet. Nothing is
timed.
"""

from __future__ import annotations

import importlib
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

#: Seconds that ranks wait for each other at the board. The limit of `run.py` is shorter.
LIMIT = 1800

ON = sys.argv[1]
# Suites say nothing of the device, and torch finds none.
os.environ["UCCL_EP_DEVICE"] = "cpu"

import torch
from torch.overrides import TorchFunctionMode

RANK = threading.local()


class WithoutGpus(TorchFunctionMode):
    """Makes tensors on the CPU when a suite asks for a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.randn and kwargs.get("dtype") == torch.bfloat16:
            # Draws in f32, as a GPU does. On the CPU one of 256 numbers would be 0, and LogFMT has
            # few digits for the other values of its block.
            return function(*args, **{**kwargs, "dtype": torch.float32}).bfloat16()
        return function(*args, **kwargs)


class Group:
    """A board at which ranks in threads meet."""

    def __init__(self, ranks: int) -> None:
        self._board: list[Any] = [None] * ranks
        self.at_once = threading.Barrier(ranks, timeout=LIMIT)

    def rank(self) -> int:
        """The rank of this thread."""
        return int(RANK.number)

    def size(self) -> int:
        """The number of ranks."""
        return len(self._board)

    def allgather(self, mine: Any) -> list[Any]:
        """Returns the values of all ranks, by rank."""
        self._board[self.rank()] = mine
        self.at_once.wait()
        everyone = list(self._board)
        self.at_once.wait()
        return everyone

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.allgather(None)


class World:
    """Replaces ``torch.distributed``: one group of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._group = Group(ranks)
        self.at_once = self._group.at_once

    def init_process_group(self, *_: Any, **__: Any) -> None:
        """Does nothing: the threads have a board."""

    destroy_process_group = init_process_group

    def new_group(self, *_: Any, **__: Any) -> Group:
        """Returns the group of all ranks."""
        return self._group

    def get_rank(self, group: Any = None) -> int:
        """The rank of this thread."""
        return self._group.rank()

    def get_world_size(self, group: Any = None) -> int:
        """The number of ranks."""
        return self._group.size()

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits for all ranks."""
        self._group.barrier()

    def all_gather_object(self, everyone: list[Any], mine: Any, group: Any = None) -> None:
        """Stores the values of all ranks in ``everyone``."""
        everyone[:] = self._group.allgather(mine)

    def all_gather(self, everyone: list[Any], mine: torch.Tensor, group: Any = None) -> None:
        """Copies the tensors of all ranks to ``everyone``."""
        for to, given in zip(everyone, self._group.allgather(mine.clone())):
            to.copy_(given)

    def all_gather_into_tensor(
        self, everyone: torch.Tensor, mine: torch.Tensor, group: Any = None
    ) -> None:
        """Copies the tensors of all ranks to ``everyone``, one behind the other."""
        everyone.copy_(torch.stack(self._group.allgather(mine.clone())).view(everyone.shape))

    def all_reduce(self, mine: torch.Tensor, group: Any = None) -> None:
        """Replaces ``mine`` by the sum of the tensors of all ranks."""
        mine.copy_(torch.stack(self._group.allgather(mine.clone())).sum(0))

    def all_to_all_single(
        self,
        to: torch.Tensor,
        mine: torch.Tensor,
        _: Any = None,
        parts: Any = None,
        group: Any = None,
    ) -> None:
        """Copies the parts that all ranks have for this rank to ``to``, one behind the other."""
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
    """Calls the function once and reports 1 s: nothing is timed."""
    function()
    return 1.0, 1.0, 1.0


def never(_: Any, kernel_names: Any, *__: Any, num_kernels_per_period: int = 1, **___: Any) -> Any:
    """Calls nothing and reports 1 s: on a CPU the overlapped work would take minutes."""
    one: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else tuple(one for _ in kernel_names)


def twice(function: Callable[[], Any], *_: Any, **__: Any) -> float:
    """Calls the function twice and reports 1 s: the timed loop has a thousand barriers."""
    function()
    function()
    return 1.0


def settled(method: Callable[..., Any], settle: Callable[[], None]) -> Callable[..., Any]:
    """Wraps a method and its returned hooks so that their work has ended on return: torch reads
    tensors of the CPU at once."""

    def call(*args: Any, **keywords: Any) -> Any:
        answer = method(*args, **keywords)
        for part in answer if isinstance(answer, tuple) else ():
            # The work of an asynchronous call is on another stream.
            event = getattr(part, "event", None)
            if event is not None:
                event.current_stream_wait()
        settle()
        if isinstance(answer, tuple):
            return tuple(
                settled(part, settle)
                if isinstance(part, FunctionType) or hasattr(part, "__func__")
                else part
                for part in answer
            )
        return answer

    return call


def emulate(folder: str) -> Callable[[], None]:
    """Has buffers take the CPU for the emulated GPU. Returns a function that waits for this
    thread's stream."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ep"))
    import emulated

    emulated.load(Path(folder))
    import deep_ep

    def settle() -> None:
        emulated.current_stream().synchronize()

    for kind in (deep_ep.Buffer, deep_ep.ElasticBuffer):
        for name in (
            "get_dispatch_layout",
            "dispatch",
            "combine",
            "low_latency_dispatch",
            "low_latency_combine",
            "low_latency_query_mask_buffer",
        ):
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
        testing: Any = importlib.import_module("deep_ep.utils.testing")

        testing.bench, testing.bench_kineto = once, never
        torch.multiprocessing.spawn = spawn
        torch.cuda.set_device, torch.cuda.synchronize = lambda _: None, settle
        torch.set_default_device = lambda _: None
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
