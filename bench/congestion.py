"""Puts a peer's TCP sockets on one congestion control, and tells which one was in force."""

import subprocess
import tempfile
from pathlib import Path

import machine
from cases import DEFAULT
from paths import BENCH, WORK

_SOURCE = BENCH / "congestion.c"
_SHIM = WORK / "congestion.so"


def build() -> str | None:
    """Compiles the preloaded shim when it is missing or stale; returns why it could not, or None."""
    WORK.mkdir(exist_ok=True)
    if _SHIM.exists() and _SHIM.stat().st_mtime >= _SOURCE.stat().st_mtime:
        return None
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-o", str(_SHIM), str(_SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60, text=True)
    except FileNotFoundError:
        return "gcc is not installed"
    except subprocess.CalledProcessError as error:
        return f"gcc failed: {error.stderr.strip()[:200]}"
    return None


class Pin:
    """Environment for one run of a peer; afterwards `in_force` says what its sockets ran on."""

    def __init__(self, choice: str):
        self.choice = choice
        self._log = Path(tempfile.mkstemp(prefix="congestion-", dir=WORK)[1])

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self._log.unlink(missing_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """What to add to the peer's environment."""
        if not self.choice:
            return {}
        env = {"LD_PRELOAD": str(_SHIM), "BENCH_TCP_CONGESTION_LOG": str(self._log)}
        if self.choice != DEFAULT:
            env["BENCH_TCP_CONGESTION"] = self.choice
        return env

    @property
    def in_force(self) -> str:
        """The congestion control of the sockets, or why it is not the one that was wanted."""
        if not self.choice:
            return ""
        said = [line.split(" ", 1) for line in self._log.read_text().splitlines() if " " in line]
        failures = [detail for word, detail in said if word == "failed"]
        if failures:
            return f"not {self.choice}: {failures[0]}"
        if self.choice != DEFAULT:
            pinned = [detail for word, detail in said if word == "pinned"]
            return pinned[0] if pinned else f"not {self.choice}: no TCP socket was seen"
        asked = [detail for word, detail in said if word == "asked"]
        return f"{asked[-1]} (its own choice)" if asked else machine.default_congestion()
