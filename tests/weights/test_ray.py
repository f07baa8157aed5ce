"""Ray's tensor transport: Ray 2.60's calls in its order, and Ray itself.

The sequence is that of ``ray/experimental/rdt`` of Ray 2.60.0: ``rdt_store.py:255`` (extract), ``rdt_manager.py:618``
and ``:814`` (communicator), ``rdt_manager.py:668`` and ``:701`` (fetch, wait), ``rdt_store.py:85`` (receive), ``:102``
(abort, on the receiver alone: ``rdt_manager.py:392``), ``:124`` (free).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")
ray = pytest.importorskip("ray", reason="lacks ray: pip install ray")
pytest.importorskip("ray.experimental.rdt", reason="lacks a Ray with tensor transports (2.60)")

import uccl.ray as subject
from ray.exceptions import RayDirectTransportError


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    """A sender and a receiver, each with an endpoint of its own."""
    both = subject.UcclTransport(), subject.UcclTransport()
    yield both
    for end in both:
        end._endpoint().close()


def objects() -> list[Any]:
    return [
        torch.arange(1000, dtype=torch.float32).reshape(10, 100),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0),
    ]


def test_an_object_is_read_and_freed(ends: tuple[Any, Any]) -> None:
    sender, receiver = ends
    tensors = objects()
    meta = sender.extract_tensor_transport_metadata("a", tensors)
    assert meta.tensor_device == "cpu"
    assert meta.tensor_meta == [(tensor.shape, tensor.dtype) for tensor in tensors]
    assert sender.extract_tensor_transport_metadata("a", tensors) is meta, "a task that ran twice"
    communicator = receiver.get_communicator_metadata(None, None, "UCCL")
    received = receiver.recv_multiple_tensors("a", meta, communicator)
    assert all(torch.equal(one, other) for one, other in zip(received, tensors))
    # Buffers of the caller's, and a fetch that is waited for later.
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    request = receiver.fetch_multiple_tensors("a", meta, communicator, targets)
    assert receiver.wait_fetch_complete(request, 30) == targets
    assert torch.equal(targets[0], tensors[0])
    assert sender._endpoint().stats()["regions"] == 2
    assert receiver._endpoint().stats()["regions"] == 0
    sender.garbage_collect("a", meta, tensors)
    sender.garbage_collect("a", meta, tensors)
    assert sender._endpoint().stats()["regions"] == 0
    with pytest.raises(RayDirectTransportError, match="refused"):
        receiver.recv_multiple_tensors("a", meta, communicator)


def test_an_empty_object(ends: tuple[Any, Any]) -> None:
    sender, receiver = ends
    meta = sender.extract_tensor_transport_metadata("none", [])
    assert meta.tensor_device is None
    communicator = receiver.get_communicator_metadata(None, None)
    assert receiver.recv_multiple_tensors("none", meta, communicator) == []


def test_no_byte_lands_after_an_abort(ends: tuple[Any, Any]) -> None:
    sender, receiver = ends
    big = [torch.ones(48 << 20, dtype=torch.uint8)]
    meta = sender.extract_tensor_transport_metadata("big", big)
    communicator = receiver.get_communicator_metadata(None, None)
    receiver.recv_multiple_tensors("big", meta, communicator)
    target = torch.zeros_like(big[0])
    failed: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.recv_multiple_tensors("big", meta, communicator, [target])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    while target[0] == 0:
        pass
    receiver.abort_transport("big", communicator)
    last = int(target[-1])
    thread.join()
    time.sleep(0.05)
    assert int(target[-1]) == last, "a byte landed after the abort"
    # It may have been over first.
    assert all(isinstance(error, RayDirectTransportError) for error in failed), failed


def test_an_abort_that_comes_first_ends_one_fetch(ends: tuple[Any, Any]) -> None:
    sender, receiver = ends
    tensors = objects()
    meta = sender.extract_tensor_transport_metadata("a", tensors)
    communicator = receiver.get_communicator_metadata(None, None)
    receiver.abort_transport("a", communicator)
    with pytest.raises(RayDirectTransportError, match="aborted before it began"):
        receiver.recv_multiple_tensors("a", meta, communicator)
    assert torch.equal(receiver.recv_multiple_tensors("a", meta, communicator)[0], tensors[0])


def test_tensors_that_cannot_be_sent_are_refused(ends: tuple[Any, Any]) -> None:
    sender, _ = ends
    with pytest.raises(ValueError, match="contiguous"):
        sender.extract_tensor_transport_metadata("t", [torch.ones(4, 4).t()])
    with pytest.raises(NotImplementedError):
        sender.send_multiple_tensors([], None, None)


@pytest.mark.timeout(400)
def test_actors_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray's workers have the lowest priority otherwise, and do not get on where other tests run.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    subject.register()
    subject.register()
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        pytest.skip("Ray gives its own start 30 s, and this machine is too busy for that")
    try:

        @ray.remote(num_cpus=0)
        class Actor:
            @ray.method(tensor_transport="UCCL")
            def weights(self, version: int) -> Any:
                return torch.full((1000, 100), float(version))

            def sum(self, weights: Any) -> float:
                return float(weights.sum())

        actor: Any = Actor
        trainer, server = actor.remote(), actor.remote()
        for version in (1, 2):
            reference = trainer.weights.remote(version)
            assert ray.get(server.sum.remote(reference), timeout=200) == version * 100_000
    finally:
        ray.shutdown()
