"""Ranks in processes that end and start anew. They meet through a store that outlives them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

#: The number of ranks that the group has room for, and the sizes of their calls.
RANKS = 3
EXPERTS, TOKENS, HIDDEN, TOP_K = 6, 16, 512, 3
#: Seconds that a command may take.
LIMIT = 50


def serve(rank: int, options: dict[str, Any], port: int, pipe: Any) -> None:
    """The main loop of a rank's process: makes its buffer, runs the functions that arrive, and
    sends their results back."""
    os.environ["UCCL_P2P_TRANSPORT"] = "tcp"
    os.environ["UCCL_EP_NODE"] = str(rank * options["nodes"] // RANKS)
    import torch
    from uccl.ep import Buffer

    torch.set_num_threads(1)
    made = {"enable_shrink": options["masks"], "timeout": options["timeout"]}
    if options["emulated"]:
        import emulated

        emulated.load(Path(options["emulated"]))
    elif options["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if options["device"] == "cuda":
        made |= {"device": "cuda", "allow_nvlink_for_low_latency_mode": not options["via_host"]}
    store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=LIMIT))
    size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS)
    buffer = Buffer(
        None, 0, size, low_latency_mode=True, store=store, rank=rank, num_ranks=RANKS, **made
    )
    while True:
        function, args = pipe.recv()
        try:
            answer = True, function(buffer, *args)
        except Exception as e:
            answer = False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"
        pipe.send(answer)


class Comers:
    """The ranks' processes, some of which may be missing."""

    #: The main loop of a rank's process.
    serve = staticmethod(serve)

    def __init__(
        self,
        nodes: int = 1,
        masks: bool = False,
        timeout: float = 20,
        device: str = "cpu",
        emulated: str = "",
        via_host: bool = False,
    ) -> None:
        """``emulated`` is the folder of an emulated GPU's parts, for the device "cuda"."""
        import torch

        self._options = {
            "nodes": nodes,
            "masks": masks,
            "timeout": timeout,
            "device": device,
            "emulated": emulated,
            "via_host": via_host,
        }
        # A server that has imported torch once, and forks.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch"])
        self.store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._ranks: dict[int, tuple[Any, Any]] = {}
        self._stopped: list[Any] = []

    def start(self, *ranks: int) -> None:
        """Starts processes of ranks, each with a buffer of its own."""
        for rank in ranks:
            ours, theirs = self._context.Pipe()
            args = (rank, self._options, self.store.port, theirs)
            process = self._context.Process(target=self.serve, args=args, daemon=True)
            process.start()
            self._ranks[rank] = process, ours

    def tell(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Has a rank start ``function(buffer, *args)``."""
        self._ranks[rank][1].send((function, args))

    def heard(self, rank: int) -> Any:
        """Returns the result of a rank's function; raises if the function raised."""
        well, answer = self.outcome(rank)
        if not well:
            raise AssertionError(f"rank {rank}: {answer}")
        return answer

    def outcome(self, rank: int) -> tuple[bool, Any]:
        """Returns whether a rank's function returned, and its result or its exception as text."""
        process, pipe = self._ranks[rank]
        if not pipe.poll(LIMIT):
            raise TimeoutError(f"rank {rank} (process {process.pid}) does not answer")
        return pipe.recv()

    def run(self, ranks: list[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of ``function(buffer, *args)`` on these ranks."""
        for rank in ranks:
            self.tell(rank, function, *args)
        return [self.heard(rank) for rank in ranks]

    def connect(self) -> None:
        """Has all ranks connect."""
        self.run(list(range(RANKS)), connected, list(range(RANKS)))

    def lose(self, rank: int) -> None:
        """Waits for a rank's process, which has killed itself."""
        process, pipe = self._ranks.pop(rank)
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        process.close()
        pipe.close()

    def stop(self, rank: int) -> Any:
        """Stops a rank's process; returns it and its pipe."""
        held = self._ranks.pop(rank)
        os.kill(held[0].pid, signal.SIGSTOP)
        self._stopped.append(held[0])
        return held

    def close(self) -> None:
        """Ends the processes."""
        for process in [process for process, _ in self._ranks.values()] + self._stopped:
            process.kill()
            process.join()


def connected(buffer: Any, ranks: list[int]) -> int:
    buffer.connect_ranks(ranks)
    return buffer.generation


def disconnected(buffer: Any, ranks: list[int]) -> int:
    buffer.disconnect_ranks(ranks)
    return buffer.generation


def inputs(buffer: Any, seed: int) -> tuple[Any, Any, Any]:
    """A rank's tokens, choices and weights."""
    import torch

    random = torch.Generator().manual_seed(seed * RANKS + buffer.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    experts = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=random)
    return tuple(tensor.to(buffer.device) for tensor in (x, experts, weights))


def settle(buffer: Any) -> None:
    """Waits for the calls of a buffer on a GPU."""
    import torch

    if buffer.get_comm_stream() is not None:
        torch.cuda.current_stream().synchronize()
        buffer.check()


def calls(buffer: Any, seed: int, count: int = 1) -> list[list[int]]:
    """Dispatches and combines. Returns the bits of all valid rows."""
    import torch

    bits = []
    for nth in range(seed, seed + count):
        x, experts, weights = inputs(buffer, nth)
        (rows, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            x, experts, TOKENS, EXPERTS
        )
        settle(buffer)
        made = torch.zeros(*rows.shape, dtype=torch.bfloat16, device=rows.device)
        for expert, valid in enumerate(counts.tolist()):
            scale = scales[expert, :valid].repeat_interleave(128, dim=1)
            made[expert, :valid] = (rows[expert, :valid].float() * scale).bfloat16()
            bits.append(made[expert, :valid].view(torch.int16).flatten().tolist())
        out, _, _ = buffer.low_latency_combine(made, experts, weights, handle)
        settle(buffer)
        bits.append(out.view(torch.int16).flatten().tolist())
    return bits


def dies(buffer: Any, when: str) -> None:
    """Kills this rank's process in some phase of a call."""
    import torch

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "before":
        end()
    if when == "anywhere":
        threading.Timer(0.02, end).start()
        seed = 0
        while True:
            calls(buffer, seed := seed + 1)
    x, experts, weights = inputs(buffer, 1)
    (recv, _), _, handle, _, hook = buffer.low_latency_dispatch(
        x, experts, TOKENS, EXPERTS, return_recv_hook=True
    )
    settle(buffer)
    if when == "in dispatch":
        end()
    hook()
    settle(buffer)
    if when == "between":
        end()
    shape = EXPERTS // RANKS, RANKS * TOKENS, HIDDEN
    rows = torch.zeros(*shape, dtype=torch.bfloat16, device=recv.device)
    buffer.low_latency_combine(rows, experts, weights, handle, return_recv_hook=True)
    settle(buffer)
    end()


def survives(buffer: Any, count: int) -> list[int]:
    """Makes calls and returns the mask of ranks."""
    import torch

    status = torch.zeros(RANKS, dtype=torch.int32, device=buffer.device)
    calls(buffer, 1, count)
    buffer.query_mask_buffer(status)
    settle(buffer)
    return status.tolist()


def held(buffer: Any) -> dict[str, int]:
    """The least of several counts of the process's resources: a leak shows in all of them, while
    resources that a peer's end frees disappear a moment later."""
    settle(buffer)
    if "emulated" in sys.modules:
        sys.modules["emulated"].KEPT.clear()
    looks = []
    for _ in range(10):
        maps = Path("/proc/self/maps").read_text()
        looks.append(
            {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "windows": sum("memfd:" in line for line in maps.splitlines()),
                "threads": len(os.listdir("/proc/self/task")),
                "pages": int(Path("/proc/self/statm").read_text().split()[1]),
            }
        )
        time.sleep(0.03)
    return {name: min(look[name] for look in looks) for name in looks[0]}
