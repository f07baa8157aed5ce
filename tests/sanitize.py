#!/usr/bin/env python3
"""Runs the kernels of expert parallelism under compute-sanitizer, which checks each memory access.

    cargo xtask sanitize                       # builds the tests first
    python3 tests/sanitize.py target/debug/deps/gpu-0123456789abcdef [--tools memcheck,racecheck] [--tests one_rank,...]

The program is that of ``crates/uccl-ep/tests/gpu.rs``; it needs neither cargo nor torch.
compute-sanitizer is found in PATH or in the folders of CUDA's toolkit; the pip package
``nvidia-cuda-sanitizer-api`` has one too (``--sanitizer``). Kernels of ranks that share a GPU wait
for each other, so they are late under a tool that serialises kernels. memcheck does not, so it
alone runs a test of three ranks, unless ``--tests`` names more.
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
#: Parts of test names, each run by itself, and the tools for each.
TESTS = {"one_rank": TOOLS, "ranks_send_partial_sums": ("memcheck",)}
#: Folders of compute-sanitizer in a toolkit.
PLACES = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda/compute-sanitizer",
    "/opt/cuda/extras/compute-sanitizer",
)
#: The last line of a tool.
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
#: The last line of the tests.
PASSED = re.compile(r"test result: ok\. (\d+) passed")


@dataclass(frozen=True)
class Found:
    """The result of a tool for some tests."""

    faults: int | None
    """The number of faults, or None if the tool did not finish."""
    passed: int
    skipped: bool

    @staticmethod
    def of(said: str) -> Found:
        """Parses a run's output."""
        summaries = [int(count) for pattern in (ERRORS, HAZARDS) for count in pattern.findall(said)]
        passed = sum(map(int, PASSED.findall(said)))
        return Found(sum(summaries) if summaries else None, passed, "lacks a GPU" in said)

    @property
    def is_well(self) -> bool:
        """Whether tests ran without a fault."""
        return self.faults == 0 and self.passed > 0 and not self.skipped

    def __str__(self) -> str:
        if self.skipped:
            return "no GPU"
        if self.faults is None:
            return "did not come to its end"
        return f"{self.faults} faults, {self.passed} tests passed"


def sanitizer(given: str | None) -> str | None:
    """The path of compute-sanitizer, or None."""
    found = given or shutil.which("compute-sanitizer")
    return found or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


def run(command: list[str], limit: float) -> str:
    """The output of a command, which is killed with its children after ``limit`` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, help="the tests, built")
    parser.add_argument("--sanitizer", help="where compute-sanitizer is")
    parser.add_argument("--tools", help="memcheck, racecheck, synccheck, initcheck")
    parser.add_argument(
        "--tests", default=",".join(TESTS), help="parts of the tests' names, each run by itself"
    )
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
            said = run(
                [tool_at, "--tool", tool, str(args.program), "--test-threads", "1", tests],
                args.limit,
            )
            found = Found.of(said)
            print(f"{tool:10} {tests:30} {found}, {time.monotonic() - began:.1f} s", flush=True)
            if not found.is_well:
                is_well = False
                print("\n".join(said.splitlines()[-60:]))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
