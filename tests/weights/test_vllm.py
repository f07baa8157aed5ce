"""vLLM's weight transfer: the calls of vLLM 0.33.0 in their order.

``vllm/distributed/weight_transfer/factory.py`` (``create_engine``, line 85; ``trainer_init``, line 167),
``vllm/v1/worker/gpu_worker.py`` (``init_weight_transfer_engine``, line 1519; ``start_weight_update``, 1542;
``update_weights``, 1592; ``finish_weight_update``, 1633; ``shutdown_weight_transfer_engine``, 1533), and
``clients.py:50`` (all that goes to workers can be JSON).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")

import weights.vllm_stand_in as vllm


@pytest.fixture(scope="module", autouse=True)
def engine_module() -> Iterator[None]:
    """The engine's module, with the stand-in under vLLM's names as long as these tests run."""
    before = dict(sys.modules)
    sys.modules.update(vllm.MODULES)
    import uccl.vllm  # noqa: F401

    uccl.vllm.register()

    yield
    for name in ("uccl.vllm", *vllm.MODULES):
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]


class Model:
    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        self.loaded.update((name, weight.clone()) for name, weight in weights)


class Worker:
    """A worker of vLLM, and the client that calls it. An update that fails is over (``gpu_worker.py:1569`` to
    ``:1630``, ``:1639``)."""

    def __init__(self) -> None:
        self.is_active = False
        engine = vllm.WeightTransferEngineFactory.engine("uccl")
        self.model = Model()
        self.engine = engine(None, None, torch.device("cpu"), self.model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = json.loads(json.dumps(init_info))
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        assert not self.is_active
        self.engine.start_weight_update()
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.is_active
        try:
            self.engine.update_weights(json.loads(json.dumps(update_info)))
        except BaseException:
            self.is_active = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self.is_active
        self.engine.finish_weight_update()
        self.is_active = False


SHAPES = {"embed": (10, 4), "layers.0.w": (6, 8), "layers.1.w": (6, 8), "norm": (5,)}


class Source:
    """The whole weights of a trainer, as ``ModuleSource`` yields them."""

    def __init__(self) -> None:
        self.step = 0
        self.kept = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.metadata = [
            vllm.ParamMeta(name, torch.float32, shape) for name, shape in SHAPES.items()
        ]

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        for number, (name, tensor) in enumerate(self.kept.items()):
            tensor.fill_(self.step * 10 + number)
            # One is somewhere else each time, as gathered ones are.
            yield name, tensor.clone() if name == "norm" else tensor


def trainer(client: Any, source: Any, rank: int = 0, **more: Any) -> Any:
    import uccl.vllm

    engine = vllm.WeightTransferTrainerFactory.engine("uccl")
    info = uccl.vllm.UcclTrainerInitInfo(rank=rank, timeout=50, **more)
    return engine.trainer_init(init_info=info, client=client, source=source)


def test_weights_come_to_a_worker() -> None:
    worker, source = Worker(), Source()
    engine = trainer(worker, source)
    for step in (1, 2, 3):
        source.step = step
        engine.send_weights()
        assert set(worker.model.loaded) == set(SHAPES)
        for number, (name, shape) in enumerate(SHAPES.items()):
            expected = torch.full(shape, float(step * 10 + number))
            assert torch.equal(worker.model.loaded[name], expected), name
    assert vllm.reloads.calls == ["initialize", "finalize"] * 3
    # A version that the trainer has left is not loaded.
    worker.engine._timeout = 0.1
    worker.is_active = True
    with pytest.raises(TimeoutError, match="no whole version from 3 on"):
        worker.update_weights({"version": 3})
    worker.engine.shutdown()
    worker.engine.shutdown()
    worker.is_active = True
    with pytest.raises(RuntimeError, match="not initialised"):
        worker.update_weights({"version": 4})
    engine.shutdown()


class Serving(Worker):
    """A worker that notes the model's weights in each call: the old ones serve until the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(update_info)
        self.seen.append(("update", dict(self.model.loaded)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.seen.append(("finish", dict(self.model.loaded)))
        super().finish_weight_update(weight_version)


def test_old_weights_serve_until_all_new_ones_are_there() -> None:
    worker, source = Serving(), Source()
    before = len(vllm.reloads.calls)
    engine = trainer(worker, source, overlap=True)
    for source.step in (1, 2):
        old = dict(worker.model.loaded)
        engine.send_weights()
        assert [call for call, _ in worker.seen] == ["update", "finish"]
        assert all(loaded == old for _, loaded in worker.seen), "loaded while it served"
        worker.seen.clear()
        for number, (name, shape) in enumerate(SHAPES.items()):
            expected = torch.full(shape, float(source.step * 10 + number))
            assert torch.equal(worker.model.loaded[name], expected), name
    assert vllm.reloads.calls[before:] == ["initialize", "finalize"] * 2
    old = dict(worker.model.loaded)

    worker.engine._timeout = 0.1
    engine._publisher.publish = lambda version: None
    with pytest.raises(TimeoutError, match="no whole version from 3 on"):
        engine.send_weights()
    assert worker.model.loaded == old and not worker.is_active
    assert vllm.reloads.calls[before:] == ["initialize", "finalize"] * 2

    del engine._publisher.publish
    worker.engine._timeout = 50
    source.step = 4
    engine.send_weights()
    assert torch.equal(worker.model.loaded["norm"], torch.full((5,), 43.0))
    worker.engine.shutdown()
    engine.shutdown()


def test_a_transfer_beside_the_work_ends_with_the_engine() -> None:
    worker, source = Worker(), Source()
    engine = trainer(worker, source, overlap=True)
    worker.start_weight_update()
    # No version of it is ever published.
    worker.update_weights({"version": 9, "begins": True})
    arrival = worker.engine._arrival
    worker.engine.shutdown()
    assert not arrival._thread.is_alive()
    assert worker.model.loaded == {}
    engine.shutdown()


class Gather:
    """``all_gather_object`` of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.given: list[Any] = [None] * ranks
        self.rank = threading.local()

    def __call__(self, mine: Any) -> list[Any]:
        self.given[self.rank.number] = mine
        self.barrier.wait(60)
        gathered = list(self.given)
        self.barrier.wait(60)
        return gathered

    def run(self, functions: list[Any]) -> list[Any]:
        results: list[Any] = [None] * len(functions)

        def one(number: int) -> None:
            self.rank.number = number
            results[number] = functions[number]()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Pieces(Source):
    """A trainer's rows, as FSDP has them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.metadata = [
            vllm.ParamMeta(
                name,
                torch.float32,
                shape,
                owners=(0, 1),
                mesh_shape=(2,),
                placements=(vllm.Shard(0),),
            )
            for name, shape in SHAPES.items()
        ]
        self.kept = {name: torch.zeros(whole(name, 0).chunk(2)[rank].shape) for name in SHAPES}

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.kept.items():
            tensor.copy_(whole(name, self.step).chunk(2)[self.rank])
            yield name, tensor


def whole(name: str, step: int) -> Any:
    count = torch.Size(SHAPES[name]).numel()
    return (torch.arange(count) + step * 100).float().reshape(SHAPES[name])


@pytest.mark.parametrize("overlap", [False, True])
def test_pieces_of_two_trainers_come_to_three_workers(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    import uccl.vllm

    trainers, workers = Gather(2), Gather(3)
    monkeypatch.setattr(uccl.vllm, "_of_all_trainers", trainers)
    monkeypatch.setattr(
        uccl.vllm, "_of_all_workers", lambda mine: (workers.rank.number, workers(mine))
    )
    servers = [Worker() for _ in range(3)]

    class Client:
        """Calls all workers, as ``collective_rpc`` does."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args: workers.run(
                [lambda one=one: getattr(one, name)(*args) for one in servers]
            )

    def train(rank: int) -> Any:
        source = Pieces(rank)
        engine = trainer(Client(), source, rank, overlap=overlap)
        for source.step in (1, 2):
            engine.send_weights()
        return engine

    engines = trainers.run([lambda rank=rank: train(rank) for rank in range(2)])
    for server in servers:
        assert set(server.model.loaded) == set(SHAPES)
        for name, weight in server.model.loaded.items():
            assert torch.equal(weight, whole(name, 2)), name
        server.engine.shutdown()
    for engine in engines:
        engine.shutdown()


def test_pieces_of_a_mesh_are_found() -> None:
    """Each trainer has the piece that its placements say: ``base.py:133`` and ``_dtensor_layout``, line 277."""
    import uccl.vllm

    cuts = (vllm.Shard(1), vllm.Replicate(), vllm.Shard(0))
    mesh = {"owners": tuple(range(4, 16)), "mesh_shape": (2, 3, 2), "placements": cuts}
    meta = vllm.ParamMeta("w", torch.float32, (10, 6), **mesh)
    offsets = [uccl.vllm._offsets(meta, rank) for rank in (4, 5, 6, 10, 15)]
    assert offsets == [[0, 0], [5, 0], [0, 0], [0, 3], [5, 3]]
    whole = vllm.ParamMeta("w", torch.float32, (10, 6))
    assert uccl.vllm._offsets(whole, 3) is None


def test_a_trainer_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="WeightSource"):
        trainer(Worker(), None)
