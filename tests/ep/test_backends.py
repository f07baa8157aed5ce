"""The interface between the buffers and the two backends."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(60)


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and kinds of a function's parameters."""
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


def test_both_backends_have_all_calls_with_the_same_parameters():
    from uccl.ep._backend import Backend
    from uccl.ep._cuda.backend import CudaBackend
    from uccl.ep._host.backend import HostBackend

    calls = {
        name: call
        for name, call in vars(Backend).items()
        if inspect.isfunction(call) and not name.startswith("_")
    }
    assert {"layout", "dispatch", "combine", "low_latency_dispatch", "barrier"} <= calls.keys()
    for backend in (HostBackend, CudaBackend):
        for name, call in calls.items():
            assert parameters(getattr(backend, name)) == parameters(call), (backend, name)


def test_buffers_do_not_know_their_backend():
    from uccl.ep import _buffer, _elastic

    for module in (_buffer, _elastic):
        source = inspect.getsource(module)
        assert "uccl.ep._host" not in source and "uccl.ep._cuda" not in source
