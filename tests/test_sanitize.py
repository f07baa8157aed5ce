"""The verdicts of tests/sanitize.py on a tool's output; a script stands in for the tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sanitize

SCRIPT = Path(__file__).with_name("sanitize.py")
PASSED = "test result: ok. 2 passed; 0 failed"


@pytest.mark.parametrize(
    ("said", "is_well", "told"),
    [
        (f"{PASSED}\\n========= ERROR SUMMARY: 0 errors", True, "0 faults, 2 tests passed"),
        (
            f"{PASSED}\\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            True,
            "0 faults",
        ),
        (f"{PASSED}\\n========= ERROR SUMMARY: 3 errors", False, "3 faults"),
        (
            f"{PASSED}\\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)",
            False,
            "2 faults",
        ),
        ("========= ERROR SUMMARY: 0 errors", False, "0 tests passed"),
        (f"skipped: lacks a GPU\\n{PASSED}\\n========= ERROR SUMMARY: 0 errors", False, "no GPU"),
        ("========= Error: Target application terminated", False, "did not come to its end"),
    ],
)
def test_a_run_is_well_if_tests_passed_and_nothing_was_found(
    tmp_path: Path, said: str, is_well: bool, told: str
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    tool.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, SCRIPT, "gpu", "--sanitizer", tool, "--tools", "memcheck"],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode == 0) == is_well and told in ran.stdout, ran


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nsleep 50\n")
    tool.chmod(0o755)
    ran = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            "gpu",
            "--sanitizer",
            tool,
            "--tools",
            "memcheck",
            "--limit",
            "0.2",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 1 and "did not come to its end" in ran.stdout, ran


def test_each_part_of_a_name_is_that_of_a_test() -> None:
    tests = (SCRIPT.parent.parent / "crates/uccl-ep/tests/gpu.rs").read_text()
    absent = [part for part in sanitize.TESTS if f"fn {part}" not in tests]
    assert not absent, f"no test in gpu.rs has {absent} in its name"
