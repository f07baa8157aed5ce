"""The calls of Ray's direct transport to UCCL's interface: actors send objects made of tensors to
each other."""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np
import pytest
from peer import Peer

Spawn = Callable[..., Peer]

NUMPY = ["float32", "float64", "float16", "int64", "int8", "uint8", "complex64", "bool"]
TORCH = [*NUMPY, "bfloat16", "float8_e4m3fn"]


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="lacks torch")


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> str:
    if request.param == "torch":
        torch_or_skip()
    return request.param


def actors(spawn: Spawn, transport: str) -> tuple[Peer, Peer]:
    both = spawn(), spawn()
    for actor in both:
        actor.call("open", port=0, bind="127.0.0.1", transport=transport)
        actor.call("run", "test_ray", "begin")
    return both


def test_an_object_goes_from_actor_to_actor(spawn: Spawn, transport: str, library: str) -> None:
    source, target = actors(spawn, transport)
    meta, descs, layout, sums = source.call("run", "test_ray", "put", library, "first", 3)
    assert target.call("run", "test_ray", "get", library, meta, descs, layout) == sums
    # Another object of the same actor uses the same connection; the third one travels back.
    meta, descs, layout, sums = source.call("run", "test_ray", "put", library, "second", 4)
    assert target.call("run", "test_ray", "get", library, meta, descs, layout) == sums
    meta, descs, layout, sums = target.call("run", "test_ray", "put", library, "back", 5)
    assert source.call("run", "test_ray", "get", library, meta, descs, layout) == sums
    assert target.call("run", "test_ray", "connections") == 2
    for actor, name in ((source, "first"), (source, "second"), (target, "back")):
        actor.call("run", "test_ray", "free", name)
    for actor in (source, target):
        assert actor.call("run", "test_ray", "regions") == 0


def test_an_object_that_was_freed_is_not_read(spawn: Spawn, transport: str) -> None:
    source, target = actors(spawn, transport)
    meta, descs, layout, _ = source.call("run", "test_ray", "put", "numpy", "gone", 3)
    source.call("run", "test_ray", "free", "gone")
    with pytest.raises(AssertionError, match="refused"):
        target.call("run", "test_ray", "get", "numpy", meta, descs, layout)


def test_an_actor_that_died_fails_the_read(spawn: Spawn, transport: str) -> None:
    source, target = actors(spawn, transport)
    meta, descs, layout, sums = source.call("run", "test_ray", "put", "numpy", "object", 3)
    assert target.call("run", "test_ray", "get", "numpy", meta, descs, layout) == sums
    source.kill()
    source.process.wait()
    with pytest.raises(AssertionError, match="cannot connect|lost|gone|closed|Invalid conn_id"):
        target.call("run", "test_ray", "get", "numpy", meta, descs, layout)


# Functions of an actor.


def begin(side: Any) -> None:
    assert side.ep.start_passive_accept() is True
    side.objects = {}


def put(side: Any, library: str, name: str, seed: int) -> tuple[bytes, bytes, list[Any], list[str]]:
    """Keeps an object of many tensors, and returns its metadata, descriptors, layout and
    contents."""
    tensors = make(library, seed)
    descs = side.ep.register_memory(tensors)
    assert [desc.size for desc in descs] == [size(tensor) for tensor in tensors]
    side.objects[name] = tensors, descs
    layout = [(list(tensor.shape), str(tensor.dtype).rpartition(".")[2]) for tensor in tensors]
    return side.ep.get_metadata(), side.ep.get_serialized_descs(descs), layout, sums(tensors)


def get(side: Any, library: str, meta: bytes, blob: bytes, layout: list[Any]) -> list[str]:
    """Reads an object of another actor, and returns its contents."""
    tensors = [empty(library, shape, dtype) for shape, dtype in layout]
    mine = side.ep.register_memory(tensors)
    try:
        ok, conn = side.ep.add_remote_endpoint(meta)
        assert ok, side.ep.last_error()
        theirs = side.ep.deserialize_descs(blob)
        ok, transfer = side.ep.transfer(conn, "read", mine, theirs)
        assert ok, side.ep.last_error()
        done = False
        while not done:
            ok, done = side.ep.poll_async(transfer)
            assert ok, side.ep.transfer_error(transfer)
            time.sleep(0)
        return sums(tensors)
    finally:
        side.ep.deregister_memory(mine)


def free(side: Any, name: str) -> None:
    side.ep.deregister_memory(side.objects.pop(name)[1])


def connections(side: Any) -> int:
    return side.ep.stats()["connections"]


def regions(side: Any) -> int:
    return side.ep.stats()["regions"]


def make(library: str, seed: int) -> list[Any]:
    """Tensors of every type and of several shapes: whole ones, parts of others, one twice, and an
    empty one."""
    random = np.random.default_rng(seed)
    bits = lambda count: random.integers(0, 2, count).astype(np.uint8)
    if library == "numpy":
        whole = [bits(4 * 300).astype(dtype).reshape(4, 300) for dtype in NUMPY]
        return [
            *whole,
            whole[0][1:3],
            whole[0],
            whole[2].reshape(-1)[7:1000],
            np.zeros((0, 5), np.float32),
        ]
    import torch

    whole = [
        torch.from_numpy(bits(4 * 300)).to(getattr(torch, name)).reshape(4, 300) for name in TORCH
    ]
    return [*whole, whole[0][1:3], whole[0], whole[8].view(-1)[7:1000], torch.zeros(0, 5)]


def empty(library: str, shape: list[int], dtype: str) -> Any:
    if library == "numpy":
        return np.full(shape, 7).astype(dtype)
    import torch

    return torch.full(shape, 1.0).to(getattr(torch, dtype))


def size(tensor: Any) -> int:
    return tensor.nbytes


def sums(tensors: list[Any]) -> list[str]:
    """The contents of tensors, byte for byte."""
    if not isinstance(tensors[0], np.ndarray):
        import torch

        tensors = [tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    return [tensor.tobytes().hex() for tensor in tensors]
