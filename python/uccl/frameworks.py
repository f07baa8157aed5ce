"""``python -m uccl.frameworks``: the parts of this project that each installed framework would use, and why.

``uccl doctor`` shows the same. Nothing is imported of a framework, and nothing is changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Literal

from uccl import nccl, nixl
from uccl.nixl import _find

__all__ = ["Finding", "findings", "text"]

_VARIABLE = "NIXL_PLUGIN_DIR"
_OWN_NAME = "export NIXL_PLUGIN_DIR=$(python -m uccl.nixl)"
_UCX_NAME = "export NIXL_PLUGIN_DIR=$(python -m uccl.nixl --instead-of-ucx)"
_DEEP_EP = "pip install ./python/deep_ep, in the sources of uccl-rs"
_MOONCAKE = "pip install ./python/mooncake, in the sources of uccl-rs"
_NIXL_EP = "pip install --force-reinstall --no-deps ./python/nixl_ep, in the sources of uccl-rs"
_UCX_FILE = "libplugin_UCX.so"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation about one framework, with the remedy where it would not use this project."""

    about: str
    #: ``fine``: it uses this project, or needs the name of a backend alone. ``note``: it does not, as things are.
    level: Literal["fine", "note"]
    seen: str
    remedy: str = ""


def findings() -> list[Finding]:
    """The parts that each framework installed here would use, with the variables of this process."""
    nixl_state = _Nixl()
    return [
        finding
        for name, (module, examine) in _FRAMEWORKS.items()
        if (version := _version(name, module)) is not None
        for finding in examine(f"{name} {version}".rstrip(), nixl_state)
    ]


def text(found: list[Finding]) -> str:
    """Findings for people, in the form of ``uccl doctor``."""
    lines = []
    for finding in found:
        lines.append(
            f"{'ok' if finding.level == 'fine' else 'note':6}  {finding.about}: {finding.seen}"
        )
        if finding.remedy:
            lines.append(f"        remedy: {finding.remedy}")
    return "\n".join(lines or ["no framework that this project knows is installed here"])


class _Nixl:
    """The NIXL of this environment, and the plugins that a process with these variables would find."""

    def __init__(self) -> None:
        #: The reason why the backend UCCL cannot be had here; empty if it can.
        self.lacking = ""
        self.plugins = Path()
        try:
            self.plugins = Path(_find.plugins())
        except ImportError as error:
            self.lacking = str(error)
        if not self.lacking and not nixl._PLUGIN.exists():
            self.lacking = "this wheel was built without its plugin: install g++ and build it again"
        given = os.environ.get(_VARIABLE)
        self.folder = None if given is None else Path(given)

    def is_ours(self, file: str) -> bool:
        """Whether the folder of the variable has this project's plugin under a file name."""
        return self.folder is not None and _is_plugin(self.folder / file)

    @property
    def has_ucx_name(self) -> bool:
        return not self.lacking and self.is_ours(_UCX_FILE)

    @property
    def has_own_name(self) -> bool:
        return not self.lacking and self.is_ours("libplugin_UCCL.so")

    def of_another(self) -> Path | None:
        """NIXL's plugins that the folder links, if they are another NIXL's."""
        files = [] if self.folder is None else sorted(self.folder.glob("libplugin_*.so"))
        linked = {file.resolve().parent for file in files if not _is_plugin(file)}
        return next(iter(linked - {self.plugins.resolve()}), None)


def _is_plugin(file: Path) -> bool:
    """Whether it is this project's plugin, of any installation, or a link to it."""
    file = file.resolve()
    return file.name == nixl._PLUGIN.name and file.exists()


