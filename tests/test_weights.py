"""Weights of trainers in processes of their own, read by inference ranks in others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peer import Peer

Spawn = Callable[..., Peer]
SHAPE = (64, 48)


def model(version: int) -> np.ndarray:
    return (np.arange(64 * 48, dtype=np.float32) + version).reshape(SHAPE)


def ranks(spawn: Spawn, count: int, transport: str) -> list[Peer]:
    made = [spawn() for _ in range(count)]
    for rank in made:
        rank.call("open", port=0, bind="127.0.0.1", transport=transport)
    return made


def join(trainers: list[Peer], servers: list[Peer]) -> tuple[list[bytes], list[bytes]]:
    sources = [rank.call("run", "test_weights", "manifest") for rank in trainers]
    targets = [rank.call("run", "test_weights", "manifest") for rank in servers]
    for group in (trainers, servers):
        for index, rank in enumerate(group):
            rank.call("run", "test_weights", "know", sources, targets, index)
    return sources, targets


def test_rows_of_trainers_become_columns_of_servers(spawn: Spawn, transport: str) -> None:
    trainers, servers = ranks(spawn, 2, transport), ranks(spawn, 2, transport)
    for i, rank in enumerate(trainers):
        rank.call("run", "test_weights", "publish_rows", i)
    for i, rank in enumerate(servers):
        rank.call("run", "test_weights", "read_columns", i)
    join(trainers, servers)
    for version in (1, 2, 5):
        for i, rank in enumerate(trainers):
            rank.call("run", "test_weights", "change", i, version)
        for i, rank in enumerate(servers):
            fetched, columns, bias = rank.call("run", "test_weights", "fetch", version)
            assert fetched == (version, 64 * 24 * 4 + 48 * 4, 0)
            np.testing.assert_array_equal(columns, model(version)[:, i * 24 : i * 24 + 24])
            np.testing.assert_array_equal(bias, model(version)[0])
        for rank in trainers:
            rank.call("run", "test_weights", "taken", version)


def test_a_trainer_that_dies_fails_the_fetch(spawn: Spawn, transport: str) -> None:
    trainers, servers = ranks(spawn, 2, transport), ranks(spawn, 1, transport)
    for i, rank in enumerate(trainers):
        rank.call("run", "test_weights", "publish_rows", i)
    servers[0].call("run", "test_weights", "read_columns", 0)
    join(trainers, servers)
    for i, rank in enumerate(trainers):
        rank.call("run", "test_weights", "change", i, 1)
    servers[0].call("run", "test_weights", "fetch", 1)
    trainers[1].kill()
    trainers[1].process.wait()
    with pytest.raises(AssertionError, match="cannot connect|lost|gone|closed|refused"):
        servers[0].call("run", "test_weights", "fetch", 1)


def test_arguments_that_cannot_be_are_refused() -> None:
    from uccl import p2p, weights

    with p2p.Endpoint(port=0, bind="127.0.0.1") as endpoint:
        array = np.zeros((4, 4), np.float32)
        with pytest.raises(ValueError, match="w is not contiguous"):
            weights.Publisher(endpoint, {"w": array[:, :2]})
        publisher = weights.Publisher(endpoint, {"w": array})
        reader = weights.Reader(endpoint, {"w": np.zeros((4, 8), np.float32)})
        sources, targets = [publisher.manifest()], [reader.manifest()]
        with pytest.raises(
            ValueError, match=r"w has float32\[4, 4\] at one rank and float32\[4, 8"
        ):
            reader.join(sources, targets, 0)
        with pytest.raises(ValueError, match="not a manifest"):
            reader.join([b"{}"], targets, 0)
        with pytest.raises(ValueError, match="does not know its sources"):
            reader.fetch()
        publisher.publish(3)
        assert publisher.mark == (3, True)
        publisher.begin()
        assert publisher.mark == (3, False)
        with pytest.raises(ValueError, match="version 3 is not between 4 and"):
            publisher.publish(3)
        publisher.close()
        reader.close()


def test_a_fetch_waits_for_its_version_and_is_aborted() -> None:
    from uccl import p2p, weights

    ends = [p2p.Endpoint(port=0, bind="127.0.0.1") for _ in range(2)]
    publisher = weights.Publisher(ends[0], {"w": np.ones(8, np.float32)})
    reader = weights.Reader(ends[1], {"w": np.zeros(8, np.float32)})
    reader.join([publisher.manifest()], [reader.manifest()], 0, weights.Options(fan_out=0))
    with pytest.raises(TimeoutError, match="no whole version from 1 on in common"):
        # The connection is made within this.
        reader.fetch(1, timeout=2)
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            reader.fetch(1, timeout=30)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    while not failed:
        reader.abort()
        time.sleep(0.01)
    thread.join()
    assert "aborted" in str(failed[0])
    publisher.publish(1)
    assert reader.fetch(1, timeout=30) == (1, 32, 0)
    assert reader.mark == (1, True)
    reader.begin()
    assert reader.mark == (1, False)
    for end in ends:
        end.close()


def test_the_plan_is_the_same_for_all() -> None:
    from uccl import p2p, weights

    with p2p.Endpoint(port=0, bind="127.0.0.1") as endpoint:
        whole = {"w": np.zeros((8, 8), np.uint8)}
        sources = [weights.Publisher(endpoint, whole) for _ in range(2)]
        halves = [
            weights.Reader(
                endpoint,
                {"w": weights.Shard(np.zeros((8, 4), np.uint8), shape=(8, 8), offsets=(0, 4 * i))},
            )
            for i in range(2)
        ]
        made = weights.plan(
            [source.manifest() for source in sources], [half.manifest() for half in halves]
        )
        # Each half is read from another replica, row by row.
        for target, steps in enumerate(made):
            ((is_source, rank, pieces),) = steps[0]
            assert is_source and rank == target
            assert pieces == [(0, row * 4, 0, row * 8 + 4 * target, 4) for row in range(8)]
        for end in (*sources, *halves):
            end.close()
    assert weights.area_of_rank([10, 6], [(4, 3, 0), (2, 1, None)]) == ([9, 0], [1, 6])


# Functions of a rank's process.


def publish_rows(side: Any, index: int) -> None:
    from uccl.weights import Publisher, Shard

    side.rows = np.zeros((32, 48), np.float32)
    side.bias = np.zeros(48, np.float32)
    side.rank = Publisher(
        side.ep,
        {"w": Shard(side.rows, shape=SHAPE, offsets=(32 * index, 0)), "bias": side.bias},
    )


def read_columns(side: Any, index: int) -> None:
    from uccl.weights import Reader, Shard

    side.columns = np.zeros((64, 24), np.float32)
    side.bias = np.zeros(48, np.float32)
    side.rank = Reader(
        side.ep,
        {"w": Shard(side.columns, shape=SHAPE, offsets=(0, 24 * index)), "bias": side.bias},
    )


def manifest(side: Any) -> bytes:
    return side.rank.manifest()


def know(side: Any, sources: list[bytes], targets: list[bytes], index: int) -> None:
    from uccl.weights import Options

    # Among processes of one host the choice is to have no tree.
    side.rank.join(sources, targets, index, Options(fan_out=4))


def change(side: Any, index: int, version: int) -> None:
    side.rank.begin()
    side.rows[:] = model(version)[32 * index : 32 * index + 32]
    side.bias[:] = model(version)[0]
    side.rank.publish(version)


def fetch(side: Any, version: int) -> tuple[Any, np.ndarray, np.ndarray]:
    fetched = tuple(side.rank.fetch(version, timeout=30))
    side.rank.wait_taken(version, timeout=30)
    return fetched, side.columns, side.bias


def taken(side: Any, version: int) -> None:
    side.rank.wait_taken(version, timeout=30)
