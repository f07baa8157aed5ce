"""The collective module of UCCL's own wheel, unmodified, over this project's engine.

The wheel's engine needs GPUs and RDMA. Its Python file calls ``p2p`` and ``utils``, and names ``cuda`` devices: it gets
this project's ``p2p``, its own ``utils``, and a ``torch`` where the device of a number is the CPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "uccl" / "collective"
#: The wheel, and the packages that its file imports.
NEEDED = ["uccl==0.1.1", "intervaltree==3.1.0", "sortedcontainers==2.4.0"]
_loaded: dict[str, Any] = {}


def fetch() -> str | None:
    """Gets the files from PyPI, unless they are there. The reason, if that fails."""
    if (CACHE / "done").exists():
        return None
    files = CACHE / "files"
    # The wheel is for Python 3.12, of which its Python files make no use.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(files)]
    for name in NEEDED:
        version = ["--python-version", "3.12", "--only-binary=:all:"] if "uccl" in name else []
        ran = subprocess.run([*command, *version, name], capture_output=True, text=True)
        if ran.returncode:
            return f"{name}: {ran.stderr.strip()[-200:]}"
    for file in files.iterdir():
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(CACHE)
        else:
            subprocess.run(["tar", "-C", str(CACHE), "-xzf", str(file)], check=True)
    (CACHE / "done").touch()
    return None


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

    for folder in [CACHE, *CACHE.glob("intervaltree-*")]:
        sys.path.append(str(folder))
    package = types.ModuleType("uccl_wheel")
    package.__path__ = []
    package.p2p = p2p  # type: ignore[attr-defined]
    sys.modules.update({"uccl_wheel": package, "uccl_wheel.p2p": p2p})
    for name in ("utils", "collective"):
        spec = importlib.util.spec_from_file_location(
            f"uccl_wheel.{name}", CACHE / "uccl" / f"{name}.py"
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
