"""The entry points of the installed wheel, called as vLLM and SGLang call them, and stock NIXL behind them.

No variable is set here, and no process imports ``uccl`` itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import agents
import pytest

#: vLLM 0.33.0: ``load_general_plugins`` and ``load_plugins_by_group``, vllm/plugins/__init__.py:77-89 and 34-74. Each
#: process calls it once, and an exception of a plugin's function ends the process.
VLLM = """
from importlib.metadata import entry_points
def load():
    found = {plugin.name: plugin.load() for plugin in entry_points(group="vllm.general_plugins")}
    for function in found.values():
        function()
"""
#: SGLang 0.5.23: ``load_plugins`` and ``load_plugins_by_group``, sglang/srt/plugins/__init__.py:103-141 and 35-86.
SGLANG = """
from importlib.metadata import entry_points
def load():
    plugins = {}
    for ep in entry_points(group="sglang.srt.plugins"):
        dist_name = ep.dist.name if ep.dist else None
        plugins[ep.name] = (ep.load(), dist_name)
    for name, (function, dist_name) in plugins.items():
        function()
"""
#: The processes that vLLM's and SGLang's first process starts call the loader again.
WORKER = "load()"
AGENT = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("a", nixl_agent_config(backends=["UCCL", "UCX"]))
print(sorted(agent.backends))
"""
SEEN = """
import json, os, sys
print(json.dumps({"folder": os.environ.get("NIXL_PLUGIN_DIR"), "modules": sorted(sys.modules)}))
"""
KV_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backends": ["UCCL"]},
}
#: Ways to ask for the backend: the loader, arguments and variables.
ASKED: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "vllm serve": (VLLM, ["serve", "M", "--kv-transfer-config", json.dumps(KV_TRANSFER)], {}),
    "vllm serve, dotted": (
        VLLM,
        ["serve", "M", "--kv-transfer-config.kv_connector_extra_config.backends+", "UCCL"],
        {},
    ),
    "sglang": (SGLANG, ["--model", "M"], {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCCL"}),
    "lmcache in vllm": (VLLM, ["serve", "M"], {"LMCACHE_NIXL_BACKENDS": '["UCCL"]'}),
}
#: Command lines and variables that name the project and do not ask for the backend.
NOT_ASKED: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "vllm alone": (VLLM, ["serve", "M"], {}),
    "vllm with UCX": (VLLM, ["serve", "--kv-transfer-config", '{"backends":["UCX"]}'], {}),
    "sglang alone": (SGLANG, ["--model", "M"], {}),
    "a path": (VLLM, ["serve", "/models/UCCL/M", "--model", "UCCL-7B"], {"HOME_OF": "/opt/UCCL"}),
    "a setting of the engine": (VLLM, ["serve", "UCCL_P2P_NUM_CPUS=2"], {}),
}


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program without any of this project's variables."""
    settings = {**agents.environment("UCCL", "local", None), **env}
    inherited = {name: value for name, value in os.environ.items() if name != "NIXL_PLUGIN_DIR"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        timeout=50,
    )


def seen(code: str, *arguments: str, **env: str) -> dict[str, Any]:
    done = run(code + SEEN, *arguments, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ASKED)
def test_an_agent_finds_the_backend(plugin_dir: str, how: str) -> None:
    """In the process itself, beside UCX."""
    loader, arguments, env = ASKED[how]
    done = run(loader + "load()" + AGENT, *arguments, **env)
    assert done.stdout.splitlines()[-1:] == ["['UCCL', 'UCX']"], done.stderr


def test_nixl_may_be_imported_before(plugin_dir: str) -> None:
    """NIXL reads the variable when its first agent is made."""
    loader, arguments, env = ASKED["vllm serve"]
    done = run("import nixl._api\n" + loader + "load()" + AGENT, *arguments, **env)
    assert done.stdout.splitlines()[-1:] == ["['UCCL', 'UCX']"], done.stderr


def test_processes_that_it_starts_find_it_too(plugin_dir: str) -> None:
    """An engine's process has another command line; it inherits the variable."""
    start = "load()\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv.pop()], check=True)"
    loader, arguments, env = ASKED["vllm serve"]
    done = run(loader + start, *arguments, loader + WORKER + AGENT, **env)
    assert done.stdout.splitlines()[-1:] == ["['UCCL', 'UCX']"], done.stderr


def test_it_is_the_folder_of_the_command(plugin_dir: str) -> None:
    loader, arguments, env = ASKED["vllm serve"]
    assert seen(loader + "load()", *arguments, **env)["folder"] == plugin_dir


@pytest.mark.parametrize("how", NOT_ASKED)
def test_without_a_sign_nothing_is_set_or_loaded(how: str) -> None:
    loader, arguments, env = NOT_ASKED[how]
    # The loaders' own.
    before = seen(
        "from importlib.metadata import entry_points\n"
        "print([ep.dist.name for ep in entry_points(group='sglang.srt.plugins')])\n"
    )
    after = seen(loader + "load()", *arguments, **env)
    assert after["folder"] is None
    added = set(after["modules"]) - set(before["modules"])
    assert added <= {"uccl", "uccl._start", "__future__"}, added


