"""Cases and samples. A case is one thing that every peer is asked to do; a sample is one answer."""

from dataclasses import dataclass, field, replace
from typing import Any

KIB, MIB = 1 << 10, 1 << 20

#: Congestion control: the default of the program or of the machine.
DEFAULT = "default"


@dataclass(frozen=True, order=True)
class Case:
    """One thing to measure.

    link        "tcp" (loopback), "local" (same host, memory to memory), "gpu" (a GPU's memory, the best way there is)
                or "raw" (the machine, no engine in it)
    op          "write" and "read" are one-sided from the caller; "send" is a small two-sided message, one way;
                raw ones are "tcp_stream", "tcp_ping" (spinning, a round trip), "vm_read" and "vm_write"
                (process_vm_*), "memcpy", "shm_ping" (spinning, one way) and "queue_hop" (thread to thread, one way);
                NIXL's "post", "post_prepped" and "repost" are in nixl_cases.py
    size        bytes of one iov
    iovs        iovs in one transfer
    memory      "any" (plain, private memory) or "alloc" (memory that both sides map); of GPUs the other side's
                memory: "gpu" or "pinned", or over TCP "host" for plain memory on both sides
    congestion  for TCP: DEFAULT, or the algorithm that every socket is pinned to
    unit        "GB/s" (1e9 bytes a second), "us" (microseconds: one write acknowledged, or one send or "pingpong" one way) or
                "ns" (nanoseconds of the caller's time for each iov)
    by          the caller, where a peer has several: "python" or "nixl"; empty for its command
    """

    link: str
    op: str
    size: int
    iovs: int = 1
    memory: str = "any"
    congestion: str = ""
    unit: str = "GB/s"
    by: str = ""

    @property
    def group(self) -> "Case":
        """Cases that differ only in size share a group: a peer may measure them from one pair of processes."""
        return replace(self, size=0)

    @property
    def bytes(self) -> int:
        """Bytes of one transfer."""
        return self.size * self.iovs

    def title(self) -> str:
        """The case in words, without its size."""
        words = [*([self.by] if self.by else []), self.link, self.op]
        if self.iovs > 1:
            words.append(f"x{self.iovs}")
        if self.memory != "any":
            words.append(f"({self.memory})")
        if self.congestion:
            words.append(f"[{self.congestion}]")
        return " ".join(words)


@dataclass
class Sample:
    """One measured value, in its case's unit."""

    case: Case
    value: float
    #: The conditions, such as transfers in flight and the congestion control in force.
    detail: dict[str, Any] = field(default_factory=dict)


def human(size: int) -> str:
    """A size in bytes as people write it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def plan(quick: bool, only: set[str]) -> list[Case]:
    """The cases of a run, in the order they are measured."""
    sections = {"tcp": _tcp, "local": _local, "small": _small, "vector": _vector}
    cases = [case for name, section in sections.items() if name in only for case in section(quick)]
    return list(dict.fromkeys(cases))


def _tcp(quick: bool) -> list[Case]:
    cases = []
    for congestion in (DEFAULT, "cubic"):
        cases.append(Case("raw", "tcp_stream", MIB, congestion=congestion))
        for op in ("write", "read"):
            cases += [Case("tcp", op, size, congestion=congestion) for size in tcp_sizes(quick)]
    return cases


def _local(quick: bool) -> list[Case]:
    cases = [
        Case("raw", op, size)
        for op in ("vm_read", "vm_write")
        for size in plain_sizes(quick)
        if size <= 4 * MIB
    ]
    cases.append(Case("raw", "memcpy", 64 * MIB))
    for op in ("write", "read"):
        cases += [Case("local", op, size) for size in plain_sizes(quick)]
        cases += [Case("local", op, size, memory="alloc") for size in mapped_sizes(quick)]
    return cases


def _small(quick: bool) -> list[Case]:
    cases = []
    for congestion in (DEFAULT, "cubic"):
        cases.append(Case("raw", "tcp_ping", 64, congestion=congestion, unit="us"))
        cases.append(Case("tcp", "write", 64, congestion=congestion, unit="us"))
    cases += [Case("raw", "shm_ping", 64, unit="us"), Case("raw", "queue_hop", 64, unit="us")]
    cases += [Case("local", op, 64, unit="us") for op in ("write", "send")]
    return cases


def _vector(quick: bool) -> list[Case]:
    cases = []
    for link, congestion in (("tcp", DEFAULT), ("tcp", "cubic"), ("local", "")):
        # Bars compare a vector with one write of the same bytes, so that `--only vector` stands
        # alone.
        cases.append(Case(link, "write", 4 * MIB, congestion=congestion))
        cases.append(Case(link, "write", 4 * KIB, iovs=1024, congestion=congestion))
    return cases


def tcp_sizes(quick: bool) -> list[int]:
    return [1 * MIB, 64 * MIB] if quick else [1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def plain_sizes(quick: bool) -> list[int]:
    if quick:
        return [64 * KIB, 4 * MIB, 64 * MIB]
    return [64 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB, 256 * MIB]


def mapped_sizes(quick: bool) -> list[int]:
    return [64 * KIB, 64 * MIB] if quick else [64 * KIB, MIB, 4 * MIB, 64 * MIB]
