"""Processes under a time limit, each in its own process group, so that nothing is ever left running."""

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class BenchError(Exception):
    """A process ended badly, ran past its limit or gave no readable answer."""


@dataclass
class ProcessResult:
    """How a process ended."""

    code: int
    out: str
    err: str


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(leader: subprocess.Popen) -> None:
    try:
        os.killpg(leader.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    leader.wait()


def why_not(
    command: list[str], limit_s: int, env: dict[str, str] | None = None, folder: Path | None = None
) -> str | None:
    """Runs a command in a folder; returns the last line of its output if it fails, else `None`."""
    env = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=env, cwd=folder
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"


#: A program and its arguments.
Command = Sequence["str | int | Path"]


class Process:
    """A child in a process group of its own; leaving the `with` block ends the whole group."""

    def __init__(
        self, command: Command, env: dict[str, str] | None = None, stdin: str | None = None
    ):
        self.command = [str(word) for word in command]
        self._files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
        # A line of stdin goes through a file: it may be longer than a pipe holds.
        self._stdin = tempfile.TemporaryFile("w+")
        self._stdin.write(stdin or "")
        self._stdin.seek(0)
        self._child = subprocess.Popen(
            self.command,
            stdin=self._stdin,
            stdout=self._files[0],
            stderr=self._files[1],
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self, limit_s: float) -> ProcessResult:
        """Waits for its end; past `limit_s` seconds the group is killed and `BenchError` raised."""
        try:
            code = self._child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise BenchError(f"no end after {limit_s:.0f} s: {self._last_words()}") from None
        return ProcessResult(code, *(self._text(file) for file in self._files))

    def alive(self) -> bool:
        return self._child.poll() is None

    def end(self) -> None:
        """Kills the whole group and reaps the child."""
        _end_group(self._child)

    def _text(self, file) -> str:
        file.seek(0)
        return file.read()

    def _last_words(self) -> str:
        return (
            last_line(self._text(self._files[1]))
            or last_line(self._text(self._files[0]))
            or "it said nothing"
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for file in (*self._files, self._stdin):
            file.close()


class Conversation:
    """A child in a process group of its own that answers lines of JSON; ended with its whole group."""

    def __init__(self, command: Command, env: dict[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._heard: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, message: object, limit_s: float) -> Any:
        """The answer to a message; past `limit_s` seconds, or if it ends first, it is killed and `BenchError` raised."""
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            line = self._heard.get(timeout=limit_s)
        except queue.Empty:
            self.end()
            raise BenchError(f"no answer after {limit_s:.0f} s: {self._last_words()}") from None
        except OSError:
            line = None
        if line is None:
            self.end()
            raise BenchError(f"it ended (status {self._child.returncode}): {self._last_words()}")
        return json.loads(line)

    def end(self) -> None:
        """Kills the whole group and reaps the child."""
        _end_group(self._child)

    def _listen(self) -> None:
        # Libraries log to stdout too: an answer is a line that starts with our mark.
        for line in self._child.stdout:
            if line.startswith("@"):
                self._heard.put(line[1:])
        self._heard.put(None)

    def errors(self) -> str:
        """All that it has written to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def _last_words(self) -> str:
        return last_line(self.errors()) or "it said nothing"


def run(
    command: Command,
    *,
    limit_s: float,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
) -> ProcessResult:
    """Runs a command to its end; `BenchError` when it exits other than 0 or runs past its limit."""
    with Process(command, env, stdin) as process:
        ended = process.wait(limit_s)
    if ended.code != 0:
        raise BenchError(
            f"exit status {ended.code}: {last_line(ended.err) or last_line(ended.out) or 'it said nothing'}"
        )
    return ended


def last_line(text: str) -> str:
    """The last line that is not blank, or the message of a Rust panic, shortened for a table
    row."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if "panicked at" in line:
            return " ".join(lines[at : at + 2])[:200]
    return lines[-1][:200] if lines else ""


def free_port() -> int:
    """A loopback port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_listening(port: int, process: Process, limit_s: float = 10.0) -> None:
    """Waits until a process listens on `port`, read from the kernel's table: connecting would use
    up an accept."""
    end = time.monotonic() + limit_s
    wanted = f"{port:04X}"
    while time.monotonic() < end:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                rows = Path(table).read_text().splitlines()[1:]
            except OSError:
                continue
            for row in rows:
                local, state = row.split()[1], row.split()[3]
                if state == "0A" and local.rsplit(":", 1)[1] == wanted:
                    return
        if not process.alive():
            raise BenchError(f"the server ended early: {process._last_words()}")
        time.sleep(0.01)
    raise BenchError(f"nobody listens on port {port} after {limit_s:.0f} s")
