#!/usr/bin/env python3
"""Kernels of expert parallelism under compute-sanitizer, which looks at each access to memory.

    cargo xtask sanitize                       # builds the tests first
    python3 tests/sanitize.py target/debug/deps/gpu-0123456789abcdef [--tools memcheck,racecheck] [--tests one_rank,...]

The program is that of ``crates/uccl-ep/tests/gpu.rs``; it needs neither cargo nor torch. compute-sanitizer is looked for in PATH and where CUDA's
toolkit puts it; ``pip install nvidia-cuda-sanitizer-api`` has one too (``--sanitizer``). Kernels of ranks that share a GPU wait for each other. A tool that
has them run one after the other makes such tests late: only memcheck, which does not, runs one of three ranks, unless ``--tests`` says more.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck")
#: Parts of the tests' names, each run by itself, and the tools that look at them.
TESTS = {"one_rank": TOOLS, "ranks_send_their_parts": ("memcheck",)}
#: Where the toolkit has it.
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/extras/compute-sanitizer")
#: What a tool says at its end.
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
#: What the tests say at theirs.
PASSED = re.compile(r"test result: ok\. (\d+) passed")


@dataclass(frozen=True)
class Found:
    """What a tool said of some tests."""

    faults: int | None
    """None if it did not come to its end."""
    passed: int
    skipped: bool

    @staticmethod
    def of(said: str) -> Found:
        """Reads a run's output."""
        summaries = [int(count) for pattern in (ERRORS, HAZARDS) for count in pattern.findall(said)]
        passed = sum(map(int, PASSED.findall(said)))
        return Found(sum(summaries) if summaries else None, passed, "lacks a GPU" in said)

    @property
    def is_well(self) -> bool:
        """Whether something ran, and nothing was found."""
        return self.faults == 0 and self.passed > 0 and not self.skipped

    def __str__(self) -> str:
        if self.skipped:
            return "no GPU"
        if self.faults is None:
            return "did not come to its end"
        return f"{self.faults} faults, {self.passed} tests passed"


def sanitizer(given: str | None) -> str | None:
    """Where compute-sanitizer is."""
    found = given or shutil.which("compute-sanitizer")
    return found or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


def run(command: list[str], limit: float) -> str:
    """What a command says, in which it and all that it has started have so many seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the tests, built")
    parser.add_argument("--sanitizer", help="where compute-sanitizer is")
    parser.add_argument("--tools", help="memcheck, racecheck, synccheck, initcheck")
    parser.add_argument("--tests", default=",".join(TESTS), help="parts of the tests' names, each run by itself")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each run")
    args = parser.parse_args()
    tool_at = sanitizer(args.sanitizer)
    if tool_at is None:
        print("there is no compute-sanitizer: say where with --sanitizer", file=sys.stderr)
        return 2
    is_well = True
    for tests in args.tests.split(","):
        for tool in args.tools.split(",") if args.tools else TESTS.get(tests, TOOLS):
            began = time.monotonic()
            said = run([tool_at, "--tool", tool, str(args.program), "--test-threads", "1", tests], args.limit)
            found = Found.of(said)
            print(f"{tool:10} {tests:30} {found}, {time.monotonic() - began:.1f} s", flush=True)
            if not found.is_well:
                is_well = False
                print("\n".join(said.splitlines()[-60:]))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
