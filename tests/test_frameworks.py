"""The findings of ``uccl.frameworks`` about installed frameworks, which are stand-ins that must not be imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_nixl_dir import Site

#: Prints the findings, with a plugin as the wheel has it, even if this wheel was built without one.
FINDINGS = """
import dataclasses, json, pathlib, sys, uccl.nixl
uccl.nixl._PLUGIN = pathlib.Path(sys.argv[1])
from uccl.frameworks import findings
print(json.dumps([dataclasses.asdict(finding) for finding in findings()]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def framework(site: Site, name: str, version: str = "1.2.3") -> None:
    """Adds a distribution of one module."""
    site.write(f"{name}/__init__.py", f"raise AssertionError('{name} was loaded')")
    site.write(
        f"{name}-{version}.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    )


def with_nixl(site: Site) -> None:
    site.package("nixl_cu12")
    framework(site, "nixl", "1.5.1")


def said(site: Site, **env: str) -> dict[str, tuple[str, str, str]]:
    """Level, text and remedy of each finding, by its subject."""
    done = site.run(sys.executable, "-c", FINDINGS, str(site.plugin), **{"VLLM_PLUGINS": "", **env})
    assert done.returncode == 0, done.stderr
    found = {
        item["about"]: (item["level"], item["seen"], item["remedy"])
        for item in json.loads(done.stdout)
    }
    assert len(found) == len(json.loads(done.stdout))
    return found


def test_frameworks_that_are_not_installed_are_not_named(site: Site) -> None:
    assert said(site) == {}
    framework(site, "ray")
    assert list(said(site)) == ["ray 1.2.3, UCX by name"]


@pytest.mark.parametrize("name", ["vllm", "sglang", "lmcache"])
def test_kv_transfer_needs_the_name_of_the_backend_alone(site: Site, name: str) -> None:
    framework(site, name)
    level, seen, _ = said(site)[f"{name} 1.2.3, KV transfer"]
    assert level == "note" and "NIXL is not installed" in seen
    with_nixl(site)
    level, seen, remedy = said(site)[f"{name} 1.2.3, KV transfer"]
    assert (level, remedy) == ("fine", "") and "UCCL" in seen and "nothing else" in seen


def test_a_variable_without_this_plugin_is_named(site: Site, tmp_path: Path) -> None:
    framework(site, "vllm")
    with_nixl(site)
    elsewhere = str(tmp_path / "elsewhere")
    found = said(site, NIXL_PLUGIN_DIR=elsewhere)
    for about in ("nixl 1.5.1", "vllm 1.2.3, KV transfer"):
        level, seen, remedy = found[about]
        assert level == "note" and elsewhere in seen and "unset NIXL_PLUGIN_DIR" in remedy


def test_a_list_of_plugins_without_ours_is_named(site: Site) -> None:
    framework(site, "vllm")
    with_nixl(site)
    level, seen, remedy = said(site, VLLM_PLUGINS="other")["vllm 1.2.3, KV transfer"]
    assert level == "note" and "VLLM_PLUGINS=other" in seen and "uccl" in remedy
    assert said(site, VLLM_PLUGINS="other, uccl")["vllm 1.2.3, KV transfer"][0] == "fine"


def test_the_folder_is_recognized(site: Site) -> None:
    """That of the command, one with both names, and one of an earlier NIXL."""
    with_nixl(site)
    for name in ("vllm", "ray", "verl", "lmcache"):
        framework(site, name)
    folder = site.plugin_dir()
    found = said(site, NIXL_PLUGIN_DIR=str(folder))
    assert found["nixl 1.5.1"][0] == found["vllm 1.2.3, KV transfer"][0] == "fine"
    for name in ("vllm", "ray", "verl", "lmcache"):
        level, seen, remedy = found[f"{name} 1.2.3, UCX by name"]
        assert level == "note" and seen.endswith("UCX itself") and "--instead-of-ucx" in remedy

    both = site.path / "both"
    both.mkdir()
    for name in ("UCX", "UCCL"):
        (both / f"libplugin_{name}.so").symlink_to(site.plugin)
    found = said(site, NIXL_PLUGIN_DIR=str(both))
    assert {level for about, (level, _, _) in found.items() if "experts" not in about} == {"fine"}
    assert "under the name UCX" in found["ray 1.2.3, UCX by name"][1]

    site.write("old/libplugin_POSIX.so")
    (both / "libplugin_POSIX.so").symlink_to(site.path / "old/libplugin_POSIX.so")
    level, seen, remedy = said(site, NIXL_PLUGIN_DIR=str(both))["nixl 1.5.1"]
    assert level == "note" and str(site.path / "old") in seen and "--instead-of-ucx" in remedy


def test_a_wheel_without_the_plugin_says_so(site: Site) -> None:
    with_nixl(site)
    framework(site, "ray")
    site.plugin.unlink()
    for level, seen, _ in said(site).values():
        assert level == "note" and "install g++" in seen


def test_the_deep_ep_of_others_is_told_from_ours(site: Site) -> None:
    framework(site, "vllm")
    assert "deep_ep is not installed" in said(site)["vllm 1.2.3, experts"][1]
    framework(site, "deep_ep")
    found = said(site)
    assert "another deep_ep" in found["vllm 1.2.3, experts"][1]
    assert found["deep_ep"][:2] == ("note", "not this project's")
    metadata = "Metadata-Version: 2.1\nName: uccl-rs-deep-ep\nVersion: 0.1.0\n"
    site.write("uccl_rs_deep_ep-0.1.0.dist-info/METADATA", metadata)
    site.write("uccl_rs_deep_ep-0.1.0.dist-info/RECORD", "deep_ep/__init__.py,,\n")
    found = said(site)
    assert found["deep_ep"][0] == found["vllm 1.2.3, experts"][0] == "fine"


def test_megatron_uses_deep_ep(site: Site) -> None:
    site.write(
        "megatron_core-0.19.2.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n",
    )
    level, seen, _ = said(site)["megatron-core 0.19.2, experts"]
    assert level == "note" and "flex" in seen and "deep_ep is not installed" in seen


def test_the_mooncake_of_others_is_told_from_ours(site: Site) -> None:
    site.write("mooncake/__init__.py", "raise AssertionError('mooncake was loaded')")
    level, seen, remedy = said(site)["mooncake"]
    assert (level, seen) == ("note", "not this project's")
    assert "pip uninstall mooncake-transfer-engine" in remedy
    metadata = "Metadata-Version: 2.1\nName: uccl-rs-mooncake\nVersion: 0.1.0\n"
    site.write("uccl_rs_mooncake-0.1.0.dist-info/METADATA", metadata)
    site.write("uccl_rs_mooncake-0.1.0.dist-info/RECORD", "mooncake/__init__.py,,\n")
    assert said(site)["mooncake"][0] == "fine"


def test_the_nixl_ep_of_nixl_is_told_from_ours(site: Site) -> None:
    framework(site, "vllm")
    level, seen, _ = said(site)["vllm 1.2.3, elastic experts"]
    assert level == "note" and "nixl_ep is not installed" in seen
    init = "raise AssertionError('nixl_ep was loaded')"
    site.write("nixl_ep/__init__.py", init)
    found = said(site)
    assert "nixl_ep is NIXL's" in found["vllm 1.2.3, elastic experts"][1]
    assert found["nixl_ep"][:2] == ("note", "NIXL's own, on UCX")
    assert "./python/nixl_ep" in found["nixl_ep"][2]
    metadata = "Metadata-Version: 2.1\nName: uccl-rs-nixl-ep\nVersion: 0.1.0\n"
    site.write("uccl_rs_nixl_ep-0.1.0.dist-info/METADATA", metadata)
    site.write("uccl_rs_nixl_ep-0.1.0.dist-info/RECORD", "nixl_ep/__init__.py,,\n")
    # Both distributions are installed, and NIXL's came last.
    assert said(site)["nixl_ep"][0] == "note"
    site.write("nixl_ep/__init__.py", f"{init}  # from uccl.ep import Config")
    found = said(site)
    assert found["nixl_ep"][0] == found["vllm 1.2.3, elastic experts"][0] == "fine"


def test_the_command_shows_them(site: Site) -> None:
    framework(site, "ray")
    for command in (["-m", "uccl.frameworks"], ["-m", "uccl", "doctor"]):
        done = site.run(sys.executable, *command, PATH="/nowhere")
        assert done.returncode == 0 and "ray 1.2.3, UCX by name" in done.stdout, done
    done = site.run(sys.executable, "-m", "uccl.frameworks", "--json")
    assert json.loads(done.stdout)[0]["about"] == "ray 1.2.3, UCX by name"


def test_the_network_of_nccl_is_named(site: Site) -> None:
    framework(site, "nvidia_nccl_cu13", "2.28.9")
    about = "nvidia-nccl-cu13 2.28.9, network"
    level, seen, remedy = said(site, NCCL_NET_PLUGIN="", NCCL_NET="")[about]
    assert level == "note" and "NCCL_NET_PLUGIN is not set" in seen and "uccl.nccl" in remedy
