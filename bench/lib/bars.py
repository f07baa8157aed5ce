"""The bars of this project in one table: ratios of medians, measured side by side in one run."""

import random
import statistics
from dataclasses import dataclass, replace

from bench.lib.cases import DEFAULT, KIB, MIB, Case, human, mapped_sizes, plain_sizes, tcp_sizes
from bench.lib.results import Results

OURS = "uccl"
#: Peers that measure the machine itself: the referee, and this project's command; the better
#: counts.
RAW = ("raw", "limits")
_BOTH = (DEFAULT, "cubic")
#: With fewer rounds than this, an interval has no meaning.
_FEWEST = 8

Ref = tuple[str, Case]


@dataclass(frozen=True)
class Bar:
    """A bar: the best of `ours` against the best of `theirs` (or against `theirs` summed up, or a constant).

    Exactly one of `at_least` and `at_most` is set. The ratio is ours / theirs: for throughput
    `at_least` bounds it, for time `at_most`. With `minus` it is the difference.
    """

    section: str
    what: str
    ours: tuple[Ref, ...]
    theirs: tuple[Ref, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    #: Add the medians of `theirs` up instead of taking the best.
    summed: bool = False
    #: Take ours minus theirs, in their unit, and not the ratio.
    minus: bool = False

    def compare(self, ours: float, theirs: float) -> float:
        """The ratio, or with `minus` the difference, that `limit` bounds."""
        return ours - theirs if self.minus else ours / theirs

    def limit(self) -> str:
        """The bar in words."""
        sign, number = (">=", self.at_least) if self.at_least is not None else ("<=", self.at_most)
        if self.minus:
            return f"{sign} {number:g} {self.ours[0][1].unit} more"
        return f"{sign} {number:g}x" if self.theirs else f"{sign} {number:g} {self.ours[0][1].unit}"


@dataclass(frozen=True)
class Verdict:
    """How a bar was met: "ok", "NOT", "unclear" (see `surely`), or "absent" when one side was not measured."""

    bar: Bar
    state: str
    ours: float | None
    theirs: float | None
    measured: float | None
    #: The smallest and largest ratio of a single round, when both sides were measured in the same rounds; of `surely`
    #: the interval of the ratio of medians.
    spread: tuple[float, float] | None
    reason: str = ""
    #: Whether either side was measured on a disturbed machine alone: the verdict is then only a hint.
    noisy: bool = False


def judge(bar: Bar, results: Results) -> Verdict:
    """Compares one bar with the medians of the run."""
    ours = _best(bar.ours, results)
    theirs = (_sum if bar.summed else _best)(bar.theirs, results) if bar.theirs else None
    sides = ((bar.ours, ours), (bar.theirs, theirs))
    missing = [refs[0][0] for refs, value in sides if refs and value is None]
    if missing:
        return Verdict(
            bar,
            "absent",
            ours,
            theirs,
            None,
            None,
            "not measured: " + ", ".join(dict.fromkeys(missing)),
        )
    measured = bar.compare(ours, theirs) if bar.theirs else ours
    met = measured >= bar.at_least if bar.at_least is not None else measured <= bar.at_most
    noisy = any(results.noisy(*ref) for ref in (*bar.ours, *bar.theirs))
    return Verdict(
        bar, "ok" if met else "NOT", ours, theirs, measured, _spread(bar, results), noisy=noisy
    )


def surely(verdict: Verdict, results: Results) -> Verdict:
    """A verdict on two peers, "unclear" where there are too few rounds: the bar is within the
    interval that contains the true ratio of medians 19 times out of 20."""
    if verdict.measured is None:
        return verdict
    bar = verdict.bar
    ours, theirs = (
        [value.value for value in results.values(*refs[0])] for refs in (bar.ours, bar.theirs)
    )
    low, high = _interval(ours, theirs)
    limit = bar.at_least if bar.at_least is not None else bar.at_most
    is_clear = min(len(ours), len(theirs)) >= _FEWEST and not low < limit < high
    return replace(verdict, spread=(low, high), state=verdict.state if is_clear else "unclear")


def _interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The interval of the ratio of medians, by drawing rounds again and again (bootstrap)."""
    drawn = random.Random(1)

    def median(values: list[float]) -> float:
        return statistics.median(drawn.choices(values, k=len(values)))

    ratios = sorted(median(ours) / median(theirs) for _ in range(1000))
    return ratios[24], ratios[974]


def _best(refs: tuple[Ref, ...], results: Results) -> float | None:
    medians = [median for ref in refs if (median := results.median(*ref)) is not None]
    if not medians:
        return None
    return max(medians) if refs[0][1].unit == "GB/s" else min(medians)


def _sum(refs: tuple[Ref, ...], results: Results) -> float | None:
    medians = [results.median(*ref) for ref in refs]
    return None if None in medians else sum(medians)


def _spread(bar: Bar, results: Results) -> tuple[float, float] | None:
    if len(bar.ours) != 1 or len(bar.theirs) != 1:
        return None
    ours, theirs = (
        {v.round: v.value for v in results.values(*refs[0])} for refs in (bar.ours, bar.theirs)
    )
    both = [number for number in ours.keys() & theirs.keys() if theirs[number] > 0]
    ratios = [bar.compare(ours[number], theirs[number]) for number in both]
    return (min(ratios), max(ratios)) if ratios else None


def table(quick: bool) -> list[Bar]:
    """Every bar, in the order it is printed."""
    return [*_tcp(quick), *_local(quick), *_small(), *_vector()]


def _either(peer: str, link: str, op: str, size: int, unit: str = "GB/s") -> tuple[Ref, ...]:
    """A TCP case under both congestion controls, of which the better counts."""
    return tuple(
        (peer, Case(link, op, size, congestion=congestion, unit=unit)) for congestion in _BOTH
    )


def _raw(case: Case) -> tuple[Ref, ...]:
    return tuple((peer, case) for peer in RAW)


def _tcp(quick: bool) -> list[Bar]:
    bars = []
    for op in ("write", "read"):
        for size in tcp_sizes(quick):
            name = f"TCP {op} {human(size)}"
            ours = _either(OURS, "tcp", op, size)
            streams = (ref for peer in RAW for ref in _either(peer, "raw", "tcp_stream", MIB))
            raw = (*streams, *_either("iperf3", "tcp", "write", size))
            bars.append(Bar("tcp", f"{name} / best raw single stream", ours, raw, at_least=0.85))
            for congestion in _BOTH:
                at_least = 5.0 if op == "read" else 1.0 if congestion == "cubic" else 1.5
                case = Case("tcp", op, size, congestion=congestion)
                words = "each on its default" if congestion == DEFAULT else f"both on {congestion}"
                bars.append(
                    Bar(
                        "tcp",
                        f"{name} / UCX, {words}",
                        ((OURS, case),),
                        (("ucx", case),),
                        at_least=at_least,
                    )
                )
            bars.append(
                Bar(
                    "tcp",
                    f"{name} / best of Mooncake",
                    ours,
                    _either("mooncake", "tcp", op, size),
                    at_least=4.0,
                )
            )
    return bars


def _local(quick: bool) -> list[Bar]:
    bars = []
    for op in ("write", "read"):
        for size in plain_sizes(quick):
            case = Case("local", op, size)
            ours, name = ((OURS, case),), f"same host {op} {human(size)}"
            large = size >= 64 * MIB
            bars.append(
                Bar(
                    "local",
                    f"{name} / UCX posix,cma",
                    ours,
                    (("ucx", case),),
                    at_least=1.5 if large else 1.0,
                )
            )
            if not large:
                raw = _raw(Case("raw", f"vm_{op}", size))
                bars.append(Bar("local", f"{name} / process_vm_{op}v", ours, raw, at_least=0.9))
        for size in mapped_sizes(quick):
            case = Case("local", op, size, memory="alloc")
            ours, name = ((OURS, case),), f"same host {op} {human(size)}, memory from alloc"
            bars.append(Bar("local", f"{name} / UCX mapped", ours, (("ucx", case),), at_least=0.9))
            if size == 64 * MIB:
                copy = _raw(Case("raw", "memcpy", size))
                bars.append(Bar("local", f"{name} / memcpy", ours, copy, at_least=0.9))
    return bars


def _small() -> list[Bar]:
    send = ((OURS, Case("local", "send", 64, unit="us")),)
    # Both values are the referee's: a sum of two peers' values would be no measurement.
    floor = tuple((RAW[0], Case("raw", op, 64, unit="us")) for op in ("shm_ping", "queue_hop"))
    return [
        Bar(
            "small",
            "TCP write 64 B, one at a time / raw spinning round trip",
            _either(OURS, "tcp", "write", 64, "us"),
            tuple(ref for peer in RAW for ref in _either(peer, "raw", "tcp_ping", 64, "us")),
            at_most=1.5,
        ),
        Bar("small", "same host send 64 B, one way, both awake", send, at_most=2.0),
        Bar(
            "small",
            "same host send 64 B, one way / (raw ping + queue hop)",
            send,
            floor,
            at_most=2.0,
            summed=True,
        ),
    ]


def _vector() -> list[Bar]:
    bars = []
    for link, congestion in (("tcp", DEFAULT), ("tcp", "cubic"), ("local", "")):
        many = ((OURS, Case(link, "write", 4 * KIB, iovs=1024, congestion=congestion)),)
        one = ((OURS, Case(link, "write", 4 * MIB, congestion=congestion)),)
        where = {"tcp": f"TCP [{congestion}]", "local": "same host"}[link]
        bars.append(
            Bar(
                "vector",
                f"{where} 1024 x 4 KiB in one writev / one write of 4 MiB",
                many,
                one,
                at_least=0.7,
            )
        )
    return bars
