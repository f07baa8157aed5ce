"""Tables of bench/ep/beside.py: how long calls took, and how that compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.ep.inputs import Shape, row_bytes
from bench.ep.plain import ONE_WAY, OWN_TOO, moved, without_own
from bench.ep.table import Line, Ratio, Rounds, all_of, ratios, table
from bench.ep.timing import HOW, QUEUED

OURS, THEIRS, NCCL, SYMM, COPY = "uccl-rs", "UCCL-EP", "NCCL", "symm_mem", "copy"
#: The calls of the libraries; `MOVED` are the baselines of the others.
CALLS = ("dispatch fp8", "dispatch bf16", "dispatch bf16, handle", "combine bf16")
HANDLE, PLACE = ", handle", ", in place"
MOVED = ("dispatch fp8", "dispatch bf16", "combine bf16")
#: The calls of each participant, in the order of a table.
WHAT = {
    OURS: (*CALLS, *(what + PLACE for what in CALLS[:3])),
    THEIRS: CALLS,
    NCCL: tuple(what + more for what in MOVED for more in ("", OWN_TOO)),
    SYMM: MOVED,
    COPY: tuple(what + more for what in MOVED for more in ("", ONE_WAY)),
}
#: The bars: parts of UCCL-EP's time, and of the rate of copies between GPUs, by bytes that cross.
OF_THEIRS = {
    "dispatch bf16": "at most 0.55",
    "dispatch fp8": "at most 0.60",
    "combine bf16": "at most 0.55",
}
OF_COPY = "at least 0.85"
#: A participant and its call.
Row = tuple[str, str]


@dataclass
class Measured:
    """Values of one shape and number of SMs."""

    shape: Shape
    sms: int
    #: Facts that participants report about themselves.
    remarks: dict[str, str] = field(default_factory=dict)
    #: By row and way of calling: microseconds of the slowest rank, of each round.
    rounds: dict[Row, Rounds] = field(default_factory=dict)

    def add(self, row: Row, how: str, taken: list[float]) -> None:
        self.rounds.setdefault(row, {each: [] for each in HOW})[how].append(taken)

    def values(self, row: Row, how: str) -> list[float]:
        return all_of(self.rounds.get(row, {}), how)

    def crossing(self, what: str) -> int:
        """Bytes that cross a link: of the rank that sends most, with scales."""
        wanted = plain(what.removesuffix(OWN_TOO).removesuffix(ONE_WAY))
        rows, length = next(
            (rows, length) for name, rows, length in moved(self.shape) if name == wanted
        )
        crossing = without_own(rows)
        return length * (crossing[0][1] if what.endswith(ONE_WAY) else max(map(sum, crossing)))

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {"who": who, "what": what, "us": taken} for (who, what), taken in self.rounds.items()
        ]
        return {**self.shape.as_dict(), "sms": self.sms, "told": self.remarks, "rows": rows}


def plain(what: str) -> str:
    """The baseline's name of a call."""
    return what.removesuffix(PLACE).removesuffix(HANDLE)


def report(measured: Measured) -> str:
    """The table and the ratios of one shape."""
    lines = [
        *_head(measured),
        "",
        *table(_lines(measured), HOW),
        "",
        *ratios(_ratios(measured), HOW),
    ]
    return "\n".join(lines) + "\n"


def _head(measured: Measured) -> list[str]:
    shape, rows = measured.shape, moved(measured.shape)[1][1]
    crossing = without_own(rows)
    most = max(range(shape.ranks), key=lambda rank: sum(crossing[rank]))
    count, own = sum(crossing[most]), rows[most][most]
    sizes = [row_bytes(form, shape.hidden) * count / 1e6 for form in ("bf16", "fp8")]
    return [
        f"{shape.ranks} ranks, {measured.sms} SMs; {shape.tokens} tokens each, hidden {shape.hidden}, "
        f"top-{shape.top_k} of {shape.experts} experts",
        f"Rank {most} sends most: {count} rows to other ranks ({sizes[0]:.1f} MB of bf16, {sizes[1]:.1f} MB of FP8 with "
        f"scales), which GB/s counts, and {own} to itself, which it does not.",
        f"{_count(measured, 'called')} calls alone, and {_count(measured, 'queued')} times {QUEUED} behind each other.",
        *(f"{who}: {what}" for who, what in measured.remarks.items() if what),
    ]


def _count(measured: Measured, how: str) -> int:
    """The largest number of values of a row."""
    return max((len(measured.values(row, how)) for row in measured.rounds), default=0)


def _place(row: Row) -> tuple[int, int]:
    """The position of a row in the table."""
    who, what = row
    return list(WHAT).index(who), WHAT[who].index(what)


def _lines(measured: Measured) -> list[Line]:
    return [
        Line(": ".join(row), measured.rounds[row], measured.crossing(row[1]))
        for row in sorted(measured.rounds, key=_place)
    ]


def _ratios(measured: Measured) -> list[Ratio]:
    whats = [what for who, what in sorted(measured.rounds, key=_place) if who == OURS]
    compared = [
        (
            f"{what}: time / UCCL-EP's",
            (OURS, what),
            (THEIRS, what.removesuffix(PLACE)),
            OF_THEIRS.get(what, ""),
        )
        for what in whats
    ]
    for what in whats:
        alike = plain(what)
        for other in (NCCL, SYMM):
            compared.append((f"{what}: time / {other}'s", (OURS, what), (other, alike), ""))
        # Both move the same bytes, so a ratio of rates is the inverse ratio of times.
        compared.append((f"{what}: rate / copies'", (COPY, alike), (OURS, what), OF_COPY))
    rows = measured.rounds
    return [
        Ratio(name, rows[over], rows[under], bar)
        for name, over, under, bar in compared
        if over in rows and under in rows
    ]
