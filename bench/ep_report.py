"""Tables of bench/ep_beside.py: how long calls took, and how that compares."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from ep_inputs import Shape, row_bytes
from ep_plain import ONE_WAY, OWN_TOO, moved, without_own
from ep_timing import HOW, QUEUED, percentile

OURS, THEIRS, NCCL, COPY = "uccl-rs", "UCCL-EP", "NCCL", "copy"
SHARES = (10, 50, 90, 99)
#: What libraries are asked, and what of that others do.
CALLS = ("dispatch fp8", "dispatch bf16", "dispatch bf16, handle", "combine bf16")
MOVED = ("dispatch fp8", "dispatch bf16", "combine bf16")
#: What each does, in the order of a table.
WHAT = {
    OURS: CALLS,
    THEIRS: CALLS,
    NCCL: tuple(what + more for what in MOVED for more in ("", OWN_TOO)),
    COPY: tuple(what + more for what in MOVED for more in ("", ONE_WAY)),
}
#: The bars: parts of UCCL-EP's time, and of the rate of copies between GPUs, by bytes that cross.
OF_THEIRS = {"dispatch bf16": "at most 0.55", "dispatch fp8": "at most 0.60", "combine bf16": "at most 0.55"}
OF_COPY = "at least 0.85"
#: Who, and what.
Row = tuple[str, str]


@dataclass
class Measured:
    """Of one shape and number of SMs."""

    shape: Shape
    sms: int
    #: What those that are compared tell of themselves.
    told: dict[str, str] = field(default_factory=dict)
    #: By row and how calls are made: microseconds of the slowest rank, of each round.
    rounds: dict[Row, dict[str, list[list[float]]]] = field(default_factory=dict)

    def add(self, row: Row, how: str, taken: list[float]) -> None:
        self.rounds.setdefault(row, {each: [] for each in HOW})[how].append(taken)

    def values(self, row: Row, how: str) -> list[float]:
        return [value for taken in self.rounds.get(row, {}).get(how, []) for value in taken]

    def crossing(self, what: str) -> int:
        """Bytes that cross a link: of the rank that sends most, with scales."""
        wanted = what.removesuffix(OWN_TOO).removesuffix(ONE_WAY).removesuffix(", handle")
        rows, length = next((rows, length) for name, rows, length in moved(self.shape) if name == wanted)
        crossing = without_own(rows)
        return length * (crossing[0][1] if what.endswith(ONE_WAY) else max(map(sum, crossing)))

    def as_dict(self) -> dict[str, Any]:
        rows = [{"who": who, "what": what, "us": taken} for (who, what), taken in self.rounds.items()]
        return {**self.shape.as_dict(), "sms": self.sms, "told": self.told, "rows": rows}


def report(measured: Measured) -> str:
    """All of one shape, and what it comes to."""
    lines = [*_head(measured), "", *_table(measured), "", *_ratios(measured)]
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
        *(f"{who}: {what}" for who, what in measured.told.items() if what),
    ]


def _count(measured: Measured, how: str) -> int:
    """The most that any row has."""
    return max((len(measured.values(row, how)) for row in measured.rounds), default=0)


def _place(row: Row) -> tuple[int, int]:
    """Of a row in a table."""
    who, what = row
    return list(WHAT).index(who), WHAT[who].index(what)


def _table(measured: Measured) -> list[str]:
    shares = "".join(f"{f'p{share}':>9}" for share in SHARES)
    lines = [
        f"{'microseconds of the slowest rank':36}" + "".join(f"{how:>45}" for how in HOW),
        f"{'':36}" + len(HOW) * (shares + f"{'GB/s':>9}"),
    ]
    for row in sorted(measured.rounds, key=_place):
        line = f"{': '.join(row):36}"
        for how in HOW:
            values = measured.values(row, how)
            if values:
                cells = [percentile(values, share) for share in SHARES]
                line += "".join(f"{cell:9.1f}" for cell in cells)
                line += f"{measured.crossing(row[1]) / cells[1] / 1e3:9.1f}"
            else:
                line += f"{'-':>45}"
        lines.append(line)
    return lines


def _ratios(measured: Measured) -> list[str]:
    lines = [f"{'ratios of medians, and those of rounds':48}" + "".join(f"{how:>24}" for how in HOW) + "   bar"]
    whats = [what for who, what in sorted(measured.rounds, key=_place) if who == OURS]
    compared = [(f"{what}: time / UCCL-EP's", (OURS, what), (THEIRS, what), OF_THEIRS.get(what, "")) for what in whats]
    for what in whats:
        plain = what.removesuffix(", handle")
        compared.append((f"{what}: time / NCCL's", (OURS, what), (NCCL, plain), ""))
        # As many bytes, so rates are as times are.
        compared.append((f"{what}: rate / copies'", (COPY, plain), (OURS, what), OF_COPY))
    rows = measured.rounds
    return lines + [_ratio(measured, *each) for each in compared if each[1] in rows and each[2] in rows]


def _ratio(measured: Measured, name: str, over: Row, under: Row, bar: str) -> str:
    line = f"{name:48}"
    for how in HOW:
        pairs = list(zip(*(measured.rounds.get(row, {}).get(how, []) for row in (over, under))))
        if pairs:
            ratio = statistics.median(measured.values(over, how)) / statistics.median(measured.values(under, how))
            of_rounds = [statistics.median(first) / statistics.median(second) for first, second in pairs]
            line += f"{f'{ratio:.2f} ({min(of_rounds):.2f} to {max(of_rounds):.2f})':>24}"
        else:
            line += f"{'-':>24}"
    return f"{line}   {bar}".rstrip()
