"""The peers: one adapter a file, behind one small interface."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lib.cases import Case, Sample
from bench.lib.proc import BenchError


@dataclass
class Context:
    """The settings of a measurement."""

    #: About how long one value is measured, in seconds.
    seconds: float
    #: The project's own command.
    uccl_bin: Path
    #: The round that is being run, from 1.
    round: int = 0
    #: Transfers a second found in earlier rounds, so that a peer which counts iterations runs for about `seconds`.
    rates: dict[object, float] = field(default_factory=dict)

    def iterations(self, key: object, case: Case, guess_gb_s: float) -> int:
        """How many transfers last about `seconds`; the first time from a guess of the throughput."""
        rate = self.rates.get(key) or guess_gb_s * 1e9 / max(case.bytes, 4096)
        return max(5, int(rate * self.seconds))

    def limit_s(self, cases: list[Case]) -> float:
        """The time limit of a process that measures `cases`."""
        return 20 + len(cases) * (10 * self.seconds + 5)


class Peer:
    """Something that moves bytes and can be asked how fast.

    Each folder of benches has a context of its own.
    """

    #: The name in the tables.
    name: str = ""
    #: The Python package to install, for the list of versions.
    distribution: str = ""

    def available(self, context: Any) -> str | None:
        """None when it can run here, else why not."""
        raise NotImplementedError

    def version(self, context: Any) -> str:
        """Its version as it calls itself."""
        raise NotImplementedError

    def covers(self, case: Case) -> bool:
        """Whether it supports the case."""
        raise NotImplementedError

    def measure(self, cases: list[Case], context: Any) -> list[Sample]:
        """Measures cases of one group, one sample each; raises `BenchError` with the reason."""
        raise NotImplementedError


def every() -> list[Peer]:
    """All peers, this project first."""
    from bench.peers.gloo import Gloo
    from bench.peers.iperf3 import Iperf3
    from bench.peers.limits import Limits
    from bench.peers.mooncake import Mooncake
    from bench.peers.nixl import Nixl
    from bench.peers.raw import Raw
    from bench.peers.uccl import Uccl
    from bench.peers.ucx import Ucx

    return [Uccl(), Raw(), Limits(), Ucx(), Nixl(), Mooncake(), Gloo(), Iperf3()]


__all__ = ["Case", "Context", "BenchError", "Peer", "Sample", "every"]
