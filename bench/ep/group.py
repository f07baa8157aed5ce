"""The processes of one participant of bench/ep/beside.py: they are asked together, and end
together."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.lib.paths import ROOT
from bench.lib.proc import BenchError, Conversation

#: Lines of a process's standard error that are shown where it fails.
SHOWN = 25


class Group:
    """Processes with the numbers from 0 on."""

    def __init__(self, count: int, python: str, env: dict[str, str]) -> None:
        """Starts the processes. Their imports take seconds, so all groups are started before the
        first is greeted."""
        self._folder = tempfile.TemporaryDirectory(prefix="ep-", dir=_in_memory())
        self._failures: list[str] = []
        self._pool = ThreadPoolExecutor(count)
        found = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), found]))}
        self._talks = [Conversation([python, "-m", "bench.ep.rank"], env) for _ in range(count)]

    def greet(self, hellos: list[dict[str, Any]], limit_s: float) -> None:
        """Sends each process its greeting; ``BenchError`` unless all are ready within ``limit_s``
        seconds."""
        self._ask_each([{**hello, "folder": self._folder.name} for hello in hellos], limit_s)

    def ask(self, message: dict[str, Any], limit_s: float) -> list[Any]:
        """Every process's answer. If one fails all are ended, and ``BenchError`` has the first one's
        error."""
        return self._ask_each([message] * len(self._talks), limit_s)

    def end(self) -> None:
        """Kills the processes."""
        for talk in self._talks:
            talk.end()
        self._pool.shutdown()
        self._folder.cleanup()

    def _ask_each(self, messages: list[dict[str, Any]], limit_s: float) -> list[Any]:
        def ask(number: int) -> Any:
            try:
                return self._talks[number].ask(messages[number], limit_s)
            except BenchError as failed:
                shown = "\n".join(self._talks[number].errors().splitlines()[-SHOWN:])
                self._failures.append(f"process {number}: {failed}\n{shown}")
                # The others would wait for it.
                for talk in self._talks:
                    talk.end()
                return None

        answers = list(self._pool.map(ask, range(len(self._talks))))
        if self._failures:
            raise BenchError(self._failures[0])
        return answers


def _in_memory() -> str | None:
    """A folder in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
