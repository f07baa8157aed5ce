"""A rank in a network namespace: dispatches and combines until a call fails, and prints the
error."""

from __future__ import annotations

import sys
import time
from pathlib import Path


class Folder:
    """An MPI communicator that exchanges files in a folder that all ranks see."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self._folder, self._rank, self._size, self._turn = Path(folder), rank, size, 0

    def Get_rank(self) -> int:  # noqa: N802, as MPI calls it
        return self._rank

    def Get_size(self) -> int:  # noqa: N802, as MPI calls it
        return self._size

    def allgather(self, mine: bytes) -> list[bytes]:
        self._turn += 1
        own = self._folder / f"{self._turn}-{self._rank}"
        own.with_suffix(".part").write_bytes(mine)
        own.with_suffix(".part").rename(own)
        deadline = time.monotonic() + 30
        everyone = []
        for rank in range(self._size):
            file = self._folder / f"{self._turn}-{rank}"
            while not file.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} gave nothing in turn {self._turn}")
                time.sleep(0.005)
            everyone.append(file.read_bytes())
        return everyone


def main(folder: str, rank: int, size: int) -> None:
    import torch
    from uccl.ep import Buffer

    torch.set_num_threads(1)
    buffer = Buffer(
        None, 0, 1 << 20, low_latency_mode=True, comm=Folder(folder, rank, size), timeout=3
    )
    x, experts = (
        torch.full((4, 512), 3.0).bfloat16(),
        torch.tensor([[0, 2], [1, 3], [3, 0], [2, 1]]),
    )
    calls = 0
    while True:
        try:
            got, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, 4, 4, use_fp8=False)
            out, _, _ = buffer.low_latency_combine(got, experts, torch.full((4, 2), 0.5), handle)
        except (RuntimeError, TimeoutError) as e:
            print(f"{calls} {e}", flush=True)
            return
        assert torch.equal(out, x), out
        calls += 1
        if calls == 20:
            print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
