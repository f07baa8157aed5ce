"""A meeting of processes of one host: they exchange bytes through files, and start together by
spinning on shared memory."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

#: Bytes from one rank's word to the next, so that no two share a cache line.
STRIDE = 64
WORD = struct.Struct("=Q")


class Meeting:
    """A rank's place in the meeting, with the interface of an MPI communicator."""

    def __init__(self, folder: Path, rank: int, ranks: int, limit_s: float) -> None:
        """Ranks share an empty folder, best in memory. A rank gives up after ``limit_s`` seconds of
        waiting."""
        self._folder, self._rank, self._ranks, self._limit_s = folder, rank, ranks, limit_s
        self._exchanged, self._met = 0, 0
        words = os.open(folder / "words", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(words, STRIDE * ranks)
        self._words = mmap.mmap(words, STRIDE * ranks)
        os.close(words)

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._ranks

    def allgather(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in order of rank."""
        self._exchanged += 1
        written = self._folder / f"{self._rank}.part"
        written.write_bytes(mine)
        # A rename is atomic: no rank reads half of the file.
        written.rename(self._name(self._rank))
        return [self._read(self._name(rank)) for rank in range(self._ranks)]

    def barrier(self) -> None:
        """Returns when all ranks are here, within a microsecond or two of each other."""
        self._met += 1
        WORD.pack_into(self._words, STRIDE * self._rank, self._met)
        until = time.monotonic() + self._limit_s
        for rank in range(self._ranks):
            while WORD.unpack_from(self._words, STRIDE * rank)[0] < self._met:
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {rank} is not there after {self._limit_s:.0f} s")

    def _name(self, rank: int) -> Path:
        return self._folder / f"{self._exchanged}.{rank}"

    def _read(self, name: Path) -> bytes:
        until = time.monotonic() + self._limit_s
        while time.monotonic() < until:
            try:
                return name.read_bytes()
            except FileNotFoundError:
                time.sleep(0.001)
        raise TimeoutError(f"a rank is not there after {self._limit_s:.0f} s: no {name.name}")
