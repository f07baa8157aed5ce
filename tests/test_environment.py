"""Environment variables that programs for UCCL and NCCL set: each has its effect, or a warning
names it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
from uccl import p2p

MADE = "from uccl import p2p\nfor _ in range(2):\n    p2p.Endpoint(port=0, bind='127.0.0.1').close()\nprint('made')\n"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("UCCL_P2P_", "UCCL_IB_", "UCCL_SOCKET_", "NCCL_")):
            monkeypatch.delenv(name)


def told_ip() -> str:
    with p2p.Endpoint(port=0) as endpoint:
        return endpoint.parse_metadata(endpoint.get_metadata())[0]


@pytest.mark.parametrize("name", ["UCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for chosen in ("lo", "=lo", "no-such,l"):
        monkeypatch.setenv(name, chosen)
        assert told_ip() in ("127.0.0.1", "::1") and p2p.get_oob_ip() == told_ip()
    for chosen in ("no-such", "=l", "^" + ",".join(os.listdir("/sys/class/net"))):
        monkeypatch.setenv(name, chosen)
        with pytest.raises(ValueError, match="UCCL_SOCKET_IFNAME.*no such network interface"):
            told_ip()
    # An explicit address to bind takes precedence over the variable.
    with p2p.Endpoint(port=0, bind="127.0.0.1") as endpoint:
        assert endpoint.parse_metadata(endpoint.get_metadata())[0] == "127.0.0.1"


def test_ours_comes_before_nccls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no-such")
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "lo")
    assert told_ip() in ("127.0.0.1", "::1")


@pytest.mark.parametrize("name", ["UCCL_IB_HCA", "NCCL_IB_HCA"])
def test_rdma_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Missing devices fail a connection that needs them, and the reason names the variable."""
    monkeypatch.setenv(name, "no-such")
    settings: dict[str, Any] = {"port": 0, "bind": "127.0.0.1", "transport": "verbs"}
    with p2p.Endpoint(**settings) as here, p2p.Endpoint(**settings) as there:
        there.start_passive_accept()
        assert here.add_remote_endpoint(there.get_metadata()) == (False, 0)
        why = p2p.last_error() or ""
        # Without the library or the kernel's modules the choice of devices is not reached.
        assert "UCCL_IB_HCA=no-such" in why or "libibverbs" in why or "RDMA" in why, why


def test_links_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any
    for link in ("tcpx", "nccl"):
        monkeypatch.setenv("UCCL_P2P_TRANSPORT", link)
        with pytest.raises(ValueError, match="UCCL_P2P_TRANSPORT.*set tcp"):
            p2p.Endpoint(port=0)
        monkeypatch.delenv("UCCL_P2P_TRANSPORT")
        with pytest.raises(ValueError, match="set tcp"):
            p2p.Endpoint(port=0, transport=link)


def test_a_variable_without_effect_is_named_once() -> None:
    environment = {**os.environ, "UCCL_PORT_ENTROPY": "32", "UCCL_P2P_COMPRESS_STRATEGY": "none"}
    command = [sys.executable, "-W", "always", "-c", MADE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "made\n", ran.stderr
    assert ran.stderr.count("UserWarning: UCCL_PORT_ENTROPY has no effect") == 1, ran.stderr
    assert "UCCL_P2P_RDMA_QPS" in ran.stderr and "COMPRESS" not in ran.stderr
    # With warnings as errors, the warning is an exception.
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", MADE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1 and "UCCL_PORT_ENTROPY" in ran.stderr


def test_nothing_is_said_where_nothing_is_set() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p2p.Endpoint(port=0, bind="127.0.0.1").close()
