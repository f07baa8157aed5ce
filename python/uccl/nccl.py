"""Brings this project to NCCL: a network plugin for NCCL as it is installed with torch.

In a shell, before the program that uses NCCL::

    export NCCL_NET_PLUGIN=$(python -m uccl.nccl) NCCL_NET=UCCL

or in the program, before its first communicator::

    os.environ["NCCL_NET_PLUGIN"] = uccl.nccl_plugin_path()
    os.environ["NCCL_NET"] = "UCCL"

``NCCL_NET`` is not needed; with it NCCL fails, instead of taking its own sockets, where the plugin does not work.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

__all__ = ["Choice", "choice", "plugin_path", "rccl_plugin_path"]

#: The library that NCCL loads.
_PLUGIN = Path(__file__).with_name("lib") / "libnccl-net-uccl.so"
_NETWORK = "UCCL"
_REMEDY = "export NCCL_NET_PLUGIN=$(python -m uccl.nccl) NCCL_NET=UCCL"
#: Where the loader looks after ``LD_LIBRARY_PATH``.
_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")


def plugin_path() -> str:
    """The file to name in ``NCCL_NET_PLUGIN``.

    NCCL 2.19 and later load it. Raises ``FileNotFoundError`` if this installation was made without it.
    """
    if not _PLUGIN.exists():
        raise FileNotFoundError(
            f"{_PLUGIN} is not there: this installation was made without NCCL's plugin; build the wheel from the repository"
        )
    return str(_PLUGIN)


def rccl_plugin_path() -> str:
    """As :func:`plugin_path`, for RCCL, which reads the same variables and the same tables."""
    return plugin_path()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The network plugin that NCCL would take, with the variables of this process."""

    is_ours: bool
    seen: str
    remedy: str = ""


def choice(version: str) -> Choice:
    """The network plugin that a version of NCCL would take, and why. Nothing is loaded for that."""
    names = os.environ.get("NCCL_NET_PLUGIN", "")
    network = os.environ.get("NCCL_NET", "")
    if names == "none":
        return Choice(False, "NCCL_NET_PLUGIN=none: NCCL's own network", _REMEDY)
    found = _first(names)
    if found is None:
        looked = f"NCCL_NET_PLUGIN={names} is not found" if names else "NCCL_NET_PLUGIN is not set"
        ending = f", and NCCL_NET={network} is no network of NCCL's" if network == _NETWORK else ""
        return Choice(False, f"{looked}: NCCL's own network{ending}", _REMEDY)
    why = f"NCCL_NET_PLUGIN={names}" if names else "the loader finds libnccl-net.so"
    if not _is_ours(found):
        return Choice(False, f"{found}, since {why}", _REMEDY)
    table = _table(version)
    if network and network.lower() != _NETWORK.lower():
        return Choice(False, f"NCCL_NET={network}: not UCCL, which {why}", "export NCCL_NET=UCCL")
    if not network:
        return Choice(
            True,
            f"UCCL by {table}, since {why}; if it fails, NCCL takes its own network and says so at NCCL_DEBUG=INFO alone",
            "export NCCL_NET=UCCL",
        )
    return Choice(True, f"UCCL by {table}, since {why}; NCCL fails if it does not work")


def _first(names: str) -> Path | None:
    """The first library that NCCL finds of a list of names."""
    for name in names.split(",") if names else ["libnccl-net.so"]:
        for file in (name, f"libnccl-net-{name}.so"):
            found = _find(file)
            if found is not None:
                return found
            if "/" in name or (name.startswith("lib") and name.endswith(".so")):
                break
    return None


def _find(file: str) -> Path | None:
    """A library by its path, or by its name in the loader's folders."""
    if "/" in file:
        return Path(file) if Path(file).is_file() else None
    path = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for folder in [folder for folder in path if folder] + list(_FOLDERS):
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    return None


def _is_ours(file: Path) -> bool:
    """Whether it is this project's plugin, of any installation, or a link to it."""
    try:
        return b"ncclNetPlugin_v12" in (data := file.read_bytes()) and b"NET/UCCL: " in data
    except OSError:
        return False


def _table(version: str) -> str:
    """The newest table that a version of NCCL knows and the plugin has."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    for least, table in (((2, 30), 12), ((2, 28), 11), ((2, 26), 10), ((2, 24), 9)):
        if tuple(numbers) >= least:
            return f"table v{table}"
    return "table v8"


def main() -> int:
    """Prints the plugin's path, or why there is none; returns the exit status."""
    try:
        print(plugin_path())
    except FileNotFoundError as error:
        print(f"uccl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
