"""The values of a run, by peer and case, one a round."""

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass

from bench.lib.cases import Case, Sample
from bench.lib.machine import NOISY


@dataclass
class Value:
    """One peer's value of a case in one round."""

    round: int
    value: float
    noise: float
    detail: dict[str, object]


class Results:
    """Measured values, and failures with their reasons."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Case], list[Value]] = defaultdict(list)
        self.failures: dict[tuple[str, Case], list[str]] = defaultdict(list)

    def add(self, peer: str, round_number: int, sample: Sample, noise: float) -> None:
        self._values[(peer, sample.case)].append(
            Value(round_number, sample.value, noise, sample.detail)
        )

    def values(self, peer: str, case: Case) -> list[Value]:
        """The values that count: those of calm rounds, or all of them when no round was calm."""
        values = self._values.get((peer, case), [])
        return [value for value in values if value.noise <= NOISY] or values

    def disturbed(self) -> tuple[int, int]:
        """How many values do not count because their round was disturbed, and how many there are."""
        every = sum(len(values) for values in self._values.values())
        return every - sum(len(self.values(*key)) for key in self._values), every

    def median(self, peer: str, case: Case) -> float | None:
        values = self.values(peer, case)
        return statistics.median(value.value for value in values) if values else None

    def spread(self, peer: str, case: Case) -> tuple[float, float] | None:
        values = [value.value for value in self.values(peer, case)]
        return (min(values), max(values)) if values else None

    def noisy(self, peer: str, case: Case) -> bool:
        """Whether no round was calm, so that disturbed values had to do."""
        return any(value.noise > NOISY for value in self.values(peer, case))

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(case for _, case in self._values))

    def peers(self) -> list[str]:
        return list(dict.fromkeys(peer for peer, _ in self._values))

    def as_list(self) -> list[dict[str, object]]:
        """One object a peer and case, for JSON."""
        return [
            {
                "peer": peer,
                "case": asdict(case),
                "median": self.median(peer, case),
                "min": self.spread(peer, case)[0],
                "max": self.spread(peer, case)[1],
                "noisy": self.noisy(peer, case),
                "rounds": [asdict(value) for value in values],
            }
            for (peer, case), values in self._values.items()
        ]

    def failures_as_list(self) -> list[dict[str, object]]:
        return [
            {"peer": peer, "case": asdict(case), "reasons": reasons}
            for (peer, case), reasons in self.failures.items()
        ]
