"""A process with a transfer engine of ``mooncake.engine``."""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "python" / "mooncake")]

import numpy as np
from peer import Peer, Side, main

HOST = "127.0.0.1"


class Engine(Peer):
    """A handle of such a process."""


class Words(logging.Handler):
    """Keeps the reasons of failures."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


class EngineSide(Side):
    """An engine, and memory by name."""

    def __init__(self) -> None:
        super().__init__()
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        self.words = Words()
        logging.getLogger("mooncake.engine").addHandler(self.words)

    def initialize(self, *args: str) -> int:
        return self.engine.initialize(*(args or (HOST, "P2PHANDSHAKE", "tcp", "")))

    def session(self) -> str:
        return f"{HOST}:{self.engine.get_rpc_port()}"

    def said(self) -> str:
        words, self.words.words = "\n".join(self.words.words), []
        return words

    def memory(self, name: str, size: int, fill: int = 0) -> int:
        self.arrays[name] = np.full(size, fill, dtype=np.uint8)
        return self.arrays[name].ctypes.data

    def registered(self, name: str, size: int, fill: int = 0) -> int:
        """The address of new memory, registered by itself."""
        address = self.memory(name, size, fill)
        assert self.engine.register_memory(address, size) == 0
        return address

    def fill(self, name: str, fill: int) -> None:
        self.arrays[name][:] = fill

    def put(self, name: str, at: int, content: bytes) -> None:
        self.arrays[name][at : at + len(content)] = np.frombuffer(content, np.uint8)

    def bytes_of(self, name: str) -> bytes:
        return self.arrays[name].tobytes()

    def gpu(self, name: str, device: str, size: int, fill: int = 0) -> int:
        """The address of new memory of a GPU, not registered."""
        import torch

        torch.cuda.set_device(device)
        self.arrays[name] = torch.full((size,), fill, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        return self.arrays[name].data_ptr()

    def gpu_fill(self, name: str, fill: int) -> None:
        import torch

        self.arrays[name].fill_(fill)
        torch.cuda.synchronize()

    def gpu_bytes(self, name: str) -> bytes:
        return self.arrays[name].cpu().numpy().tobytes()

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def has(self, method: str) -> bool:
        return hasattr(self.engine, method)

    def finish(self, batch: int) -> int:
        """Asks for the state until the transfer has ended."""
        while (status := self.engine.transfer_check_status(batch)) == 0:
            time.sleep(0)
        return status

    def from_a_pool(
        self, threads: int, calls: int, session: str, buffer: int, peer: int, length: int
    ) -> list[int]:
        """Writes pieces of its own from each of many threads at once; the answers."""
        start = threading.Barrier(threads)

        def work(at: int) -> list[int]:
            start.wait()
            first = at * length
            return [
                self.engine.transfer_sync_write(session, buffer + first, peer + first, length)
                for _ in range(calls)
            ]

        with ThreadPoolExecutor(threads) as pool:
            return [code for codes in pool.map(work, range(threads)) for code in codes]

    def while_it_waits(self, session: str, buffer: int, peer: int, length: int) -> tuple[int, int]:
        """A write's answer, and how often another thread ran Python code meanwhile."""
        done, turns = threading.Event(), 0
        with ThreadPoolExecutor(1) as pool:
            write = self.engine.transfer_sync_write
            ended = pool.submit(write, session, buffer, peer, length)
            ended.add_done_callback(lambda _: done.set())
            while not done.is_set():
                turns += 1
                time.sleep(0.001)
            return ended.result(), turns


def start(**settings: Any) -> Engine:
    return Engine(script=HERE / "engines.py", **settings)


if __name__ == "__main__":
    main(EngineSide())
