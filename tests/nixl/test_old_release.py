"""A NIXL release with another plugin interface."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import agents
import pytest
import uccl
import uccl.nixl


def test_it_is_refused_with_the_remedy() -> None:
    with pytest.raises(ImportError, match=r"NIXL 0\.10\.1 is too old.*pip install 'nixl>="):
        uccl.nixl_plugin_dir()


def test_the_plugin_refuses_it_too() -> None:
    """A plugin that was copied there by hand fails with an error, and the process continues."""
    package = importlib.util.find_spec("nixl_cu12")
    assert package is not None and package.submodule_search_locations
    site = Path(package.submodule_search_locations[0]).parent
    try:
        folder = uccl.nixl_plugin_dir(site / ".nixl_cu12.mesonpy.libs" / "plugins")
    except FileNotFoundError as error:
        pytest.skip(f"lacks the plugin: {error}")
    peer = agents.start("UCCL", "local", folder)
    try:
        with pytest.raises(AssertionError, match="nixl"):
            agents.Agent(peer, "a", "UCCL").opened()
        assert agents.Agent(peer, "b", "UCX").opened().call("backends") == ["UCX"]
    finally:
        peer.close()
