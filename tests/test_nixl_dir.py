"""The choice of NIXL for the folder of plugins, with stand-ins. tests/nixl uses a real NIXL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
import uccl.nixl

PYTHON = [sys.executable, "-c"]
# Sets a plugin as the wheel has it, even if this wheel was built without one.
PRINT = """
import pathlib, sys, uccl.nixl
uccl.nixl._PLUGIN = pathlib.Path(sys.argv[1])
print(uccl.nixl_plugin_dir())
"""


class Site:
    """Packages in pip's layout, none of which may be imported, and this project's plugin."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "site"
        self.cache = folder / "cache"
        self.plugin = folder / "libplugin_UCCL.so"
        self.path.mkdir()
        self.plugin.touch()

    def write(self, path: str, text: str = "") -> None:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def package(self, name: str, version: str = "1.5.1") -> None:
        """Adds one of NIXL's packages."""
        distribution = name.replace("_", "-")
        self.write(f"{name}/__init__.py", "raise AssertionError('NIXL was loaded')")
        self.write(
            f"{name}-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        )
        self.write(f".{name}.mesonpy.libs/plugins/libplugin_UCX.so", name)
        self.write(f".{name}.mesonpy.libs/libnixl.so")

    def cuda(self, major: str) -> None:
        """Adds the module by which newer releases choose their package."""
        self.write("nixl_meta_utils.py", f"def detect_cuda_major(): return {major}")

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        given = {"PYTHONPATH": str(self.path), "XDG_CACHE_HOME": str(self.cache), **env}
        return subprocess.run(
            command,
            env={**os.environ, "PYTHONSAFEPATH": "1", **given},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def plugin_dir(self, **env: str) -> Path:
        done = self.run(*PYTHON, PRINT, str(self.plugin), **env)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.rstrip("\n"))

    def refused(self) -> str:
        done = self.run(*PYTHON, PRINT, str(self.plugin))
        assert (done.returncode, done.stdout) == (1, ""), done
        return done.stderr.splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def from_package(folder: Path) -> str:
    return (folder / "libplugin_UCX.so").read_text()


def test_it_holds_both(site: Site) -> None:
    site.package("nixl_cu12")
    folder = site.plugin_dir()
    assert folder.is_relative_to(site.cache / "uccl" / "nixl")
    assert sorted(os.listdir(folder)) == ["libplugin_UCCL.so", "libplugin_UCX.so"]
    assert (folder / "libplugin_UCCL.so").samefile(site.plugin)
    assert (folder.parent / "libnixl.so").exists()


def test_of_several_the_one_that_nixl_imports(site: Site) -> None:
    """Releases up to 1.0 take the first of two names, later ones the package of the CUDA version
    that they detect."""
    site.package("nixl_cu12")
    assert from_package(site.plugin_dir()) == "nixl_cu12"
    site.package("nixl_cu13")
    assert from_package(site.plugin_dir()) == "nixl_cu13"
    for major, chosen in (("12", "nixl_cu12"), ("13", "nixl_cu13"), ("None", "nixl_cu13")):
        site.cuda(major)
        assert from_package(site.plugin_dir()) == chosen
    site.cuda("11")
    assert "pip install nixl-cu11" in site.refused()


def test_one_that_is_loaded_already_is_chosen(site: Site) -> None:
    site.package("nixl_cu12")
    site.package("nixl_cu13")
    site.write("nixl_cu12/__init__.py")
    done = site.run(*PYTHON, "import nixl_cu12" + PRINT, str(site.plugin))
    assert from_package(Path(done.stdout.strip())) == "nixl_cu12", done.stderr


def test_a_missing_package_is_named_with_the_remedy(site: Site) -> None:
    assert "pip install nixl" in site.refused()
    site.package("nixl_cu12", "0.10.1")
    assert "NIXL 0.10.1 is too old" in site.refused()
    site.package("nixl_cu13", "1.0.1")
    (site.path / ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so").unlink()
    assert "nixl-cu13 has no folder of plugins" in site.refused()
    site.write("nixl_cu13.libs/nixl/libplugin_UCX.so", "beside")
    assert from_package(site.plugin_dir()) == "beside"
    site.plugin.unlink()
    assert "install g++" in site.refused()


def test_nixl_elsewhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that names the folder needs no package."""
    site.write("opt/plugins/libplugin_UCX.so", "elsewhere")
    monkeypatch.setattr(uccl.nixl, "_PLUGIN", site.plugin)
    monkeypatch.setenv("XDG_CACHE_HOME", str(site.cache))
    folder = uccl.nixl_plugin_dir(site.path / "opt" / "plugins")
    assert isinstance(folder, str) and from_package(Path(folder)) == "elsewhere"
    with pytest.raises(FileNotFoundError, match="holds no plugins of NIXL"):
        uccl.nixl_plugin_dir(str(site.path / "opt"))


def test_many_processes_at_once(site: Site) -> None:
    site.package("nixl_cu12")
    env = {**os.environ, "PYTHONPATH": str(site.path), "XDG_CACHE_HOME": str(site.cache)}
    command = [
        *PYTHON,
        PRINT + "print(*__import__('os').listdir(uccl.nixl_plugin_dir()))",
        str(site.plugin),
    ]
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(12)
    ]
    answers = {process.communicate(timeout=50)[0] for process in started}
    assert len({answer.splitlines()[0] for answer in answers}) == 1, answers
    assert all(
        sorted(answer.split()[1:]) == ["libplugin_UCCL.so", "libplugin_UCX.so"]
        for answer in answers
    )
    assert len(os.listdir(site.cache / "uccl" / "nixl")) == 1


def test_a_cache_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    """An existing folder is used; otherwise temporary files are."""
    site.package("nixl_cu12")
    made = site.plugin_dir()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with no_writing(site.cache) as why_not:
        if why_not:
            pytest.skip(why_not)
        assert site.plugin_dir(TMPDIR=str(temporary)) == made
        site.write(".nixl_cu12.mesonpy.libs/plugins/libplugin_NEW.so")
        folder = site.plugin_dir(TMPDIR=str(temporary))
        assert folder.is_relative_to(temporary) and (folder / "libplugin_NEW.so").exists()
        assert site.plugin_dir(TMPDIR=str(temporary)) == folder


class no_writing:
    """A folder that is read-only within the block."""

    def __init__(self, folder: Path) -> None:
        self.folders = [
            path for path in (folder, *folder.rglob("*")) if path.is_dir() and not path.is_symlink()
        ]
        self.mounted = False

    def __enter__(self) -> str | None:
        # Permissions do not stop root, but a read-only mount does.
        if os.geteuid() == 0:
            folder = str(self.folders[0])
            for options in (["--bind", folder, folder], ["-o", "remount,bind,ro", folder]):
                done = subprocess.run(["mount", *options], capture_output=True, text=True)
                if done.returncode != 0:
                    self.__exit__()
                    return f"lacks the right to mount: {done.stderr.strip()}"
                self.mounted = True
            return None
        for path in self.folders:
            path.chmod(0o500)
        return None

    def __exit__(self, *_: object) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.folders[0])], check=True)
            self.mounted = False
        for path in self.folders:
            path.chmod(0o700)


def test_the_module_as_a_command(site: Site) -> None:
    site.package("nixl_cu12")
    plugin = uccl.nixl._PLUGIN
    command = site.run(sys.executable, "-m", "uccl.nixl")
    if not plugin.exists():
        assert command.returncode == 1 and "install g++" in command.stderr
        pytest.skip("lacks the plugin: this wheel was built without a C++ compiler")
    assert from_package(Path(command.stdout.strip())) == "nixl_cu12", command.stderr


@pytest.fixture
def bench_command(tmp_path: Path) -> Callable[[bytes], str]:
    def make(start: bytes) -> str:
        file = tmp_path / "bin" / "uccl"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(start)
        file.chmod(0o755)
        return str(file.parent)

    return make


def test_other_subcommands_are_the_whole_commands(
    site: Site, bench_command: Callable[[bytes], str]
) -> None:
    """The script of another environment is not called: it might call this module."""
    script = bench_command(b"#!/bin/sh\necho never\n")
    done = site.run(sys.executable, "-m", "uccl", "bench", PATH=script)
    assert done.returncode == 2 and "cargo install" in done.stderr and not done.stdout
    whole = bench_command(Path("/bin/echo").read_bytes())
    done = site.run(sys.executable, "-m", "uccl", "bench", "--quick", PATH=whole)
    assert (done.returncode, done.stdout) == (0, "bench --quick\n"), done.stderr
