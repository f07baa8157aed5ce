"""The same bench in a guest of this machine that has RDMA devices, and its results."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.lib.cases import Case, Sample
from bench.lib.paths import ROOT
from bench.lib.proc import BenchError
from bench.lib.results import Results

#: A guest with more processors than its machine makes no progress; with four, no process waits for
#: one.
_CPUS = max(2, min(4, (os.cpu_count() or 2) // 2))
_GUEST = ["--rails=2", f"--cpus={_CPUS}"]
#: Seconds to build a kernel, where there is none yet.
_BUILD_S = 20 * 60


def measure(arguments: list[str], max_minutes: float) -> dict:
    """Runs `bench.rdma.run` with these arguments in a guest; returns its JSON."""
    limit_s = round(60 * max_minutes) + 120
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "rdma.json"
        inside = [sys.executable, "-m", "bench.rdma.run", *arguments, "--json", str(kept)]
        guest = [sys.executable, "-B", str(ROOT / "tests" / "guest")]
        options = [*_GUEST, f"--timeout={limit_s}", "--scratch", scratch]
        try:
            # The guest's progress is shown as it comes; its tables are part of this run's.
            done = subprocess.run(
                [*guest, *options, "--", *inside],
                stdout=subprocess.DEVNULL,
                timeout=limit_s + _BUILD_S,
                cwd=ROOT,
            )
            return json.loads(kept.read_text())
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"no end after {error.timeout:.0f} s") from error
        except (OSError, ValueError) as error:
            raise BenchError(f"exit status {done.returncode}, and no results: {error}") from error


def add(results: Results, document: dict) -> None:
    """Adds a guest's results to those of this run."""
    for found in document["values"]:
        case = Case(**found["case"])
        for value in found["rounds"]:
            sample = Sample(case, value["value"], value["detail"])
            results.add(found["peer"], value["round"], sample, value["noise"])
    for failed in document["failures"]:
        results.failures[(failed["peer"], Case(**failed["case"]))].extend(failed["reasons"])
