"""The choice of NCCL for its network plugin, with stand-ins of the libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import uccl
import uccl.nccl

#: Texts by which this project's plugin is known.
OURS = b"\x7fELF ... ncclNetPlugin_v12 ... NET/UCCL: ..."


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NCCL_NET_PLUGIN", "NCCL_NET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(uccl.nccl, "_FOLDERS", ())


def test_nccl_takes_its_own_network_unless_a_plugin_is_named() -> None:
    choice = uccl.nccl.choice("2.28.9")
    assert not choice.is_ours and choice.seen == "NCCL_NET_PLUGIN is not set: NCCL's own network"
    assert choice.remedy.startswith("export NCCL_NET_PLUGIN=$(python -m uccl.nccl)")


@pytest.mark.parametrize("name", ["uccl", "libnccl-net-uccl.so", "{path}", "missing,uccl"])
def test_the_plugin_is_found_by_name_and_by_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "libnccl-net-uccl.so"
    file.write_bytes(OURS)
    monkeypatch.setenv("NCCL_NET_PLUGIN", name.format(path=file))
    choice = uccl.nccl.choice("2.28.9")
    assert choice.is_ours and "table v11" in choice.seen and choice.remedy == "export NCCL_NET=UCCL"
    monkeypatch.setenv("NCCL_NET", "uccl")
    choice = uccl.nccl.choice("2.30.7")
    assert choice.is_ours and "table v12" in choice.seen and not choice.remedy
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert not uccl.nccl.choice("2.30.7").is_ours


def test_another_plugin_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnccl-net.so").write_bytes(b"\x7fELF ncclNetPlugin_v8")
    choice = uccl.nccl.choice("2.28.9")
    assert not choice.is_ours and "libnccl-net.so, since the loader finds" in choice.seen
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")
    assert "none: NCCL's own network" in uccl.nccl.choice("2.28.9").seen
    monkeypatch.setenv("NCCL_NET_PLUGIN", "missing")
    monkeypatch.setenv("NCCL_NET", "UCCL")
    assert "NCCL_NET=UCCL is no network of NCCL's" in uccl.nccl.choice("2.28.9").seen


def test_the_path_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uccl.nccl, "_PLUGIN", tmp_path / "libnccl-net-uccl.so")
    with pytest.raises(FileNotFoundError, match="made without NCCL's plugin"):
        uccl.nccl_plugin_path()
    (tmp_path / "libnccl-net-uccl.so").write_bytes(OURS)
    assert uccl.nccl_plugin_path() == uccl.rccl_plugin_path() == str(uccl.nccl._PLUGIN)


def test_a_plugin_of_the_wheel_is_this_projects() -> None:
    if not uccl.nccl._PLUGIN.exists():
        pytest.skip("lacks the plugin: the wheel was built without crates/uccl-nccl")
    assert uccl.nccl._is_ours(uccl.nccl._PLUGIN)