def _version(name: str, module: str) -> str | None:
    """The version of an installed framework; empty if pip does not know it, None if it is not there."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        return None if importlib.util.find_spec(module) is None else ""
    except (ImportError, ValueError):
        return None


def _nixl(about: str, state: _Nixl) -> Iterator[Finding]:
    if state.lacking:
        yield Finding(about, "note", f"the backend UCCL cannot be had: {state.lacking}")
    elif state.folder is None:
        yield Finding(
            about,
            "fine",
            "the backend UCCL is found by vLLM and SGLang, which set NIXL_PLUGIN_DIR if they are asked for it, and "
            f"by other programs after {_OWN_NAME}",
        )
    elif not state.has_own_name:
        yield Finding(
            about,
            "note",
            f"{_VARIABLE}={state.folder} has no plugin of this project: no program finds the backend UCCL",
            f"unset {_VARIABLE}, or export {_VARIABLE}=$(python -m uccl.nixl --nixl-plugins {state.folder})",
        )
    elif state.of_another():
        yield Finding(
            about,
            "note",
            f"{_VARIABLE} has the plugins of another NIXL, {state.of_another()}",
            _UCX_NAME if state.has_ucx_name else _OWN_NAME,
        )
    else:
        names = (
            "UCCL and UCX are both this project's"
            if state.has_ucx_name
            else "UCCL is this project's, UCX NIXL's own"
        )
        yield Finding(about, "fine", f"{_VARIABLE} is set: {names}")


def _vllm(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _kv_transfer(
        about,
        state,
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        'NixlConnector uses UCCL if kv_connector_extra_config has "backends": ["UCCL"]',
    )
    yield _by_ucx_name(
        about,
        state,
        "the EPLB communicator nixl, the EC connector, weight transfer over Ray and sleep mode",
    )
    yield _experts(
        about, "--all2all-backend deepep_low_latency, deepep_high_throughput and deepep_v2"
    )
    yield _elastic_experts(about, "--all2all-backend nixl_ep")


def _sglang(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _kv_transfer(
        about,
        state,
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
        "--disaggregation-transfer-backend nixl uses UCCL if SGLANG_DISAGGREGATION_NIXL_BACKEND=UCCL",
    )
    yield _experts(about, "--moe-a2a-backend deepep")
    yield _elastic_experts(about, "--moe-a2a-backend nixl")


def _kv_transfer(about: str, state: _Nixl, group: str, allowed: str, how: str) -> Finding:
    about = f"{about}, KV transfer"
    if state.lacking:
        return Finding(about, "note", f"not by UCCL: {state.lacking}")
    if state.has_own_name:
        return Finding(about, "fine", f"{how}; {_VARIABLE} is set")
    if state.folder is not None:
        return Finding(
            about, "note", f"not by UCCL: {_VARIABLE}={state.folder}", f"unset {_VARIABLE}"
        )
    listed = os.environ.get(allowed)
    if listed and "uccl" not in [name.strip() for name in listed.split(",")]:
        return Finding(
            about,
            "note",
            f"not by UCCL: {allowed}={listed} leaves the entry point uccl out",
            f"add uccl to {allowed}, or {_OWN_NAME}",
        )
    if not _has_entry_point(group):
        return Finding(
            about,
            "note",
            f"not by UCCL: this installation has no entry point {group}",
            f"install this project's wheel anew, or {_OWN_NAME}",
        )
    return Finding(about, "fine", f"{how}; nothing else has to be set")


def _has_entry_point(group: str) -> bool:
    try:
        distribution = importlib.metadata.distribution("uccl-rs")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(point.group == group for point in distribution.entry_points)


def _by_ucx_name(about: str, state: _Nixl, parts: str) -> Finding:
    about = f"{about}, UCX by name"
    if state.lacking:
        return Finding(about, "note", f"{parts}: not by UCCL: {state.lacking}")
    if state.has_ucx_name:
        return Finding(about, "fine", f"{parts}: UCCL, which {_VARIABLE} has under the name UCX")
    return Finding(about, "note", f"{parts}: UCX itself", f"for UCCL, {_UCX_NAME}")


def _experts(about: str, options: str) -> Finding:
    about, found = f"{about}, experts", _deep_ep_is_ours()
    if found is None:
        return Finding(
            about,
            "note",
            f"{options}: not by this project: deep_ep is not installed",
            _DEEP_EP,
        )
    if found:
        return Finding(about, "fine", f"{options}: this project's deep_ep")
    return Finding(
        about,
        "note",
        f"{options}: another deep_ep is installed",
        f"pip uninstall deep_ep; {_DEEP_EP}",
    )


def _deep_ep_is_ours() -> bool | None:
    return _is_ours("deep_ep", "uccl-rs-deep-ep")


def _elastic_experts(about: str, option: str) -> Finding:
    about, found = f"{about}, elastic experts", _nixl_ep_is_ours()
    if found:
        return Finding(about, "fine", f"{option}: this project's nixl_ep")
    return Finding(
        about,
        "note",
        f"{option}: nixl_ep is not installed"
        if found is None
        else f"{option}: not by this project: nixl_ep is NIXL's, on UCX",
        _NIXL_EP,
    )


def _nixl_ep_is_ours() -> bool | None:
    """Whether this project's distribution has the module ``nixl_ep``. NIXL's wheel has a file of the
    same path: the one that was installed last is there."""
    ours = _is_ours("nixl_ep", "uccl-rs-nixl-ep")
    spec = importlib.util.find_spec("nixl_ep")
    if not ours or spec is None or not spec.origin:
        return ours
    return "uccl" in Path(spec.origin).read_text(encoding="utf-8")


def _is_ours(module: str, distribution: str) -> bool | None:
    """Whether this project's distribution has the module; None if there is no module of this name."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return None
    try:
        ours = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    files = [Path(str(ours.locate_file(file))) for file in ours.files or ()]
    origin = Path(spec.origin).resolve()
    # An editable installation lists a file that points to the sources.
    return any(file.resolve() == origin for file in files) or any(
        "editable" in file.name for file in files
    )


