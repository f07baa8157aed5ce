"""Low latency dispatch and combine on GPUs: from entry to usable output, and in a CUDA graph.

    python3 -m bench.ep.gpu --ranks 2 --num-tokens 128 --hidden 7168 --num-topk 8 --num-experts 288

Ranks are processes, one for each GPU, or threads of one process that share the only one. All calls
take their turn in every round. Times are of CUDA events on each rank's stream, the slowest rank's:
alone, from a common start, host time included (called); as one of eight calls queued behind each
other (queued); and as one of a graph that repeats it, which is the time of the kernels with the
waits among them (graph). Rows count once for each expert of a token, and GB/s are of all of them,
also of those that stay with their rank. Beside them: a copy of as many bytes on this GPU, or,
between GPUs, NCCL's all_to_all of the same rows, including the rank's own.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.ep.host import arguments
from bench.ep.inputs import Routing, row_bytes, rows_by_choice, shape_of
from bench.ep.meeting import Meeting
from bench.ep.plain import Rows, exchange
from bench.ep.table import Line, Ratio, Rounds, ratios, table
from bench.ep.timing import HOW, QUEUED, times

#: Ways of calling.
HOWS = (*HOW, "graph")
#: Rounds by call.
Measured = dict[str, Rounds]
#: The name of NCCL's exchange, before the form of its rows.
NCCL = "NCCL all_to_all, "
#: Seconds that processes wait for each other.
PATIENCE_S = 60.0


class Thread:
    """A rank in a thread, with the interface of an MPI communicator."""

    def __init__(self, board: list[bytes], barrier: threading.Barrier, rank: int) -> None:
        self._board, self._barrier, self._rank = board, barrier, rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._board)

    def allgather(self, mine: bytes) -> list[bytes]:
        self._board[self._rank] = mine
        self._barrier.wait()
        everyone = list(self._board)
        self._barrier.wait()
        return everyone


class Calls:
    """A rank's calls, by name."""

    #: Repetitions of a call in its graph.
    repeats = 20
    #: Calls that wait on the host, which no graph can repeat.
    waiting: tuple[str, ...] = ()
    buffer: Any
    #: Source and target of the copy beside the calls.
    rows: torch.Tensor
    copied: torch.Tensor

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        """``ends`` are arguments of the buffer: its group of ranks, and the way between them."""
        self.args, self.rank, self.shape = args, rank, shape_of(args)

    def rows_between(self) -> Rows:
        """Rows from each rank to each."""
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """Rows of this rank, and the rows among them for other ranks."""
        rows = self.rows_between()[self.rank]
        return sum(rows), sum(rows) - rows[self.rank]

    def all(self) -> dict[str, Callable[[], Any]]:
        """All calls."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Bytes that a call's rate counts."""
        return self.counts()[0] * row_bytes(name.split(", ")[-1], self.args.hidden)

    def lines(self, measured: Measured) -> list[Line]:
        """The lines of the table."""
        return [Line(name, rounds, self.size(name)) for name, rounds in measured.items()]

    def compared(self, measured: Measured) -> list[Ratio]:
        """Ratios of times, with their bars."""
        return []

    def remarks(self) -> list[str]:
        """Facts about the calls, printed above the table."""
        rows, foreign = self.counts()
        return [f"{rows} rows of a rank, {foreign} of them for other ranks"]


def of_nccl(
    measured: Measured, forms: dict[str, str], bar_of: Callable[[str], str] = lambda _: ""
) -> list[Ratio]:
    """Ratios of calls' times to NCCL's exchange of rows of the same form, where there is one, with
    their bars."""
    return [
        Ratio(f"{name}: time / NCCL's", measured[name], measured[NCCL + form], bar_of(name))
        for name, form in forms.items()
        if NCCL + form in measured
    ]


