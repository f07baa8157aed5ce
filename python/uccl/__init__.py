"""Moves tensors between GPUs and hosts over any link that joins them.

The point-to-point engine is :mod:`uccl.p2p`; :func:`nixl_plugin_dir` brings it to NIXL. Expert
parallelism is :mod:`uccl.ep`, which needs torch. :func:`nccl_plugin_path` is a network for NCCL.
"""

from __future__ import annotations

from typing import Any

__all__ = ["__version__", "nccl_plugin_path", "nixl_plugin_dir", "rccl_plugin_path"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from uccl._core import __version__
    from uccl.nccl import plugin_path as nccl_plugin_path
    from uccl.nccl import rccl_plugin_path
    from uccl.nixl import plugin_dir as nixl_plugin_dir


def __getattr__(name: str) -> Any:
    # Loaded only for those who ask: the package is imported whenever vLLM or SGLang starts (_start.py).
    if name == "__version__":
        from uccl._core import __version__

        return __version__
    if name == "nccl_plugin_path":
        from uccl.nccl import plugin_path

        return plugin_path
    if name == "rccl_plugin_path":
        from uccl.nccl import rccl_plugin_path

        return rccl_plugin_path
    if name == "nixl_plugin_dir":
        from uccl.nixl import plugin_dir

        return plugin_dir
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
