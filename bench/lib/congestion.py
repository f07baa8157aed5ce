"""Puts a peer's TCP sockets on one congestion control, and reports the one that was in force."""

import tempfile
from pathlib import Path

from bench.lib import machine, native
from bench.lib.cases import DEFAULT
from bench.lib.paths import BENCH, WORK
from bench.lib.proc import BenchError

SHIM = WORK / "congestion.so"


def build() -> str | None:
    """Compiles the preloaded shim; returns why it could not, or None."""
    return native.build(BENCH / "lib/congestion.c", SHIM, ["-shared", "-fPIC", "-ldl"])


class Pin:
    """The environment of one run of a peer; afterwards `in_force` names its congestion control."""

    def __init__(self, choice: str):
        self.choice = choice
        self._log = Path(tempfile.mkstemp(prefix="congestion-", dir=WORK)[1])

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self._log.unlink(missing_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """Variables to add to the peer's environment."""
        if not self.choice:
            return {}
        env = {"LD_PRELOAD": str(SHIM), "BENCH_TCP_CONGESTION_LOG": str(self._log)}
        if self.choice != DEFAULT:
            env["BENCH_TCP_CONGESTION"] = self.choice
        return env

    @property
    def in_force(self) -> str:
        """The congestion control of the sockets; `BenchError` when it is not the one that they were to be pinned to."""
        if not self.choice:
            return ""
        said = [line.split(" ", 1) for line in self._log.read_text().splitlines() if " " in line]
        failures = [detail for word, detail in said if word == "failed"]
        if failures:
            raise BenchError(
                f"its sockets could not be put on {self.choice}: {failures[0]} (root can)"
            )
        if self.choice != DEFAULT:
            if not any(word == "pinned" for word, _ in said):
                raise BenchError(
                    f"its sockets could not be put on {self.choice}: none was made through libc"
                )
            return self.choice
        asked = [detail for word, detail in said if word == "asked"]
        return f"{asked[-1]} (its own choice)" if asked else machine.default_congestion()
