"""Compiles the benchmark's small C sources, when they are missing or stale."""

import subprocess
from pathlib import Path


def build(source: Path, target: Path, options: list[str]) -> str | None:
    """Runs gcc; returns why it could not, or None."""
    target.parent.mkdir(exist_ok=True)
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return None
    # Libraries come last: the linker looks in them for symbols that earlier files need.
    command = ["gcc", "-O2", "-Wall", "-o", str(target), str(source), *options]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60, text=True)
    except FileNotFoundError:
        return "gcc is not installed"
    except subprocess.TimeoutExpired:
        return "gcc did not end within 60 s"
    except subprocess.CalledProcessError as error:
        return f"gcc failed: {error.stderr.strip()[:200]}"
    return None
