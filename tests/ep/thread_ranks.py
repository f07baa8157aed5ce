"""Ranks that are threads of one process and share a GPU."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import torch
from peer import names_of_threads

#: Seconds that a rank may take.
LIMIT = 50


class Ranks:
    """A board at which ranks in threads meet, in the manner of an MPI communicator."""

    def __init__(self, size: int) -> None:
        self.size, self.board = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT)


class Rank:
    """One of the ranks."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def rank(self) -> int:
        """The number of this rank."""
        return self._number

    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    Get_rank, Get_size = rank, size

    def allgather(self, mine: bytes) -> list[bytes]:
        """Returns the values of all ranks, by rank."""
        self._ranks.board[self._number] = mine
        self._ranks.barrier.wait()
        everyone = list(self._ranks.board)
        self._ranks.barrier.wait()
        return everyone


def reserve() -> None:
    """Has torch allocate memory for this stream and load kernels: the driver does neither while a
    kernel waits for another rank."""
    from uccl.ep._cuda.routing import metadata_by_token
    from uccl.ep._elastic import aligned_sums
    from uccl.ep._handles import places_by_choice

    kept = [torch.empty(1 << 31, dtype=torch.uint8, device="cuda")]
    kept += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for dtype in (torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16):
        ones = torch.zeros(8, dtype=dtype, device="cuda").fill_(1).copy_(kept[1][:8])
        # Kernels for other strides, and for strides of 0.
        torch.empty((8, 8), dtype=dtype, device="cuda")[:, :5].t().contiguous()
        ones.as_strided((8, 8), (1, 0)).contiguous()
        ones.int()
    ones = torch.ones(9, dtype=torch.int32, device="cuda")
    # torch has other kernels for memory that is not aligned to 16 bytes.
    for part in (ones[:8], ones[1:]):
        aligned_sums(part, 8).add_(aligned_sums(part, 1)).add_(part)
        # Kernels of the tensors that handles make when they are first read.
        for choices in (part.unsqueeze(1).repeat(1, 3), part.long().unsqueeze(1).repeat(1, 3)):
            metadata_by_token(part, part, choices, 4).cpu()
            torch.where(places_by_choice(choices, 2, 2) >= 0, 4 + choices, -1).int().cpu()
    torch.cuda.current_stream().synchronize()
    del kept


def wait_until_freed() -> None:
    """Waits for the thread that frees dropped GPU memory; it ends when all is freed."""
    deadline = time.monotonic() + LIMIT
    while "uccl-gpu-reaper" in names_of_threads():
        assert time.monotonic() < deadline, "memory of GPUs is not freed"
        time.sleep(0.001)


def threads(
    size: int, function: Callable[[Rank], Any], prepare: Callable[[], None] = reserve
) -> list[Any]:
    """Runs a function on ranks in threads, each with a stream of its own; ``prepare`` is called
    first on each stream."""
    ranks = Ranks(size)
    # An exception of an earlier test may hold memory, which is freed now: otherwise the driver
    # would wait for the kernels of the first rank before it frees, and delay those of the next.
    gc.collect()
    wait_until_freed()
    # torch keeps what each stream of the tests before has had. A GPU that is full has it freed in
    # the middle of a call, which waits for the kernels of all ranks.
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

    def run(number: int) -> Any:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                prepare()
                ranks.barrier.wait()
                answer = function(Rank(ranks, number))
                torch.cuda.current_stream().synchronize()
                ranks.barrier.wait()
                return answer
        except BaseException:
            ranks.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [done.result() for done in [pool.submit(run, number) for number in range(size)]]
