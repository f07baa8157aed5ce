"""Ranks in processes that outlive a test: starting them takes a second or two."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
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


class World:
    """Processes of ranks."""

    def __init__(self, most: int = MOST) -> None:
        # A server that has imported torch once, and forks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, most, self._folder.name, theirs), daemon=True
            )
            process.start()
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
        for _, pipe in self._ranks:
            pipe.send((ranks, nodes, transport, function, args))
        answers = []
        for rank, (process, pipe) in enumerate(self._ranks):
            if rank in lost:
                process.join(LIMIT)
                answers.append((process.exitcode is not None, "it is still there"))
                continue
            if not pipe.poll(LIMIT):
                self.end()
                raise TimeoutError(f"rank {rank} (process {process.pid}) does not answer")
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (well, text) in enumerate(answers) if not well]
        if failed:
            raise AssertionError("\n".join(failed))
        return [
            None if rank in lost else answer for rank, (_, answer) in enumerate(answers[:ranks])
        ]

    def end(self) -> None:
        """Ends the processes."""
        for process, pipe in self._ranks:
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process, _ in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
