"""Facts about the machine, and a gate that waits until it is quiet."""

import datetime
import os
import platform
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

#: The share of the machine used by others above which a value counts as disturbed.
NOISY = 0.10
#: How long one look at the machine's idleness takes, in seconds.
_WINDOW_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, object]:
    """Facts for the head of every table: the machine, its kernel, the date."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "tcp_congestion_default": default_congestion(),
        "tcp_congestion_available": _text(
            "/proc/sys/net/ipv4/tcp_available_congestion_control"
        ).split(),
        "tcp_wmem": _text("/proc/sys/net/ipv4/tcp_wmem").split(),
        "tcp_rmem": _text("/proc/sys/net/ipv4/tcp_rmem").split(),
        "transparent_hugepage": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "nice": os.nice(0),
    }


def default_congestion() -> str:
    """The congestion control that a TCP socket gets by default."""
    return _text("/proc/sys/net/ipv4/tcp_congestion_control") or "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()


@dataclass(frozen=True)
class _Clock:
    """CPU time of the whole machine and of the children we have reaped, in seconds."""

    wall: float
    total: float
    idle: float
    interrupts: float
    ours: float

    @classmethod
    def now(cls) -> "_Clock":
        fields = [int(word) / TICKS_PER_S for word in _lines("/proc/stat")[0].split()[1:9]]
        mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(
            wall=time.monotonic(),
            total=sum(fields),
            idle=fields[3] + fields[4],
            # Packet work on loopback is charged here; it is the measurement's own.
            interrupts=fields[5] + fields[6],
            ours=sum(use.ru_utime + use.ru_stime for use in mine),
        )


def idle_share(window_s: float) -> float:
    """The share of all CPU time that was idle over the next `window_s` seconds, 0 to 1."""
    before = _Clock.now()
    time.sleep(window_s)
    after = _Clock.now()
    total = after.total - before.total
    return (after.idle - before.idle) / total if total > 0 else 0.0


class Noise:
    """Measures the share of the machine that others used while our children ran."""

    def __init__(self) -> None:
        self._before = _Clock.now()

    def share(self) -> float:
        """0 to 1. Of children, only those that have been reaped count as ours."""
        after, before = _Clock.now(), self._before
        total = after.total - before.total
        if total <= 0:
            return 0.0
        busy = total - (after.idle - before.idle) - (after.interrupts - before.interrupts)
        return min(1.0, max(0.0, (busy - (after.ours - before.ours)) / total))


@dataclass
class GateLog:
    """Counts of the gate's waits and repetitions over a run."""

    waited_s: float = 0.0
    gave_up: int = 0
    repeated: int = 0
    kept_noisy: int = 0


class Gate:
    """Holds a repetition back until the machine is quiet, and has it repeated when it was disturbed.

    Both are bounded: one wait by `wait_s`, all waiting and repeating together by `budget_s`. On a machine
    that never calms down the run goes on, and its values are marked as noisy.
    """

    def __init__(
        self, *, idle: float, wait_s: float, budget_s: float, noise: float = NOISY, repeats: int = 2
    ):
        self.idle = idle
        self.wait_s = wait_s
        self.noise = noise
        self.repeats = repeats
        self.log = GateLog()
        self._budget_s = budget_s

    def as_dict(self) -> dict[str, float]:
        """Its thresholds and its counts."""
        return {"idle": self.idle, "noise": self.noise, **asdict(self.log)}

    def wait(self) -> bool:
        """True once the machine is idle enough, False when `wait_s` seconds did not suffice."""
        start = time.monotonic()
        try:
            while True:
                if idle_share(_WINDOW_S) >= self.idle:
                    return True
                if time.monotonic() - start > min(self.wait_s, self._budget_s):
                    self.log.gave_up += 1
                    return False
        finally:
            waited = time.monotonic() - start
            self.log.waited_s += waited
            # The look that every repetition takes is not charged: a quiet machine uses none of the budget.
            self._budget_s -= max(0.0, waited - _WINDOW_S)

    def measure(self, work):
        """Runs `work` on a quiet machine, again when disturbed; returns (result, noise) of the calmest try."""
        best = None
        for attempt in range(1 + self.repeats):
            if attempt and self._budget_s <= 0:
                break
            self.wait()
            start, meter = time.monotonic(), Noise()
            result = work()
            noise = meter.share()
            if attempt:
                self.log.repeated += 1
                self._budget_s -= time.monotonic() - start
            if best is None or noise < best[1]:
                best = (result, noise)
            if noise <= self.noise:
                return best
        self.log.kept_noisy += 1
        return best
