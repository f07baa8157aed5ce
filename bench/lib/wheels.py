"""Peers from a folder of wheels, each in a folder of its own: a machine with GPUs often has no network.

python3 -m bench.lib.install --wheels DIR     # where there is one: fetches the peers of the GPU bench
python3 -m bench.gpu.run --wheels DIR         # uses all wheels in DIR; so does bench/ep/beside.py
"""

import fnmatch
import os
import shutil
import sys
from pathlib import Path

from bench.lib.paths import WORK
from bench.lib.proc import why_not

#: By peer: its wheels, as pip names them, and the packages to fetch.
WHEELS = {
    "uccl-py": (["uccl_rs-*.whl"], []),
    # It is linked with CUDA 12's runtime, also where the machine has another version.
    "uccl-0.1.1": (
        ["uccl-*.whl", "nvidia_cuda_runtime_cu12-*.whl"],
        ["uccl==0.1.1", "nvidia-cuda-runtime-cu12==12.9.79"],
    ),
    "nixl": (["nixl_cu13-*.whl", "nixl-*.whl"], ["nixl-cu13==1.5.1", "nixl==1.5.1"]),
    "mooncake": (
        ["mooncake_transfer_engine_cuda13-*.whl"],
        ["mooncake-transfer-engine-cuda13==0.3.14"],
    ),
}
#: By peer: Debian's packages with libraries that its wheel is linked to, and machines with GPUs need not have.
DEBIAN = {"uccl-0.1.1": ["libibverbs1", "libnl-3-200", "libnl-route-3-200"]}
#: The subfolder of a peer's folder for Debian's packages.
_UNPACKED = "debian"
#: Peers that use another's folder.
SHARED = {"nixl-tcp": "nixl"}
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 27, 28, 31, 34, 35)] + [
    "manylinux2014_x86_64"
]


def fetch(folder: Path, python_version: str, peers: list[str]) -> dict[str, str]:
    """Fetches the peers' wheels for a version of Python, and Debian's packages; returns the
    failures by peer."""
    failures = {}
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python_version, *platforms]
    for peer in peers:
        packages = WHEELS[peer][1]
        reason = (
            _pip(["download", *options, "--dest", str(folder), *packages], 900)
            if packages
            else None
        )
        reason = reason or _fetch_debian(folder, DEBIAN.get(peer, []))
        if reason:
            failures[peer] = reason
    return failures


def _fetch_debian(folder: Path, packages: list[str]) -> str | None:
    """Fetches Debian's packages as they are; why not, if it cannot be done."""
    if not packages:
        return None
    download = ["apt-get", "download", *packages]
    reason = why_not(download, 300, folder=folder)
    # A fresh machine has no package list yet.
    return reason and (why_not(["apt-get", "update"], 300) or why_not(download, 300, folder=folder))


def unpack(folder: Path, python: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Each peer's own folder, and why a peer has none though its wheels are there."""
    folders, failures = {}, {}
    names = sorted(path.name for path in folder.glob("*.whl"))
    for peer, (patterns, _) in WHEELS.items():
        found = [name for pattern in patterns for name in fnmatch.filter(names, pattern)]
        if not found:
            continue
        target = WORK / "gpu-peers" / peer
        reason = install([folder / name for name in found], target, python)
        reason = reason or _unpack_debian(folder, DEBIAN.get(peer, []), target / _UNPACKED)
        if reason:
            failures[peer] = reason
        else:
            folders[peer] = target
    folders |= {peer: folders[other] for peer, other in SHARED.items() if other in folders}
    return folders, failures


def install(files: list[Path], target: Path, python: str) -> str | None:
    """Unpacks wheels into a folder of their own, for that Python; why not, if it cannot be done."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    options = ["--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    return _pip(["install", *options, *map(str, files)], 300, python)


def _unpack_debian(folder: Path, packages: list[str], target: Path) -> str | None:
    """Unpacks the Debian packages that a folder has; returns the reason of a failure."""
    for package in packages:
        for file in sorted(folder.glob(f"{package}_*.deb")):
            reason = why_not(["dpkg-deb", "--extract", str(file), str(target)], 60)
            if reason:
                return reason
    return None


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that uses the packages unpacked into a folder."""
    libraries = {
        path.parent
        for pattern in ("nvidia/**/lib", f"{_UNPACKED}/**")
        for path in folder.glob(f"{pattern}/*.so*")
    }
    paths = {"PYTHONPATH": [folder], "LD_LIBRARY_PATH": sorted(libraries)}
    return {
        name: os.pathsep.join(filter(None, [*map(str, ours), os.environ.get(name)]))
        for name, ours in paths.items()
    }


def build(tree: Path, folder: Path, env: dict[str, str]) -> str | None:
    """Builds this project's wheel from a tree of it into a folder; why not, if it cannot be done."""
    words = ["wheel", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    return _pip(words, 3600, env=env)


def _pip(
    arguments: list[str],
    limit_s: int,
    python: str = sys.executable,
    env: dict[str, str] | None = None,
) -> str | None:
    command = [
        python,
        "-m",
        "pip",
        *arguments[:1],
        "--quiet",
        "--disable-pip-version-check",
        *arguments[1:],
    ]
    return why_not(command, limit_s, env)
