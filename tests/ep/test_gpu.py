"""Low latency mode on a GPU, ranks in threads and in processes, compared with the oracle."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from few_tokens import FewTokens

pytestmark = [
    pytest.mark.xdist_group("gpu"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="lacks a GPU"),
]
#: Seconds that a rank may take.
LIMIT = 50


class Ranks:
    """What ranks in threads meet at, as a communicator of MPI's is."""

    def __init__(self, size: int) -> None:
        self.size, self.board = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT)


class Rank:
    """One of them."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def rank(self) -> int:
        """Which it is."""
        return self._number

    def size(self) -> int:
        """How many there are."""
        return self._ranks.size

    Get_rank, Get_size = rank, size

    def allgather(self, mine: bytes) -> list[bytes]:
        """What all give."""
        self._ranks.board[self._number] = mine
        self._ranks.barrier.wait()
        everyone = list(self._ranks.board)
        self._ranks.barrier.wait()
        return everyone


def reserve() -> None:
    """Has torch take memory for this stream, and load kernels, now: the driver does neither while a kernel waits for another rank."""
    kept = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda")]
    kept += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for dtype in (torch.int32, torch.bfloat16):
        torch.zeros(8, dtype=dtype, device="cuda").fill_(1).copy_(kept[1][:8])
    torch.cuda.current_stream().synchronize()
    del kept


def threads(size: int, function: Callable[[Rank], Any]) -> list[Any]:
    """Runs a function on ranks in threads, each with a stream of its own."""
    ranks = Ranks(size)

    def run(number: int) -> Any:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                reserve()
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


def in_thread(rank: Rank, seed: int) -> None:
    few = FewTokens(rank, seed, comm=rank, device="cuda", timeout=20)
    few.two_at_a_time()
    few.buffer.check()


@pytest.mark.parametrize("seed", range(12))
def test_ranks_in_threads_of_one_gpu_return_what_the_oracle_says(seed: int) -> None:
    threads(1 + seed % 3, lambda rank: in_thread(rank, seed))


def in_process(group: Any, seed: int) -> None:
    few = FewTokens(group, seed, device="cuda", timeout=40)
    few.two_at_a_time()
    torch.cuda.synchronize()
    few.buffer.check()
    torch.distributed.barrier(group)
    few.buffer.destroy()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_in_processes_reach_the_windows_of_each_other(world: Any, seed: int) -> None:
    world.run(2, in_process, 100 + seed)


def alone(rank: Rank) -> str:
    from uccl.ep import Buffer

    buffer = Buffer(None, 0, 1 << 24, low_latency_mode=True, comm=rank, device="cuda", timeout=1)
    x = torch.zeros((4, 256), dtype=torch.bfloat16, device="cuda")
    choices = torch.arange(8, device="cuda").view(4, 2) % 4
    said = ""
    if rank.rank() == 0:
        buffer.low_latency_dispatch(x, choices, 4, 4, use_fp8=False)
        buffer.check()
        torch.cuda.current_stream().synchronize()
        with pytest.raises(TimeoutError) as raised:
            buffer.low_latency_dispatch(x, choices, 4, 4, use_fp8=False)
        said = str(raised.value)
        assert float((x + 1).sum()) == 1024, "the GPU stays usable"
    rank.allgather(b"")
    return said


def test_a_rank_that_does_not_come_is_named_by_the_next_call() -> None:
    started = time.monotonic()
    said = threads(2, alone)[0]
    assert "dispatch on rank 0" in said and "rank 1: data of call 1 round 0 expected" in said, said
    assert time.monotonic() - started < 20
