"""The same bench in a guest of this machine that has RDMA devices, and what it measured there."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import Case, Sample
from paths import BENCH, ROOT
from proc import Failed
from results import Results

#: A guest with more processors than its machine makes no progress; with four, nobody waits for one.
_CPUS = max(2, min(4, (os.cpu_count() or 2) // 2))
_GUEST = ["--rails=2", f"--cpus={_CPUS}"]
#: What a kernel takes to build, where none is there yet.
_BUILD_S = 20 * 60


def measure(arguments: list[str], max_minutes: float) -> dict:
    """Runs `rdma.py` with these arguments in a guest; what it keeps as JSON."""
    limit_s = round(60 * max_minutes) + 120
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "rdma.json"
        inside = [sys.executable, str(BENCH / "rdma.py"), *arguments, "--json", str(kept)]
        guest = [sys.executable, "-B", str(ROOT / "tests" / "guest")]
        options = [*_GUEST, f"--timeout={limit_s}", "--scratch", scratch]
        try:
            # Its progress is told as it comes; its tables are part of those that follow.
            done = subprocess.run(
                [*guest, *options, "--", *inside], stdout=subprocess.DEVNULL, timeout=limit_s + _BUILD_S
            )
            return json.loads(kept.read_text())
        except subprocess.TimeoutExpired as error:
            raise Failed(f"no end after {error.timeout:.0f} s") from error
        except (OSError, ValueError) as error:
            raise Failed(f"exit status {done.returncode}, and no results: {error}") from error


def add(results: Results, document: dict) -> None:
    """Adds what a guest measured to what was measured here."""
    for found in document["values"]:
        case = Case(**found["case"])
        for value in found["rounds"]:
            sample = Sample(case, value["value"], value["detail"])
            results.add(found["peer"], value["round"], sample, value["noise"])
    for failed in document["failures"]:
        results.failures[(failed["peer"], Case(**failed["case"]))].extend(failed["reasons"])
