"""verl's checkpoint engine: the calls of verl 0.9.1 in their order.

``verl/checkpoint_engine/base.py``: ``CheckpointEngineManager.build_process_group`` (line 422: prepare of all workers,
``build_topology``, ``init_process_group``), ``update_weights`` (line 510: send and receive side by side, ``finalize``),
``CheckpointEngineWorker`` (line 337: ``new(backend, bucket_size=, **engine_kwargs)``), and
``verl/workers/engine_workers.py:686`` (the trainers' ``new``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")

import weights.verl_stand_in as verl


@pytest.fixture(scope="module", autouse=True)
def engine_module() -> Iterator[None]:
    """The engine's module, with the stand-in under verl's names as long as these tests run."""
    before = dict(sys.modules)
    sys.modules.update(verl.MODULES)
    import uccl.verl  # noqa: F401

    yield
    for name in ("uccl.verl", *verl.MODULES):
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]


def weights_of(step: int) -> list[tuple[str, Any]]:
    return [
        ("embed", torch.full((100, 16), step, dtype=torch.float32)),
        ("scalar", torch.tensor(float(step))),
        # Longer than a bucket.
        ("layer", torch.arange(step, step + 9000, dtype=torch.float32).reshape(90, 100)),
        ("norm", torch.full((33,), step, dtype=torch.bfloat16)),
        ("head", torch.arange(step, step + 777, dtype=torch.int64)),
    ]


class World:
    """The workers that verl's manager has, in one process."""

    def __init__(self, trainers: int, servers: int, **settings: Any) -> None:
        new = verl.CheckpointEngineRegistry.new
        self.trainers = [
            new("uccl", is_master=rank == 0, bucket_size=16384, **settings)
            for rank in range(trainers)
        ]
        self.servers = [new("uccl", bucket_size=16384, **settings) for _ in range(servers)]

    def connect(self) -> None:
        workers = [*self.trainers, *self.servers]
        metadata = [worker.prepare() for worker in workers]
        topology = type(workers[0]).build_topology(len(self.trainers), len(self.servers), metadata)
        for group, kwargs in zip((self.trainers, self.servers), topology):
            for index, worker in enumerate(group):
                worker.init_process_group(**{name: one[index] for name, one in kwargs.items()})

    async def update(self, step: int) -> list[dict[str, Any]]:
        async def receive(server: Any) -> dict[str, Any]:
            weights = server.receive_weights(global_steps=step)
            return {name: weight.clone() async for name, weight in weights}

        sent = [
            trainer.send_weights(iter(weights_of(step)), global_steps=step)
            for trainer in self.trainers
        ]
        results = await asyncio.gather(*sent, *[receive(server) for server in self.servers])
        return results[len(self.trainers) :]

    def finalize(self) -> None:
        for worker in (*self.trainers, *self.servers):
            worker.finalize()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(2, 3, device="cpu", timeout=50)
    yield made
    for worker in (*made.trainers, *made.servers):
        worker._endpoint.close()


def test_weights_come_to_all_servers(world: World) -> None:
    for step in (1, 2):
        world.connect()
        for received in asyncio.run(world.update(step)):
            expected = dict(weights_of(step))
            assert list(received) == list(expected)
            for name, weight in expected.items():
                assert received[name].dtype == weight.dtype
                assert torch.equal(received[name], weight), name
        world.finalize()
    for worker in (*world.trainers, *world.servers):
        assert worker._endpoint.stats()["regions"] == 0


def test_a_server_that_waits_for_a_trainer_gives_up(world: World) -> None:
    world.connect()
    for server in world.servers:
        # Its connections are made within this.
        server.timeout = 2

    async def receive() -> None:
        async for _ in world.servers[0].receive_weights():
            pass

    with pytest.raises(TimeoutError, match="no whole version from 1 on"):
        asyncio.run(receive())
    world.finalize()
