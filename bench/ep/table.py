"""Tables of the benches of expert parallelism: times of calls, by percentiles, and their ratios."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple, Sequence

from bench.ep.timing import percentile

SHARES = (10, 50, 90, 99)
#: By way of calling: microseconds of the slowest rank, of each round.
Rounds = dict[str, list[list[float]]]


@dataclass
class Line:
    """A row of a table."""

    name: str
    rounds: Rounds
    #: Bytes that its rate counts; 0 for none.
    size: int

    def values(self, how: str) -> list[float]:
        return all_of(self.rounds, how)


class Ratio(NamedTuple):
    """The ratio of two times, and its bar."""

    name: str
    over: Rounds
    under: Rounds
    bar: str = ""


def all_of(rounds: Rounds, how: str) -> list[float]:
    """Every value."""
    return [value for taken in rounds.get(how, []) for value in taken]


def difference(first: Rounds, second: Rounds) -> Rounds:
    """How much longer the first took, by medians of each round."""
    return {
        how: [
            [statistics.median(a) - statistics.median(b)] for a, b in zip(first[how], second[how])
        ]
        for how in first
        if how in second
    }


def table(lines: Sequence[Line], hows: Sequence[str]) -> list[str]:
    """Percentiles, and the rate at the median."""
    shares = "".join(f"{f'p{share}':>9}" for share in SHARES)
    text = [
        f"{'microseconds of the slowest rank':36}" + "".join(f"{how:>45}" for how in hows),
        f"{'':36}" + len(hows) * (shares + f"{'GB/s':>9}"),
    ]
    return text + [f"{line.name:36}" + "".join(_cells(line, how) for how in hows) for line in lines]


def ratios(compared: Sequence[Ratio], hows: Sequence[str]) -> list[str]:
    """Ratios of medians over all rounds, and the range of the ratios of single rounds."""
    head = (
        f"{'ratios of medians, and those of rounds':48}"
        + "".join(f"{how:>24}" for how in hows)
        + "   bar"
    )
    return [head] + [_ratio(each, hows) for each in compared]


def _cells(line: Line, how: str) -> str:
    values = line.values(how)
    if not values:
        return f"{'-':>45}"
    cells = [percentile(values, share) for share in SHARES]
    rate = f"{line.size / cells[1] / 1e3:9.1f}" if line.size else f"{'-':>9}"
    return "".join(f"{cell:9.1f}" for cell in cells) + rate


def _ratio(compared: Ratio, hows: Sequence[str]) -> str:
    line = f"{compared.name:48}"
    for how in hows:
        pairs = list(zip(compared.over.get(how, []), compared.under.get(how, [])))
        if pairs:
            ratio = statistics.median(all_of(compared.over, how)) / statistics.median(
                all_of(compared.under, how)
            )
            of_rounds = [
                statistics.median(first) / statistics.median(second) for first, second in pairs
            ]
            line += f"{f'{ratio:.2f} ({min(of_rounds):.2f} to {max(of_rounds):.2f})':>24}"
        else:
            line += f"{'-':>24}"
    return f"{line}   {compared.bar}".rstrip()
