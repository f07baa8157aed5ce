"""The example for new users, as they run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import agents

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "nixl_read_write.py"


def test_the_example_moves_its_bytes(plugin_dir: str) -> None:
    env = {**os.environ, **agents.environment("UCCL", "local", None)}
    done = subprocess.run(
        [sys.executable, EXAMPLE], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("target", "initiator"))]
    assert sorted(said) == [
        "initiator: all bytes are now 8: True",
        "target: the first byte is now 7",
    ]
