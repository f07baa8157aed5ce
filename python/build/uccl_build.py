"""Builds the wheel: the plugins of NIXL and NCCL first, libraries of their own, and then with maturin all the rest."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _Plugin:
    """A library that another program loads."""

    of: str
    crate: str
    #: The file that cargo makes.
    library: str
    #: Where the wheel takes it from (`include` in pyproject.toml) and the package looks for it.
    place: Path
    needs_cxx: bool = False


_PACKAGE = _ROOT / "python" / "uccl"
_PLUGINS = (
    _Plugin(
        "NIXL",
        "uccl-nixl",
        "libplugin_UCCL.so",
        _PACKAGE / "nixl" / "libplugin_UCCL.so",
        needs_cxx=True,
    ),
    _Plugin("NCCL", "uccl-nccl", "libnccl_net_uccl.so", _PACKAGE / "lib" / "libnccl-net-uccl.so"),
)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The wheel, with the plugins; NIXL's needs a C++ compiler."""
    _provide_plugins()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """As `build_wheel`, for a package that is used where its sources are."""
    _provide_plugins()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def _provide_plugins() -> None:
    there = []
    for plugin in _PLUGINS:
        # One of an earlier build must not pass for this one's.
        plugin.place.unlink(missing_ok=True)
        lacking = _lacking(plugin)
        if lacking:
            print(
                f"warning: the wheel is made without {plugin.of}'s plugin: {lacking}",
                file=sys.stderr,
            )
        else:
            there.append(plugin)
    for plugin, built in _build(there).items():
        plugin.place.parent.mkdir(exist_ok=True)
        # A new file: programs that have the old one loaded keep it.
        shutil.copyfile(built, plugin.place)
        # That of the machine that it is for, where that is another one.
        strip = os.environ.get("STRIP", "strip")
        if shutil.which(strip):
            subprocess.run([strip, "--strip-unneeded", str(plugin.place)], check=True)


def _lacking(plugin: _Plugin) -> str | None:
    if not (_ROOT / "crates" / plugin.crate / "Cargo.toml").exists():
        return f"its sources (crates/{plugin.crate}) are not here; build from the repository"
    compilers = [*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"]
    if plugin.needs_cxx and not any(map(shutil.which, compilers)):
        return "there is no C++ compiler; install g++ and build again"
    return None


def _build(plugins: list[_Plugin]) -> dict[_Plugin, Path]:
    """Builds the plugins; returns where cargo has put each."""
    if not plugins:
        return {}
    cargo = os.environ.get("CARGO", "cargo")
    done = subprocess.run(
        [cargo, "build", "--release", "--locked"]
        + [f"--package={plugin.crate}" for plugin in plugins]
        + ["--message-format", "json-render-diagnostics"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    files = [
        Path(file)
        for line in done.stdout.splitlines()
        for file in json.loads(line).get("filenames", ())
    ]
    built = {plugin: file for plugin in plugins for file in files if file.name == plugin.library}
    for plugin in plugins:
        if plugin not in built:
            raise RuntimeError(f"cargo built {plugin.crate} without {plugin.library}")
    return built
