"""Fixtures: agents of a stock NIXL, with this project's backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import agents
from agents import BACKEND, LINKS, Agent, Pair
from peer import Peer

#: Older releases are refused; the test of this refusal is the only one for them.
if () < agents.release() < (1, 0):
    collect_ignore_glob = ["test_[!o]*.py"]
else:
    collect_ignore_glob = ["test_old_release.py"]


def pytest_report_header() -> str:
    version = ".".join(map(str, agents.release())) or "not installed"
    return f"NIXL {version}, backend {BACKEND}"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets a cache folder for the tests alone, and removes the user's settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("NIXL_PLUGIN_DIR", raising=False)
        yield


@pytest.fixture(scope="session")
def plugin_dir() -> str:
    """The folder with this project's plugin and NIXL's own."""
    import uccl

    if not agents.release():
        pytest.skip("lacks NIXL")
    try:
        return uccl.nixl_plugin_dir()
    except FileNotFoundError as error:
        pytest.skip(f"lacks the plugin: {error}")


@pytest.fixture(scope="session")
def quick_plugin_dir(plugin_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of plugins for most tests, which need this project's plugin alone.

    Releases before 1.1 load all plugins of the folder for each agent, which takes longer than most
    tests.
    """
    if agents.release() >= (1, 1):
        return plugin_dir
    folder = tmp_path_factory.mktemp("plugins")
    name = "libplugin_UCCL.so"
    (folder / name).symlink_to(os.path.realpath(os.path.join(plugin_dir, name)))
    return str(folder)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Starts helper processes for agents: ``start(backend=, link=, NAME=value...)``; they end with
    the test."""
    if not agents.release():
        pytest.skip("lacks NIXL")
    peers: list[Peer] = []

    def make(*, backend: str = BACKEND, link: str = "local", **env: str) -> Peer:
        # NIXL's own backends work without the folder; test_plugin_dir.py checks that they work with
        # it.
        folder = request.getfixturevalue("quick_plugin_dir") if backend == "UCCL" else None
        peers.append(agents.start(backend, link, folder, **env))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def agent(start: Callable[..., Peer]) -> Callable[..., Agent]:
    """Opens an agent in a process of its own:

    ``agent("name", link=, backend=, progress_thread=, env={}, **params)``.
    """

    return lambda name, **kwargs: begun(start, name, **kwargs).opened()


@pytest.fixture
def connect(start: Callable[..., Peer]) -> Callable[..., Pair]:
    """Connects two agents in two processes, with the settings of ``agent``."""

    def make(**kwargs: Any) -> Pair:
        a, b = (begun(start, name, **kwargs) for name in "ab")
        return Pair(a.opened(), b.opened())

    return make


def begun(
    start: Callable[..., Peer],
    name: str,
    *,
    backend: str = BACKEND,
    link: str = "local",
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> Agent:
    peer = start(backend=backend, link=link, **(env or {}))
    return Agent(peer, name, backend, **kwargs)


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(connect: Callable[..., Pair], link: str) -> Pair:
    """Two agents in two processes, over each link."""
    return connect(link=link)


@pytest.fixture
def together(start: Callable[..., Peer]) -> Pair:
    """Two agents in one process."""
    peer = start()
    return Pair(Agent(peer, "a").opened(), Agent(peer, "b").opened())


@pytest.fixture(params=[*LINKS, "together"])
def any_pair(request: pytest.FixtureRequest) -> Pair:
    """Two agents, in two processes over each link and in one."""
    if request.param == "together":
        return request.getfixturevalue("together")
    return request.getfixturevalue("connect")(link=request.param)