class FewTokens(Calls):
    """Calls of low latency mode."""

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        from uccl.ep import Buffer

        super().__init__(args, rank)
        tokens, hidden, experts = args.num_tokens, args.hidden, args.num_experts
        size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, args.ranks, experts)
        self.buffer = Buffer(
            num_rdma_bytes=size, low_latency_mode=True, device="cuda", timeout=20, **ends
        )
        routing = Routing(self.shape, rank)
        self.x, self.ids, self.weights = routing.x, routing.ids, routing.weights
        self.rows = torch.randn(tokens * args.num_topk, hidden, device="cuda").bfloat16()
        # The driver loads the kernel of a division now, and not while another kernel waits for a
        # rank of this process.
        self.copied = self.rows / 16
        self.made, self.handle = None, None

    def dispatch(self, **form: Any) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x, self.ids, self.args.num_tokens, self.args.num_experts, **form
        )

    def combine(self, **form: Any) -> Any:
        if self.handle is None:
            made, _, self.handle, _, _ = self.dispatch(use_fp8=False)
            # Below 1, as LogFMT packs them.
            self.made = made / 16
        return self.buffer.low_latency_combine(
            self.made, self.ids, self.weights, self.handle, **form
        )

    def rows_between(self) -> Rows:
        """A row for each expert of a token."""
        return rows_by_choice(self.shape)

    def all(self) -> dict[str, Callable[[], Any]]:
        return {
            "dispatch, fp8": self.dispatch,
            "dispatch, bf16": lambda: self.dispatch(use_fp8=False),
            "dispatch, nvfp4": lambda: self.dispatch(use_nvfp4=True, x_global_scale=100.0),
            "combine": self.combine,
            "combine, logfmt": lambda: self.combine(use_logfmt=True),
            "copy on this GPU, bf16": lambda: self.copied.copy_(self.rows),
        }

    def compared(self, measured: Measured) -> list[Ratio]:
        return of_nccl(
            measured,
            {"dispatch, fp8": "fp8", "dispatch, bf16": "bf16", "combine": "bf16"},
            self.bar_of,
        )

    def bar_of(self, name: str) -> str:
        """The bar of a call."""
        tokens, ranks = self.args.num_tokens, self.args.ranks
        if tokens == 128:
            return f"at most {0.75 if ranks > 4 else 0.65:.2f} in a graph"
        if tokens == 8 and ranks == 2:
            return f"at most {15 if name == 'combine' else 12} us in a graph"
        return ""


def reserve() -> None:
    """Fills torch's cache of memory: the driver gives none while a kernel waits for another rank of
    this process."""
    kept = [torch.empty(1 << 33, dtype=torch.uint8, device="cuda")]
    kept += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(256)]
    del kept


def measure(calls: Calls, meet: Callable[[], Any], hows: Sequence[str] = HOWS) -> Measured:
    """Microseconds of each call, in each of these ways."""
    reserve()
    meet()
    all_calls = calls.all()
    for _ in range(3):
        for call in all_calls.values():
            call()
    torch.cuda.synchronize()
    graphs = captured(calls, all_calls, meet)
    # The capture has released torch's cached memory.
    meet()
    reserve()
    ways = [
        (name, how)
        for name in all_calls
        for how in hows
        if how != "graph" or name not in calls.waiting
    ]
    measured: Measured = {name: {} for name in all_calls}
    for number in range(calls.args.rounds):
        # In a fixed order, the same call would always come before a call and bias it.
        for name, how in random.Random(number).sample(ways, len(ways)):
            call, each = (
                (graphs[name].replay, calls.repeats) if how == "graph" else (all_calls[name], 1)
            )
            taken = times("called" if how == "graph" else how, calls.args.calls, call, meet)
            measured[name].setdefault(how, []).append([value / each for value in taken])
    meet()
    calls.buffer.check()
    return measured


