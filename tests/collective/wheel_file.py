"""The collective module of UCCL's own wheel, unmodified, over this project's engine.

The wheel's engine needs GPUs and RDMA. Its Python file calls ``p2p`` and ``utils``, and names ``cuda`` devices: it gets
this project's ``p2p``, its own ``utils``, and a ``torch`` where the device of a number is the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from packages import unpacked

#: The packages that the wheel's file imports.
IMPORTED = ["intervaltree==3.1.0", "sortedcontainers==2.4.0"]
_loaded: dict[str, Any] = {}


def fetch() -> Path:
    """The folder of the wheel, which is for Python 3.12: its Python files make no use of that."""
    for name in IMPORTED:
        unpacked(name)
    return unpacked("uccl==0.1.1", "--python-version", "3.12", "--only-binary=:all:")


class _Torch(types.ModuleType):
    """torch, with the CPU for every device, and no GPU to wait for."""

    def __init__(self) -> None:
        super().__init__("torch")
        import torch

        self._torch = torch
        self.cuda = types.SimpleNamespace(synchronize=lambda *_: None)

    def device(self, _name: str) -> Any:
        return self._torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def load() -> Any:
    """The wheel's module."""
    if "collective" in _loaded:
        return _loaded["collective"]
    from uccl import p2p

    sys.path += [str(unpacked(name)) for name in IMPORTED]
    package = types.ModuleType("uccl_wheel")
    package.__path__ = []
    package.p2p = p2p  # type: ignore[attr-defined]
    sys.modules.update({"uccl_wheel": package, "uccl_wheel.p2p": p2p})
    for name in ("utils", "collective"):
        spec = importlib.util.spec_from_file_location(
            f"uccl_wheel.{name}", fetch() / "uccl" / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"uccl_wheel.{name}"] = module
        setattr(package, name, module)
        # The file imports torch by its name.
        real = sys.modules["torch"]
        if name == "collective":
            sys.modules["torch"] = _Torch()
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules["torch"] = real
        _loaded[name] = module
    return _loaded["collective"]
