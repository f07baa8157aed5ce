"""Ranks in processes that outlive a test: starting them takes a second or two."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable

from middle import STREAMS, in_the_middle

#: The most ranks of most tests.
MOST = 4
#: Seconds that a function may take on all ranks.
LIMIT = 50


def serve(rank: int, most: int, folder: str, pipe: Any) -> None:
    """The main loop of a rank's process: runs the functions that arrive, and sends their results
    back."""
    # A rank that crashes says where.
    faulthandler.enable()
    # The other ranks wait this long for a rank that fails.
    os.environ["UCCL_EP_TIMEOUT_SECS"] = "15"
    # Tests of GPUs name the device: these processes have begun to use GPUs, where there are any.
    os.environ["UCCL_EP_DEVICE"] = "cpu"
    # Each end of a connection over ofi_rxm allocates 5,000 buffers, which remain unused. With the
    # default size of a buffer, 16 ranks had 16 GB of them.
    os.environ.setdefault("FI_OFI_RXM_BUFFER_SIZE", "512")
    # The distribution that only has DeepEP's name, for a machine without it.
    sys.path.append(str(Path(__file__).parents[2] / "python" / "deep_ep"))
    import torch

    torch.set_num_threads(1)
    # Ranks share GPUs only if there are too few.
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=most
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, most + 1)}
    while True:
        task = pipe.recv()
        if task is None:
            break
        size, nodes, transport, function, args = task
        os.environ["UCCL_EP_NODE"] = str(rank * nodes // size)
        # Outside tests, ranks do not change their nodes.
        if "uccl.ep._elastic" in sys.modules:
            sys.modules["uccl.ep._elastic"].KNOWN_NODES.clear()
        way = over(transport)
        # Shows where a rank hangs.
        faulthandler.dump_traceback_later(LIMIT - 5)
        try:
            with way:
                answer = function(groups[size], *args) if rank < size else None
            pipe.send((True, answer))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def over(transport: str) -> contextlib.AbstractContextManager:
    """Sets the transport between nodes; a colon separates libfabric from its provider. "chaos" is
    TCP through a relay."""
    is_chaos = transport == "chaos"
    kind, _, provider = ("tcp" if is_chaos else transport).partition(":")
    os.environ["UCCL_P2P_TRANSPORT"], os.environ["UCCL_LIBFABRIC_PROVIDER"] = kind, provider
    os.environ.pop("UCCL_P2P_TCP_STREAMS", None)
    if is_chaos:
        os.environ["UCCL_P2P_TCP_STREAMS"] = str(STREAMS)
    return in_the_middle(os.getpid()) if is_chaos else contextlib.nullcontext()


class RankEnded(AssertionError):
    """The process of a rank has ended in a test."""


class World:
    """Processes of ranks. Those of a test that has lost one are ended, and the next test has new
    ones."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ranks: list[tuple[Any, Any]] = []
        self._start()

    def _start(self) -> None:
        # A server that has imported torch once, and forks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._most):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self._most, self._folder.name, theirs), daemon=True
            )
            process.start()
            # The pipe ends with the process.
            theirs.close()
            self._ranks.append((process, ours))

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        nodes: int = 1,
        transport: str = "tcp",
        lost: tuple[int, ...] = (),
    ) -> list[Any]:
        """The results of ``function(group, *args)`` on ``ranks`` ranks, which behave as if on
        ``nodes`` nodes, and reach those of other nodes over ``transport`` (see :func:`over`). The
        result of a rank in ``lost``, which ends in the function, is None."""
        if not self._ranks:
            self._start()
        try:
            answers = self._answers((ranks, nodes, transport, function, args), lost)
        except BaseException:
            # A rank that is left would answer the next test with results of this one.
            self._kill()
            raise
        if lost:
            self.end()
        failed = [f"rank {rank}:\n{answers[rank][1]}" for rank in answers if not answers[rank][0]]
        if failed:
            raise AssertionError("\n".join(failed))
        return [None if rank in lost else answers[rank][1] for rank in range(ranks)]

    def _answers(self, task: tuple[Any, ...], lost: tuple[int, ...]) -> dict[int, tuple[bool, Any]]:
        """By rank, whether the function has ended well, and its result or the error."""
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in lost}
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send(task)
            except OSError:
                raise self._ended(rank) from None
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), LIMIT)
            if not ready:
                late = [f"{rank} (process {self._ranks[rank][0].pid})" for rank in waiting.values()]
                raise TimeoutError(f"no answer of rank {', '.join(late)}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
        for rank in lost:
            self._ranks[rank][0].join(LIMIT)
            is_gone = self._ranks[rank][0].exitcode is not None
            answers[rank] = (is_gone, "it is still there")
        return dict(sorted(answers.items()))

    def _ended(self, rank: int) -> RankEnded:
        """The error of a rank whose pipe has ended, with all others that have ended by now."""
        self._ranks[rank][0].join(LIMIT)
        ends = [
            f"rank {at} (process {process.pid}) ended {said_of(process.exitcode)}"
            for at, (process, _) in enumerate(self._ranks)
            if at == rank or process.exitcode is not None
        ]
        return RankEnded("; ".join(ends))

    def _kill(self) -> None:
        """Ends the processes, also where they are in a function."""
        for process, _ in self._ranks:
            process.kill()
        self._forget()

    def end(self) -> None:
        """Ends the processes. A later :meth:`run` starts others."""
        for _, pipe in self._ranks:
            # A process that has ended takes none.
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, _ in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._forget()

    def _forget(self) -> None:
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._ranks.clear()
        self._folder.cleanup()


def said_of(exitcode: int | None) -> str:
    """How a process has ended."""
    if exitcode is None:
        return "its pipe, and runs on"
    if exitcode < 0:
        return f"by {signal.Signals(-exitcode).name}"
    return f"with exit code {exitcode}"
