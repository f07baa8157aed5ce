"""Moves tensors between GPUs and hosts over any link that joins them.

The point-to-point engine is :mod:`uccl.p2p`; :func:`nixl_plugin_dir` brings it to NIXL. Expert
parallelism is :mod:`uccl.ep`, which needs torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["__version__", "nixl_plugin_dir"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from uccl._core import __version__
    from uccl.nixl import plugin_dir as nixl_plugin_dir


def __getattr__(name: str) -> Any:
    # Loaded only for those who ask: the package is imported whenever vLLM or SGLang starts (_start.py).
    if name == "__version__":
        from uccl._core import __version__

        return __version__
    if name == "nixl_plugin_dir":
        from uccl.nixl import plugin_dir

        return plugin_dir
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
