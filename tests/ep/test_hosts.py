"""Ranks on two hosts: network namespaces joined by a veth pair."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_two_hosts import LACKING, Hosts

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.xdist_group("ep"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(LACKING is not None, reason=f"lacks {LACKING}"),
]


class Pair:
    """A rank on each host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.ranks = []
        script = str(Path(__file__).with_name("host_rank.py"))
        for rank, name in enumerate(hosts.names):
            # Namespaces share their machine's memory, unlike hosts.
            environment = {**os.environ, "UCCL_EP_NODE": str(rank), "UCCL_P2P_TRANSPORT": "tcp"}
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                script,
                str(folder),
                str(rank),
                "2",
            ]
            ends: dict[str, Any] = {
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
            }
            self.ranks.append(subprocess.Popen(command, env=environment, **ends))

    def line(self, rank: int) -> str:
        """The next line of a rank; a rank prints one or ends before its deadlines have passed
        twice."""
        process = self.ranks[rank]
        text = process.stdout.readline().strip()
        return text or f"nothing: {process.communicate()[1]}"

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    hosts = Hosts("ipv4")
    made = Pair(hosts, tmp_path)
    yield made
    made.close()
    hosts.close()


def cut(pair: Pair) -> None:
    pair.hosts.link("down")


def kill(pair: Pair) -> None:
    pair.ranks[1].kill()


def stop(pair: Pair) -> None:
    os.kill(pair.ranks[1].pid, signal.SIGSTOP)


@pytest.mark.parametrize(("harm", "left"), [(cut, [0, 1]), (kill, [0]), (stop, [0])])
def test_ranks_on_two_hosts_name_the_missing_one(pair: Pair, harm, left: list[int]) -> None:
    assert [pair.line(0), pair.line(1)] == ["ready", "ready"]
    harm(pair)
    for rank in left:
        text = pair.line(rank)
        assert f" on rank {rank} " in text or f" on rank {rank}:" in text, text
        assert f"rank {1 - rank}" in text and "expected" in text, text