def captured(
    calls: Calls, all_calls: dict[str, Callable[[], Any]], meet: Callable[[], Any]
) -> dict[str, torch.cuda.CUDAGraph]:
    """Graphs of the calls that do not wait on the host. Ranks capture theirs one after the other:
    they may share a process."""
    graphs = {}
    for turn in range(calls.args.ranks):
        meet()
        for name in [
            name for name in all_calls if turn == calls.rank and name not in calls.waiting
        ]:
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
                for _ in range(calls.repeats):
                    all_calls[name]()
    return graphs


def slowest(ranks: list[Measured]) -> Measured:
    """The slowest rank's value of each time."""

    def rounds(name: str, how: str) -> list[list[float]]:
        return [
            [max(taken) for taken in zip(*each)]
            for each in zip(*(rank[name][how] for rank in ranks))
        ]

    return {
        name: {how: rounds(name, how) for how in HOWS if how in ways}
        for name, ways in ranks[0].items()
    }


def report(calls: Calls, ranks: list[Measured], how: str) -> None:
    """Prints the table and the ratios; the facts about rows are the first rank's."""
    args, measured = calls.args, slowest(ranks)
    print(
        f"{torch.cuda.get_device_name()}, {how}; {args.num_tokens} tokens each, hidden {args.hidden}, ",
        end="",
    )
    print(f"top-{args.num_topk}, {args.num_experts} experts")
    print(
        f"{args.rounds} rounds of {args.calls} calls each way; queued: {QUEUED} behind each other; in a graph: {calls.repeats}"
    )
    compared = calls.compared(measured)
    lines = [*calls.remarks(), "", *table(calls.lines(measured), HOWS)]
    print("\n".join([*lines, "", *ratios(compared, HOWS)] if compared else lines), flush=True)


def in_threads(args: argparse.Namespace, kind: Callable[..., Calls]) -> None:
    """All ranks on this GPU."""
    barrier = threading.Barrier(args.ranks, timeout=50)
    board = [b""] * args.ranks

    def run(rank: int) -> tuple[Calls, Measured]:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                calls = kind(args, rank, comm=Thread(board, barrier, rank))
                return calls, measure(calls, barrier.wait)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(args.ranks) as pool:
        done = [work.result() for work in [pool.submit(run, rank) for rank in range(args.ranks)]]
    report(
        done[0][0],
        [measured for _, measured in done],
        f"{args.ranks} ranks that share it, in one process",
    )


def in_process(
    rank: int, args: argparse.Namespace, kind: Callable[..., Calls], folder: str
) -> None:
    """A rank with a GPU of its own."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    meeting = Meeting(Path(folder), rank, args.ranks, PATIENCE_S)
    with torch.cuda.stream(torch.cuda.Stream()):
        calls = kind(args, rank, group=dist.group.WORLD)
        others, rows = calls.all, calls.rows_between()
        exchanges = {
            NCCL + form: exchange(rows, rank, row_bytes(form, args.hidden))
            for form in ("fp8", "bf16")
        }

        def with_nccl() -> dict[str, Callable[[], Any]]:
            return {**others(), **exchanges}

        calls.all = with_nccl  # type: ignore[method-assign]
        measured = measure(calls, meeting.barrier)
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, measured)
    if rank == 0:
        report(calls, everyone, f"{args.ranks} ranks, each with one")
    dist.destroy_process_group()


def run(args: argparse.Namespace, kind: Callable[..., Calls]) -> None:
    """Measures one kind of calls, on as many GPUs as there are."""
    if torch.cuda.device_count() < args.ranks:
        in_threads(args, kind)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, (args, kind, folder), nprocs=args.ranks)


def on_gpus(measured: str) -> argparse.ArgumentParser:
    """The options of a bench that runs on GPUs."""
    parser = arguments(measured)
    parser.add_argument("--calls", type=int, default=3, help="that are timed in a turn, each way")
    return parser


def main() -> None:
    run(on_gpus("low latency dispatch and combine on GPUs").parse_args(), FewTokens)


if __name__ == "__main__":
    main()
