"""The folder of plugins, with the installed NIXL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Callable

import agents
from agents import Agent, Pair
from peer import pattern


def test_ucx_works_from_there(plugin_dir: str, connect: Callable[..., Pair], link: str) -> None:
    """UCX finds its libraries, and these find their modules."""
    pair = connect(backend="UCX", link=link, env={"NIXL_PLUGIN_DIR": plugin_dir})
    mine, theirs = pair.bufs(1 << 20, seed_a=1)
    assert pair.a.write(mine, theirs) == "DONE"
    assert theirs.get() == pattern(1 << 20, 1).tobytes()


def test_uccl_works_from_there(plugin_dir: str, connect: Callable[..., Pair], link: str) -> None:
    pair = connect(backend="UCCL", link=link, env={"NIXL_PLUGIN_DIR": plugin_dir})
    mine, theirs = pair.bufs(1 << 20, seed_a=1)
    assert pair.a.write(mine, theirs) == "DONE"
    assert theirs.get() == pattern(1 << 20, 1).tobytes()


def test_nothing_is_lost(plugin_dir: str, agent: Callable[..., Agent]) -> None:
    """With the folder NIXL lists the same plugins as without it, and this project's."""
    lists = []
    for env in ({}, {"NIXL_PLUGIN_DIR": plugin_dir}):
        alone = agent("a", backend="UCX", env=env)
        lists.append(set(alone.nixl("get_plugin_list")))
    without, with_folder = lists
    assert "UCX" in without
    assert with_folder - {"UCCL"} == without
    if agents.BACKEND == "UCCL":
        assert "UCCL" in with_folder


def test_the_command_prints_it(plugin_dir: str) -> None:
    programs = Path(sys.executable).parent
    for command in ([sys.executable, "-m", "uccl.nixl"], [str(programs / "uccl"), "nixl-dir"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, plugin_dir + "\n"), done.stderr


def test_nixl_is_not_loaded_for_it(plugin_dir: str) -> None:
    code = """
import sys, uccl
assert uccl.nixl_plugin_dir()
print(sorted(name for name in sys.modules if name.startswith("nixl")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout in ("[]\n", "['nixl_meta_utils']\n"), done.stderr
