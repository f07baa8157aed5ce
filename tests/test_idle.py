"""The CPU time of idle connections."""

from __future__ import annotations

import time
from typing import Callable

import pytest
from peer import Peer

CONNECTIONS = 8
SECONDS = 10
MOST = 0.005


@pytest.mark.timeout(120)
def test_idle_connections(
    spawn: Callable[..., Peer], transport: str, record_property: Callable[[str, object], None]
) -> None:
    """Eight idle connections take less than half a percent of one CPU on either side."""
    a, b = spawn(), spawn()
    settings = {"port": 0, "bind": "127.0.0.1", "transport": transport}
    metadata = b.call("open", **settings)
    a.call("open", **settings)
    for peer in (a, b):
        peer.call("buf", "m", 4096)
    advert = b.call("advert", "m")
    for _ in range(CONNECTIONS):
        b.begin("accept", timeout=20)
        conn = a.call("connect", metadata)
        b.result()
        assert a.call("op", "write", conn, "m", advert=advert) == (True, None)
    time.sleep(1)
    before = [peer.call("cpu") for peer in (a, b)]
    time.sleep(SECONDS)
    shares = [(peer.call("cpu") - used) / SECONDS for peer, used in zip((a, b), before)]
    used = f"{shares[0]:.2%} and {shares[1]:.2%} of a CPU"
    record_property("seen", f"{transport}: {CONNECTIONS} idle connections used {used}")
    assert max(shares) < MOST
