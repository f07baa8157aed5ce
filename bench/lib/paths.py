"""Folders of the benchmark's installed and built files; git ignores all of them."""

from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
WORK = ROOT / ".work"
VENV = WORK / "bench-venv"
PYTHON = VENV / "bin" / "python"


def site_packages() -> Path | None:
    """The virtual environment's package folder, or None before `--install`."""
    found = sorted(VENV.glob("lib/python3.*/site-packages"))
    return found[0] if found else None