def test_a_variable_that_is_set_stays(plugin_dir: str, tmp_path: Path) -> None:
    """Without the plugin in it, one line names the remedy, if the backend is asked for."""
    for how, given, lines in (
        ("vllm serve", str(tmp_path), 1),
        ("vllm serve", "", 1),
        ("vllm serve", plugin_dir, 0),
        ("vllm alone", str(tmp_path), 0),
    ):
        loader, arguments, env = {**ASKED, **NOT_ASKED}[how]
        done = run(loader + "load()\nload()" + SEEN, *arguments, **env, NIXL_PLUGIN_DIR=given)
        assert json.loads(done.stdout)["folder"] == given
        assert "uccl.nixl" not in json.loads(done.stdout)["modules"]
        assert done.stderr.count("left without the backend UCCL") == lines, done.stderr
        assert done.stderr.count(f"--nixl-plugins {given})") == lines


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_file_of_settings_asks(plugin_dir: str, tmp_path: Path, form: str) -> None:
    file = tmp_path / "serve.yaml"
    arguments = ["serve", *form.format(file).split()]
    file.write_text('kv-transfer-config: {"kv_connector_extra_config": {"backends": ["UCX"]}}\n')
    assert seen(VLLM + "load()", *arguments)["folder"] is None
    file.write_text('kv-transfer-config: {"kv_connector_extra_config": {"backends": ["UCCL"]}}\n')
    assert seen(VLLM + "load()", *arguments)["folder"] == plugin_dir
    file.unlink()
    assert seen(VLLM + "load()", *arguments)["folder"] is None
    os.mkfifo(file)
    assert seen(VLLM + "load()", *arguments)["folder"] is None, "it waits for nobody"


def test_lmcaches_file_asks(plugin_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text('transfer_channel: nixl\nnixl_backends: ["UCCL"]\n')
    done = seen(VLLM + "load()", "serve", "M", LMCACHE_CONFIG_FILE=str(file))
    assert done["folder"] == plugin_dir


#: vLLM 0.33.0 calls its loader in ``EngineArgs.__post_init__`` (vllm/engine/arg_utils.py:929-931), in
#: ``EngineCore.__init__`` (vllm/v1/engine/core.py:132-135) and in ``WorkerWrapperBase.init_worker``
#: (vllm/v1/worker/worker_base.py:279-289).
IN_PYTHON = (
    VLLM
    + """
import sys, types
from dataclasses import dataclass, field

@dataclass
class KVTransferConfig:
    kv_connector: str
    kv_connector_extra_config: dict

@dataclass
class VllmConfig:
    kv_transfer_config: object

def in_module(name, code):
    module = types.ModuleType(name)
    module.__dict__.update(load=load, dataclass=dataclass)
    exec(code, module.__dict__)
    return module

arg_utils = in_module("vllm.engine.arg_utils", '''
@dataclass
class EngineArgs:
    model: str
    kv_transfer_config: object = None
    def __post_init__(self):
        load()
''')
core = in_module("vllm.v1.engine.core", '''
class EngineCore:
    def __init__(self, vllm_config, log_stats=False):
        load()
''')
worker_base = in_module("vllm.v1.worker.worker_base", '''
class WorkerWrapperBase:
    def __init__(self):
        pass
    def __getattr__(self, attr):
        # As vLLM's: endless where there is no worker yet.
        return getattr(self.worker, attr)
    def init_worker(self, all_kwargs):
        vllm_config = all_kwargs[0].get("vllm_config")
        self.vllm_config = vllm_config
        load()
''')
def made(backend):
    return KVTransferConfig("NixlConnector", {"backends": [backend]})
"""
)
CALLS = {
    "arguments": 'arg_utils.EngineArgs("M", kv_transfer_config=made({!r}))',
    "engine": "core.EngineCore(VllmConfig(made({!r})))",
    "worker": 'worker_base.WorkerWrapperBase().init_worker([{{"vllm_config": VllmConfig(made({!r}))}}])',
}


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_that_is_made_in_python_asks(plugin_dir: str, call: str) -> None:
    for backend, expected in (("UCCL", plugin_dir), ("UCX", None)):
        code = IN_PYTHON + CALLS[call].format(backend) + "\n"
        assert seen(code)["folder"] == expected, backend


def test_configurations_of_other_programs_are_not_looked_at() -> None:
    """Only those of vLLM's own modules: other objects may act when they are asked."""
    code = IN_PYTHON.replace('"vllm.engine', '"mine.engine') + CALLS["arguments"].format("UCCL")
    assert seen(code + "\n")["folder"] is None


def test_a_folder_that_cannot_be_made_is_one_line(plugin_dir: str, tmp_path: Path) -> None:
    """The start goes on, and NIXL is as it is installed."""
    occupied = tmp_path / "file"
    occupied.touch()
    nowhere = {"XDG_CACHE_HOME": str(occupied), "TMPDIR": str(occupied)}
    loader, arguments, env = ASKED["vllm serve"]
    done = run(loader + "load()\nload()" + SEEN, *arguments, **env, **nowhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] is None
    [line] = done.stderr.splitlines()
    assert line.startswith("NIXL is left without the backend UCCL: ") and str(occupied) in line


def test_without_nixl_it_says_so(tmp_path: Path) -> None:
    """An environment in which no package of NIXL is found."""
    hide = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("nixl") else find(name, *rest)
"""
    loader, arguments, env = ASKED["sglang"]
    done = run(hide + loader + "load()" + SEEN, *arguments, **env)
    assert json.loads(done.stdout)["folder"] is None
    assert "pip install nixl" in done.stderr
