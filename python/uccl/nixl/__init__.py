"""Brings this project to NIXL: the backend ``UCCL`` for NIXL as it is installed by pip.

In a shell, before the program that uses NIXL::

    export NIXL_PLUGIN_DIR=$(python -m uccl.nixl)

or in the program, before its first agent::

    os.environ["NIXL_PLUGIN_DIR"] = uccl.nixl_plugin_dir()
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Union

from uccl.nixl import _find

__all__ = ["NixlNotFound", "plugin_dir"]

NixlNotFound = _find.NixlNotFound

#: The library that NIXL loads for the backend ``UCCL``; a wheel built without a C++ compiler lacks
#: it.
_PLUGIN = Path(__file__).with_name("libplugin_UCCL.so")


def plugin_dir(
    nixl_plugins: Union[str, os.PathLike[str], None] = None, *, instead_of_ucx: bool = False
) -> str:
    """The folder to name in ``NIXL_PLUGIN_DIR``: NIXL's own plugins and this project's.

    NIXL looks for plugins in one folder only. This one holds links to all of them, lies in the user's cache and is
    made when it is first asked for; any number of processes may do so at once.

    ``nixl_plugins`` is NIXL's own folder of plugins. Without it, it is that of the package that ``import nixl`` would
    choose among those installed. Nothing of NIXL is loaded for that.

    With ``instead_of_ucx`` NIXL finds this project's plugin under the name ``UCX`` too, for programs that ask for
    that backend alone. Kernels of NIXL's ``nixl_ep`` need UCX itself: the plugin refuses to be ``UCX`` in a process
    that has loaded them, and this function raises ``RuntimeError`` there. The ``nixl_ep`` of the distribution
    ``uccl-rs-nixl-ep`` needs no UCX.

    Raises :class:`NixlNotFound` (an ``ImportError``) if NIXL is not installed, or too old for this plugin;
    ``FileNotFoundError`` if there are no plugins where they should be; ``OSError`` if no folder can be made.
    """
    from uccl import _core

    if instead_of_ucx and _needs_ucx(sys.modules.get("nixl_ep")):
        raise RuntimeError(
            "NIXL's nixl_ep is imported here, and its kernels need UCX itself: instead_of_ucx is for programs without "
            "it, or with uccl-rs-nixl-ep (python/nixl_ep in the sources of uccl-rs), which brings nixl_ep over uccl.ep"
        )
    theirs = _find.plugins() if nixl_plugins is None else os.fspath(nixl_plugins)
    return str(_core._nixl_plugin_dir(str(_PLUGIN), theirs, instead_of_ucx))


def _needs_ucx(nixl_ep: Any) -> bool:
    """Whether a module ``nixl_ep`` is NIXL's own, and not that of ``uccl-rs-nixl-ep``."""
    return nixl_ep is not None and not getattr(nixl_ep, "IS_OVER_UCCL", False)
