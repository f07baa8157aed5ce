"""This project's plugin under UCX's name: programs that ask stock NIXL for ``UCX`` and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import agents
import pytest
import uccl
from agents import LINK_ENV, Agent, Pair
from peer import PeerError, pattern

MIB = 1 << 20


@pytest.fixture(scope="session")
def ucx_dir(plugin_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with this project's plugin under both names."""
    folder = uccl.nixl_plugin_dir(instead_of_ucx=True)
    if agents.release() >= (1, 1):
        return folder
    # Earlier releases load all plugins of the folder for each agent, which takes longer than a test.
    quick = tmp_path_factory.mktemp("plugins")
    for name in ("libplugin_UCX.so", "libplugin_UCCL.so"):
        (quick / name).symlink_to(os.path.realpath(os.path.join(folder, name)))
    return str(quick)


@pytest.fixture
def pair(connect: Callable[..., Pair], ucx_dir: str, link: str) -> Pair:
    """Two agents in two processes that ask for UCX."""
    return connect(
        backend="UCX", link=link, env={"NIXL_PLUGIN_DIR": ucx_dir, **LINK_ENV["UCCL", link]}
    )


class TestTransfers:
    def test_the_backend_is_ours(self, pair: Pair) -> None:
        assert pair.a.call("backends") == ["UCX"]
        assert "transport" in pair.a.nixl("get_plugin_params", "UCX")

    def test_writes_and_reads_with_notifications(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(MIB, seed_a=1, seed_b=2)
        before = theirs.get()
        assert pair.a.write(mine, theirs, notif=b"written") == "DONE"
        assert theirs.get() == pattern(MIB, 1).tobytes()
        assert pair.b.notifs() == {"a": [b"written"]}
        other = pair.b.buf(MIB, seed=2)
        pair.meet()
        assert pair.a.read(mine, other, notif=b"read") == "DONE"
        assert mine.get() == before == pattern(MIB, 2).tobytes()
        assert pair.b.notifs() == {"a": [b"read"]}
        assert mine.guarded() and theirs.guarded() and other.guarded()

    def test_prepared_lists_again_and_again(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(MIB, seed_a=3)
        count, size = 64, 4096
        here, there = (buffer.pieces(count, size, stride=2 * size) for buffer in (mine, theirs))
        key = pair.a.prepare_prepped("WRITE", here, there)
        for _ in range(3):
            theirs.fill(0)
            assert pair.a.run(key) == "DONE"
            data = theirs.get()
            assert data[: 2 * size] == pattern(MIB, 3).tobytes()[:size] + bytes(size)
        pair.a.release(key)

    def test_notifications_alone(self, pair: Pair) -> None:
        pair.meet()
        pair.a.notify(pair.b, b"x" * 100_000)
        pair.b.notify(pair.a, b"back")
        assert pair.b.notifs() == {"a": [b"x" * 100_000]}
        assert pair.a.notifs() == {"b": [b"back"]}

    def test_an_agent_that_dies_is_told(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(MIB)
        key = pair.a.prepare("WRITE", mine, theirs)
        assert pair.a.run(key) == "DONE"
        pair.b.kill()
        with pytest.raises(PeerError, match="nixlRemoteDisconnect"):
            for _ in range(1000):
                pair.a.run(key)


def test_ucx_itself_at_the_other_end_is_told(
    agent: Callable[..., Agent], ucx_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ends need the folder; without it at one, both refuse the other's metadata, and live on."""
    ours = agent("a", backend="UCX", env={"NIXL_PLUGIN_DIR": ucx_dir})
    theirs = agent("b", backend="UCX")
    for one in (ours, theirs):
        one.buf(4096)
    with pytest.raises(PeerError):
        ours.meet(theirs)
    assert "the other one may have UCX itself" in capfd.readouterr().err
    with pytest.raises(PeerError, match="nixlBackendError"):
        theirs.meet(ours)
    assert [one.call("backends") for one in (ours, theirs)] == [["UCX"], ["UCX"]]


def run(code: str, folder: str, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {**agents.environment("UCCL", "local", folder), "NIXL_LOG_LEVEL": "WARN", **env}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=50,
    )


def ours_in(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that the plugin logs."""
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if " plugin_UCCL::" in line]


START = "from nixl._api import nixl_agent, nixl_agent_config\n"


@pytest.mark.parametrize(
    "made",
    [
        # Ray 2.60.0, ray/experimental/rdt/nixl_tensor_transport.py:239-247.
        'nixl_agent("a", nixl_agent_config(backends=["UCX"]))',
        # verl 0.9.1, verl/checkpoint_engine/nixl_checkpoint_engine.py:62.
        'nixl_agent("a")',
        # Dynamo 1.6.1, dynamo/common/multimodal/embedding_transfer.py:406-407.
        'nixl_agent("a", nixl_agent_config(num_threads=8, capture_telemetry=True))',
        # vLLM 0.33.0, vllm/distributed/eplb/eplb_communicator.py:361.
        'nixl_agent("a", nixl_agent_config(capture_telemetry=False))',
        # LMCache 0.5.6, lmcache/v1/distributed/transfer_channel/impl/nixl_impl.py:336-339.
        'nixl_agent("a", nixl_agent_config(backends=["UCX"]))',
    ],
    ids=["ray", "verl", "dynamo", "vllm eplb", "lmcache"],
)
def test_agents_as_frameworks_make_them(ucx_dir: str, made: str) -> None:
    done = run(f"{START}print(list({made}.backends))", ucx_dir)
    assert ours_in(done) == [], "nothing is without effect"
    assert done.stdout == "['UCX']\n"


def test_both_names_in_one_agent(ucx_dir: str) -> None:
    done = run(
        START
        + 'print(sorted(nixl_agent("a", nixl_agent_config(backends=["UCX", "UCCL"])).backends))',
        ucx_dir,
    )
    assert done.stdout == "['UCCL', 'UCX']\n", done.stderr


PARAMS = (
    START
    + """
for name, params in (
    ("a", {"device_list": "mlx5_0, mlx5_1", "num_workers": "2", "engine_config": "MAX_RMA_RAILS=2"}),
    ("b", {"device_list": "mlx5_0", "ucx_error_handling_mode": "none", "num_threads": "0"}),
    ("c", {"device_list": "mlx5_1", "ucx_error_handling_mode": "peer", "num_threads": "2"}),
    ("d", {"timeout_ms": "250", "split_batch_size": ""}),
):
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("UCX", params)
    print(list(agent.backends))
"""
)


def test_parameters_without_effect_are_named_once(ucx_dir: str) -> None:
    done = run(PARAMS, ucx_dir, UCX_TLS="tcp")
    assert done.stdout.splitlines() == ["['UCX']"] * 4
    first, second = ours_in(done)
    assert first.endswith("without effect are: UCX_TLS, device_list, engine_config, num_workers")
    assert second.endswith("without effect are: ucx_error_handling_mode")


def test_a_wrong_value_of_our_own_setting_is_refused(ucx_dir: str) -> None:
    code = (
        START
        + 'nixl_agent("a", nixl_agent_config(backends=[])).create_backend("UCX", {"timeout_ms": "soon"})'
    )
    done = run(code, ucx_dir)
    assert done.returncode != 0 and "TIMEOUT_MS" in done.stderr


#: Any library stands in for the one with nixl_ep's kernels, which loads where there is CUDA.
KERNELS = (
    START
    + """
import _json, ctypes, shutil, sys
stand_in = sys.argv[1] + "/nixl_ep_cpp_torch211.cpython-311-x86_64-linux-gnu.so"
shutil.copy(_json.__file__, stand_in)
ctypes.CDLL(stand_in)
try:
    nixl_agent("a")
except Exception as error:
    print(type(error).__name__)
print(list(nixl_agent("b", nixl_agent_config(backends=["UCCL"])).backends))
"""
)


def test_it_is_refused_beside_nixl_eps_kernels(ucx_dir: str, tmp_path: Path) -> None:
    """Under its own name the backend works there."""
    done = run(KERNELS.replace("sys.argv[1]", repr(str(tmp_path))), ucx_dir)
    assert done.stdout.splitlines() == ["nixlBackendError", "['UCCL']"], done.stderr
    [line] = ours_in(done)
    assert "nixl_ep_cpp_torch211" in line and "unset NIXL_PLUGIN_DIR" in line


VIEW = (
    START
    + """
import numpy as np
agent, memory = nixl_agent("a"), np.zeros(4096, np.uint8)
agent.register_memory([(memory.ctypes.data, 4096, 0, "")], "DRAM")
try:
    agent.prep_mem_view(agent.get_xfer_descs([(memory.ctypes.data, 4096, 0)], "DRAM"))
except Exception as error:
    print(type(error).__name__)
"""
)


def test_memory_views_are_refused_with_words(ucx_dir: str) -> None:
    if agents.release() < (1, 5):
        pytest.skip("lacks prep_mem_view: it came with NIXL 1.5")
    done = run(VIEW, ucx_dir)
    assert done.stdout == "nixlNotSupportedError\n", done.stderr
    [line] = ours_in(done)
    assert "memory views" in line and "--instead-of-ucx" in line


def test_no_folder_is_made_beside_nixl_ep(plugin_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_ep", sys)
    with pytest.raises(RuntimeError, match="nixl_ep is imported.*uccl-rs-nixl-ep"):
        uccl.nixl_plugin_dir(instead_of_ucx=True)
    assert uccl.nixl_plugin_dir() == plugin_dir
    # This project's needs no UCX.
    monkeypatch.setitem(sys.modules, "nixl_ep", SimpleNamespace(IS_OVER_UCCL=True))
    uccl.nixl_plugin_dir(instead_of_ucx=True)


def test_the_command_prints_the_folder(plugin_dir: str) -> None:
    expected = uccl.nixl_plugin_dir(instead_of_ucx=True)
    assert expected != plugin_dir
    own, ucx = (Path(expected, f"libplugin_{name}.so") for name in ("UCCL", "UCX"))
    assert own.samefile(ucx) and own.samefile(Path(plugin_dir, own.name))
    uccl_script = str(Path(sys.executable).with_name("uccl"))
    for command in ([sys.executable, "-m", "uccl.nixl"], [uccl_script, "nixl-dir"]):
        done = subprocess.run(
            [*command, "--instead-of-ucx"], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
