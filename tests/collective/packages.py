"""Packages of PyPI that tests read, each unpacked into a folder of its own and installed nowhere."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "uccl" / "collective"


def unpacked(requirement: str, *options: str) -> Path:
    """The folder of a package, which is fetched unless it is there. Skips the test if it cannot be had."""
    folder = CACHE / requirement
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work]
        ran = subprocess.run([*command, *options, requirement], capture_output=True, text=True)
        if ran.returncode:
            pytest.skip(f"lacks {requirement}: {ran.stderr.strip()[-200:]}")
        contents = Path(work, "contents")
        for file in list(Path(work).iterdir()):
            if file.suffix == ".whl":
                with zipfile.ZipFile(file) as wheel:
                    wheel.extractall(contents)
            else:
                contents.mkdir()
                into = ["tar", "-C", str(contents), "--strip-components=1", "-xzf", str(file)]
                subprocess.run(into, check=True)
        try:
            contents.rename(folder)
        except OSError:
            # Another process was faster.
            assert folder.exists()
    return folder
