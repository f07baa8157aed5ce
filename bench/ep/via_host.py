"""Calls through host memory, beside the driver's copies of the bytes that cross it, and between
nodes beside the engine's writes of these bytes.

    python3 -m bench.ep.via_host --mode few --num-tokens 128
    python3 -m bench.ep.via_host --mode many --num-tokens 4096 --num-sms 24
    python3 -m bench.ep.via_host --mode few --num-tokens 128 --far --rounds 5

Ranks do not reach each other's GPU memory: the windows are in locked memory of the host.
bench/ep/gpu.py describes the method. The copies move a rank's outgoing bytes from its GPU to locked
memory, and its incoming bytes back to its GPU: one copy behind the other, like the data of one call
(copies), and both at once; all ranks at the same time. Rows that a rank keeps are not among them,
though in low latency mode these pass through its own window; another line has the copies with them.

With --far each rank is on a node of its own (UCCL_EP_NODE), so that proxies carry all data over
TCP. Beside that, `uccl.p2p` alone writes as many bytes over TCP from locked memory to locked
memory, to all peers at once, until they are acknowledged. The kernels, the proxies and PCIe take
the rest of a call's time.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from bench.ep.gpu import Calls, FewTokens, Measured, on_gpus, run
from bench.ep.gpu_normal import ManyTokens
from bench.ep.inputs import row_bytes, rows_between, rows_by_choice
from bench.ep.plain import OWN_TOO, Rows, sent_back, without_own
from bench.ep.table import Line, Ratio, difference

IN_TURN, AT_ONCE, ENGINE = "copies", "copies at once", "engine alone"
BAR = "at least 0.50"
LOCALHOST = "127.0.0.1"


class Move(NamedTuple):
    """Rows of a call, and the bytes of each."""

    rows: Rows
    length: int

    def sent(self, rank: int) -> int:
        return self.length * sum(self.rows[rank])

    def taken(self, rank: int) -> int:
        return self.length * sum(counts[rank] for counts in self.rows)


class Pinned:
    """Buffers for copies from this GPU to locked host memory, and back."""

    def __init__(self, sent: int, taken: int) -> None:
        self._out = torch.ones(sent, dtype=torch.uint8, device="cuda")
        self._in = torch.empty(taken, dtype=torch.uint8, device="cuda")
        self._host_out, self._host_in = locked(sent), locked(taken)
        self._side = torch.cuda.Stream()

    def in_turn(self) -> None:
        self._host_out.copy_(self._out, non_blocking=True)
        self._in.copy_(self._host_in, non_blocking=True)

    def at_once(self) -> None:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._host_out.copy_(self._out, non_blocking=True)
        self._in.copy_(self._host_in, non_blocking=True)
        current.wait_stream(self._side)


class Writer:
    """This rank's endpoint, which writes to those of all other ranks. Its constructor is
    collective."""

    def __init__(self, rank: int, ranks: int, most: int) -> None:
        from uccl import p2p

        self._others = [other for other in range(ranks) if other != rank]
        self._source, target = locked(most * ranks), locked(most * ranks)
        self._kept = target
        self._endpoint = p2p.Endpoint(rank, bind=LOCALHOST, port=0, transport="tcp")
        self._region = self._good(self._endpoint.reg(self._source.data_ptr(), most * ranks))
        region = self._good(self._endpoint.reg(target.data_ptr(), most * ranks))
        # Each peer writes to a part of its own.
        adverts = [
            self._good(self._endpoint.advertise(region, target.data_ptr() + peer * most, most))
            for peer in range(ranks)
        ]
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, (self._endpoint.get_metadata(), adverts))
        self._adverts = [theirs[rank] for _, theirs in everyone]
        self._connections: dict[int, int] = {}
        for other in self._others:
            ip, port, gpu = self._endpoint.parse_metadata(everyone[other][0])
            self._connections[other] = self._good(self._endpoint.connect(ip, gpu, port))

    def write(self, counts: list[int]) -> None:
        """Writes ``counts[rank]`` bytes to each other rank. Returns when all are acknowledged."""
        start = self._source.data_ptr()
        under_way = [
            self._good(
                self._endpoint.write_async(
                    self._connections[other],
                    self._region,
                    start,
                    counts[other],
                    self._adverts[other],
                )
            )
            for other in self._others
            if counts[other]
        ]
        while under_way:
            under_way = [
                transfer
                for transfer in under_way
                if not self._good(self._endpoint.poll_async(transfer))
            ]

    def _good(self, returned: tuple[bool, Any]) -> Any:
        if not returned[0]:
            raise RuntimeError(self._endpoint.last_error())
        return returned[1]


def locked(count: int) -> torch.Tensor:
    """Locked memory of the host, which the GPU reaches."""
    return torch.ones(max(count, 1), dtype=torch.uint8, pin_memory=True)


class ViaHost(Calls):
    """Calls of a mode, beside copies and writes of the same bytes."""

    #: By call: the name of its move.
    moving: dict[str, str]

    def __init__(self, args: argparse.Namespace, rank: int, **ends: Any) -> None:
        if args.far:
            os.environ.update(UCCL_EP_NODE=str(rank), UCCL_P2P_TRANSPORT="tcp")
        super().__init__(args, rank, allow_nvlink_for_low_latency_mode=False, **ends)
        self.moves = self._moves()
        self.writer: Writer | None = None
        if args.far:
            most = max(max(map(max, move.rows)) * move.length for move in self.moves.values())
            self.writer = Writer(rank, args.ranks, most)
            self.waiting = (*self.waiting, *(f"{ENGINE}, {what}" for what in self.moves))

    def returned(self) -> Rows:
        """The rows that a combine sends back."""
        raise NotImplementedError

    def all(self) -> dict[str, Callable[[], Any]]:
        calls = {name: call for name, call in super().all().items() if name in self.moving}
        for what, move in self.moves.items():
            pinned = Pinned(move.sent(self.rank), move.taken(self.rank))
            calls[f"{IN_TURN}, {what}"] = pinned.in_turn
            if what.endswith(OWN_TOO):
                continue
            calls[f"{AT_ONCE}, {what}"] = pinned.at_once
            if self.writer is not None:
                calls[f"{ENGINE}, {what}"] = self._writing(self.writer, move)
        return calls

    def size(self, name: str) -> int:
        what = self.moving.get(name, name.partition(", ")[2])
        return self.moves[what].sent(self.rank) if what in self.moves else super().size(name)

    def remarks(self) -> list[str]:
        def row(what: str, move: Move) -> str:
            sizes = [count / 1e6 for count in (move.sent(self.rank), move.taken(self.rank))]
            return f"{what}: rank {self.rank} sends {sizes[0]:.2f} MB, which GB/s counts, and takes {sizes[1]:.2f} MB"

        return [row(*each) for each in self.moves.items()]

    def lines(self, measured: Measured) -> list[Line]:
        more = [
            Line(
                f"{name}: less the engine's",
                difference(measured[name], measured[f"{ENGINE}, {what}"]),
                0,
            )
            for name, what in self.moving.items()
            if self.writer is not None
        ]
        return super().lines(measured) + more

    def compared(self, measured: Measured) -> list[Ratio]:
        ratios = []
        for name, what in self.moving.items():
            # Both move the same bytes, so a ratio of rates is the inverse ratio of times.
            for copies in (IN_TURN, AT_ONCE):
                bar = BAR if copies == IN_TURN else ""
                ratios.append(
                    Ratio(
                        f"{name}: rate / {copies}",
                        measured[f"{copies}, {what}"],
                        measured[name],
                        bar,
                    )
                )
            own = measured[f"{IN_TURN}, {what}{OWN_TOO}"]
            ratios.append(Ratio(f"{name}: rate / {IN_TURN}{OWN_TOO}", own, measured[name]))
            if self.writer is not None:
                ratios.append(
                    Ratio(f"{name}: time / engine's", measured[name], measured[f"{ENGINE}, {what}"])
                )
        return ratios

    def _moves(self) -> dict[str, Move]:
        """The moves by name; a dispatch sends a token once to each of its ranks."""
        sent, hidden = rows_between(self.shape), self.args.hidden
        moves = {}
        for what, rows, form in (
            ("dispatch fp8", sent, "fp8"),
            ("dispatch bf16", sent, "bf16"),
            ("combine bf16", sent_back(self.returned()), "bf16"),
        ):
            moves[what] = Move(without_own(rows), row_bytes(form, hidden))
            moves[what + OWN_TOO] = Move(rows, row_bytes(form, hidden))
        return moves

    def _writing(self, writer: Writer, move: Move) -> Callable[[], Any]:
        counts = [move.length * count for count in move.rows[self.rank]]
        return lambda: writer.write(counts)


class LowLatencyViaHost(ViaHost, FewTokens):
    """Low latency mode; a combine sends a row for each expert of a token."""

    moving = {
        "dispatch, fp8": "dispatch fp8",
        "dispatch, bf16": "dispatch bf16",
        "combine": "combine bf16",
    }

    def returned(self) -> Rows:
        return rows_by_choice(self.shape)


class NormalViaHost(ViaHost, ManyTokens):
    """Normal mode; a combine sends a row for each rank of a token."""

    moving = {
        "dispatch, worst case, fp8": "dispatch fp8",
        "dispatch, worst case, bf16": "dispatch bf16",
        "dispatch, handle, bf16": "dispatch bf16",
        "combine": "combine bf16",
    }

    def returned(self) -> Rows:
        return rows_between(self.shape)


def main() -> None:
    parser = on_gpus("calls by the host's memory")
    parser.set_defaults(num_experts=256, rounds=12)
    parser.add_argument(
        "--mode", choices=("few", "many"), default="few", help="low latency or normal mode"
    )
    parser.add_argument("--num-sms", type=int, default=24, help="of normal mode")
    parser.add_argument("--far", action="store_true", help="each rank is on a node of its own")
    args = parser.parse_args()
    if args.far and torch.cuda.device_count() < args.ranks:
        parser.error("ranks of several nodes are processes, each with a GPU")
    run(args, LowLatencyViaHost if args.mode == "few" else NormalViaHost)


if __name__ == "__main__":
    main()
