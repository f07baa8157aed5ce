"""The examples of UCCL's README, run as written: the server's half and the client's in two
processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from peer import Peer, can_make_namespaces

TEXT = (Path(__file__).parent / "readme_examples.md").read_text()
EXAMPLES = dict(re.findall(r"### (.*?)\n\n```python\n(.*?)```", TEXT, flags=re.DOTALL))
SETUP = EXAMPLES["Basic Endpoint Setup"]
CONNECT = EXAMPLES["Client-Server Communication"]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="lacks PyTorch (pip install torch)"
)


def halves(example: str, marker: str) -> tuple[str, str]:
    """Cuts an example where the second process's part starts."""
    assert example.count(marker) == 1
    first, second = example.split(marker)
    return first, marker + second


class Place:
    """The network of the two processes, and the changes that it makes to the text."""

    def __init__(self, netns: str | None, base_port: int) -> None:
        self.netns = netns
        self.env = {"UCCL_P2P_BASE_PORT": str(base_port)}

    def text(self, code: str) -> str:
        return code if self.netns else code.replace("192.168.1.100", "127.0.0.1")


@pytest.fixture(params=["as written", "loopback"])
def place(request: pytest.FixtureRequest, base_port: int) -> Iterator[Place]:
    """A network with 192.168.1.100, so that not even the address changes; or loopback."""
    if request.param == "loopback":
        yield Place(None, base_port)
        return
    lacking = can_make_namespaces()
    if lacking:
        pytest.skip(f"lacks {lacking}")
    name = f"uccl-readme-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        address = ["addr", "add", "192.168.1.100/32", "dev", "lo"]
        subprocess.run(["ip", "-n", name, *address], check=True)
        yield Place(name, base_port)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def meet(spawn: Callable[..., Peer], place: Place, setup: str = SETUP) -> tuple[Peer, Peer]:
    """Runs the first two examples: the server as GPU 1, which the client connects to."""
    server = spawn(netns=place.netns, env=place.env)
    client = spawn(netns=place.netns, env=place.env)
    serving, connecting = halves(CONNECT, "# Client side")
    assert "local_gpu_idx=0" in setup and "remote_gpu_idx=1" in connecting
    server.call("exec", setup.replace("local_gpu_idx=0", "local_gpu_idx=1"))
    client.call("exec", setup)
    server.begin("exec", serving, ["success", "remote_ip_addr", "remote_gpu_idx", "conn_id"])
    success, conn = client.call("exec", place.text(connecting), ["success", "conn_id"])
    assert success is True
    assert isinstance(conn, int)
    success, ip, gpu, conn = server.result()
    assert success is True
    assert ip == ("192.168.1.100" if place.netns else "127.0.0.1")
    assert gpu == 0
    assert isinstance(conn, int)
    return server, client


def test_every_example_is_run_here() -> None:
    assert set(EXAMPLES) == {
        "Basic Endpoint Setup",
        "Client-Server Communication",
        "PyTorch Tensor Transfer",
        "NumPy Array Transfer",
        "Vectorized Multi-Tensor Transfer",
    }


def test_numpy(spawn: Callable[..., Peer], place: Place) -> None:
    server, client = meet(spawn, place, SETUP.replace("import torch\n", ""))
    sending, receiving = halves(EXAMPLES["NumPy Array Transfer"], "# Receive array")
    # The receiver makes its array like the sent one, so it runs that line too.
    creating, _ = halves(sending, "# Register for RDMA")
    server.begin("exec", creating + receiving, ["success", "recv_data"])
    assert client.call("exec", sending, ["success"]) == [True]
    success, received = server.result()
    assert success is True
    assert received.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


@needs_torch
def test_torch_tensor(spawn: Callable[..., Peer], place: Place) -> None:
    server, client = meet(spawn, place)
    sending, receiving = halves(EXAMPLES["PyTorch Tensor Transfer"], "# Receiver side")
    server.begin("exec", receiving + "\nok = bool((recv_tensor == 1).all())", ["success", "ok"])
    assert client.call("exec", sending, ["success"]) == [True]
    assert server.result() == [True, True]


@needs_torch
def test_torch_tensors(spawn: Callable[..., Peer], place: Place) -> None:
    server, client = meet(spawn, place)
    sending, receiving = halves(EXAMPLES["Vectorized Multi-Tensor Transfer"], "# Receiver side")
    # The receiver uses the sender's num_iovs, which each process of a real program would set.
    checked = "num_iovs = 3\n" + receiving + "\nok = all((t == 1).all() for t in recv_tensors)"
    server.begin("exec", checked, ["success", "ok"])
    assert client.call("exec", sending, ["success"]) == [True]
    assert server.result() == [True, True]


def test_vectors_without_torch(spawn: Callable[..., Peer], place: Place) -> None:
    """The vectorised example, with NumPy in place of the few names of PyTorch that it uses."""
    server, client = meet(spawn, place, SETUP.replace("import torch\n", ""))
    sending, receiving = halves(EXAMPLES["Vectorized Multi-Tensor Transfer"], "# Receiver side")
    for peer in (server, client):
        peer.call("run", "test_seed_examples", "numpy_as_torch")
    checked = (
        "num_iovs = 3\n" + receiving + "\nok = all((t.array == 1).all() for t in recv_tensors)"
    )
    server.begin("exec", checked, ["success", "ok"])
    assert client.call("exec", sending, ["success"]) == [True]
    assert server.result() == [True, True]


def numpy_as_torch(side: Any) -> None:
    """Adds a stand-in named ``torch`` to the example's names."""
    import types

    import numpy as np

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def is_contiguous(self) -> bool:
            return self.array.flags["C_CONTIGUOUS"]

        def data_ptr(self) -> int:
            return self.array.ctypes.data

        def numel(self) -> int:
            return self.array.size

        def element_size(self) -> int:
            return self.array.itemsize

    side.names["torch"] = types.SimpleNamespace(
        float32=np.float32,
        ones=lambda n, dtype: Tensor(np.ones(n, dtype)),
        zeros=lambda n, dtype: Tensor(np.zeros(n, dtype)),
    )
