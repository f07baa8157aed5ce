"""Finds the plugins of the NIXL that is installed, without loading it.

The command ``uccl nixl-dir``, which is no Python, runs this text too: it imports nothing of this package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

#: NIXL's packages, in the order in which the package ``nixl`` tries them.
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
#: Plugins of older releases have another shape, and do not say so.
_OLDEST = (1, 0)


class NixlNotFound(ImportError):
    """NIXL is not installed, or not as it can be used."""


def plugins() -> str:
    """The folder of plugins that the package which ``import nixl`` would choose comes with."""
    package = _chosen()
    _check_version(package)
    spec = importlib.util.find_spec(package)
    for where in (spec and spec.submodule_search_locations) or ():
        site = Path(where).parent
        # Where its library looks, and where wheels keep them besides.
        for folder in (site / f".{package}.mesonpy.libs/plugins", site / f"{package}.libs/nixl"):
            if any(folder.glob("libplugin_*.so")):
                return str(folder)
    raise NixlNotFound(
        f"{_distribution(package)} has no folder of plugins beside it: say where it is (nixl_plugins)"
    )


def _chosen() -> str:
    for package in _PACKAGES:
        if package in sys.modules:
            return package
    major = _cuda_major()
    for package in [f"nixl_cu{major}"] if major else _PACKAGES:
        if importlib.util.find_spec(package):
            return package
    if major and any(map(importlib.util.find_spec, _PACKAGES)):
        raise NixlNotFound(
            f"CUDA {major} was found, but not NIXL for it: pip install nixl-cu{major}"
        )
    raise NixlNotFound("NIXL is not installed: pip install nixl")


def _cuda_major() -> int | None:
    """The CUDA version that releases of ``nixl`` with such a check find; None for other releases."""
    if not importlib.util.find_spec("nixl_meta_utils"):
        return None
    try:
        import nixl_meta_utils

        found: int | None = nixl_meta_utils.detect_cuda_major()
        return found
    except Exception:
        # A problem with CUDA's packages is for import nixl to report.
        return None


def _check_version(package: str) -> None:
    try:
        version = importlib.metadata.version(_distribution(package))
    except importlib.metadata.PackageNotFoundError:
        # NIXL was not installed by pip, so its version is unknown and its user's concern.
        return
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        raise NixlNotFound(
            f"NIXL {version} is too old for this plugin: pip install 'nixl>={'.'.join(map(str, _OLDEST))}'"
        )


def _distribution(package: str) -> str:
    return package.replace("_", "-")


if __name__ == "__main__":
    try:
        print(plugins())
    except NixlNotFound as error:
        sys.exit(str(error))
