"""Builds the wheel: NIXL's plugin first, which is a library of its own, and then with maturin all the rest."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ROOT = Path(__file__).resolve().parents[2]
_CRATE = "uccl-nixl"
_LIBRARY = "libplugin_UCCL.so"
#: Where the wheel takes it from (`include` in pyproject.toml) and uccl.nixl looks for it.
_PLACE = _ROOT / "python" / "uccl" / "nixl" / _LIBRARY


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The wheel, with the plugin where there is a C++ compiler for it."""
    _provide_plugin()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """As `build_wheel`, for a package that is used where its sources are."""
    _provide_plugin()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def _provide_plugin() -> None:
    # One of an earlier build must not pass for this one's.
    _PLACE.unlink(missing_ok=True)
    lacking = _lacking()
    if lacking:
        print(f"warning: the wheel is made without NIXL's plugin: {lacking}", file=sys.stderr)
        return
    # A new file: programs that have the old one loaded keep it.
    shutil.copyfile(_build(), _PLACE)
    # That of the machine that it is for, where that is another one.
    strip = os.environ.get("STRIP", "strip")
    if shutil.which(strip):
        subprocess.run([strip, "--strip-unneeded", str(_PLACE)], check=True)


def _lacking() -> str | None:
    if not (_ROOT / "crates" / _CRATE / "Cargo.toml").exists():
        return f"its sources (crates/{_CRATE}) are not here; build from the repository"
    compilers = [*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        return "there is no C++ compiler; install g++ and build again"
    return None


def _build() -> Path:
    """Builds the plugin; returns where cargo has put it."""
    cargo = os.environ.get("CARGO", "cargo")
    done = subprocess.run(
        [cargo, "build", "--release", "--locked", "--package", _CRATE]
        + ["--message-format", "json-render-diagnostics"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for line in done.stdout.splitlines():
        for file in json.loads(line).get("filenames", ()):
            if Path(file).name == _LIBRARY:
                return Path(file)
    raise RuntimeError(f"cargo built {_CRATE} without {_LIBRARY}")