def _ray(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _by_ucx_name(about, state, "the tensor transport nixl")


def _verl(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _by_ucx_name(about, state, "the checkpoint engine nixl")


def _lmcache(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _kv_transfer(
        about,
        state,
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        'in vLLM, transfer_channel: nixl uses UCCL if nixl_backends: ["UCCL"]',
    )
    yield _by_ucx_name(about, state, "the multi-process mode")


def _dynamo(about: str, state: _Nixl) -> Iterator[Finding]:
    yield _by_ucx_name(
        about, state, "multimodal embeddings (KV transfer is that of vLLM or SGLang)"
    )


def _megatron(about: str, _state: _Nixl) -> Iterator[Finding]:
    yield _experts(about, "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep")


def _mooncake(about: str, _state: _Nixl) -> Iterator[Finding]:
    yield (
        Finding(about, "fine", "this project's: mooncake.engine calls uccl.p2p")
        if _is_ours("mooncake", "uccl-rs-mooncake")
        else Finding(
            about,
            "note",
            "not this project's",
            f"pip uninstall mooncake-transfer-engine; {_MOONCAKE}",
        )
    )


def _deep_ep(about: str, _state: _Nixl) -> Iterator[Finding]:
    yield (
        Finding("deep_ep", "fine", "this project's: it calls uccl.ep")
        if _deep_ep_is_ours()
        else Finding(
            "deep_ep",
            "note",
            "not this project's",
            f"pip uninstall deep_ep; {_DEEP_EP}",
        )
    )


def _nixl_ep(about: str, _state: _Nixl) -> Iterator[Finding]:
    yield (
        Finding(about, "fine", "this project's: it calls uccl.ep")
        if _nixl_ep_is_ours()
        else Finding(about, "note", "NIXL's own, on UCX", _NIXL_EP)
    )


def _nccl(about: str, _state: _Nixl) -> Iterator[Finding]:
    choice = nccl.choice(about.rpartition(" ")[2])
    level: Literal["fine", "note"] = "fine" if choice.is_ours else "note"
    yield Finding(f"{about}, network", level, choice.seen, choice.remedy)


#: The name of each framework's distribution, its module, and the function that examines it.
_FRAMEWORKS: dict[str, tuple[str, Callable[[str, _Nixl], Iterator[Finding]]]] = {
    "nixl": ("nixl", _nixl),
    "vllm": ("vllm", _vllm),
    "sglang": ("sglang", _sglang),
    "ray": ("ray", _ray),
    "lmcache": ("lmcache", _lmcache),
    "verl": ("verl", _verl),
    "ai-dynamo": ("dynamo", _dynamo),
    "megatron-core": ("megatron.core", _megatron),
    "deep_ep": ("deep_ep", _deep_ep),
    "mooncake": ("mooncake", _mooncake),
    "nixl_ep": ("nixl_ep", _nixl_ep),
    # A library: no module of theirs is looked for.
    "nvidia-nccl-cu12": ("", _nccl),
    "nvidia-nccl-cu13": ("", _nccl),
}


def main() -> int:
    """Prints the findings; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m uccl.frameworks", description=findings.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = findings()
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        print(text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
