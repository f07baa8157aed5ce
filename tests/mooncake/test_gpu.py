"""``mooncake.engine`` between GPUs, or a GPU and host memory, of two processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import Engine

pytestmark = pytest.mark.xdist_group("gpu")

KIB = 1 << 10


def gpus() -> tuple[int, str]:
    """The number of GPUs, and the reason if none is usable."""
    try:
        import torch
    except ImportError:
        return 0, "lacks torch"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, f"lacks GPUs: torch sees {count}"


COUNT, WHY_NOT = gpus()
SECOND = "cuda:1" if COUNT > 1 else "cuda:0"


@pytest.mark.skipif(COUNT < 1, reason=WHY_NOT)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tcp", ["0", "1"], ids=["one host", "tcp"])
@pytest.mark.parametrize("to_gpu", [True, False], ids=["to a GPU", "to the host"])
def test_memory_of_gpus(engines: Callable[..., Engine], tcp: str, to_gpu: bool) -> None:
    a, b = engines(env={"MC_FORCE_TCP": tcp}), engines(env={"MC_FORCE_TCP": tcp})
    layers, page, pages = 4, 64 * KIB, 64
    size = page * pages
    here = [a.call("gpu", f"kv{i}", "cuda:0", size, i + 1) for i in range(layers)]
    if to_gpu:
        there = [b.call("gpu", f"kv{i}", SECOND, size) for i in range(layers)]
    else:
        there = [b.call("memory", f"kv{i}", size) for i in range(layers)]
    read = "gpu_bytes" if to_gpu else "bytes_of"
    for engine, addresses in ((a, here), (b, there)):
        assert engine.call("initialize") == 0
        assert engine.call("do", "batch_register_memory", addresses, [size] * layers) == 0
    session = b.call("session")
    # Every second page, as a request's blocks lie.
    at = range(0, size, 2 * page)
    sources = [base + offset for base in here for offset in at]
    targets = [base + offset for base in there for offset in at]
    lengths = [page] * len(sources)
    assert a.call("do", "batch_transfer_sync_write", session, sources, targets, lengths) == 0
    for i in range(layers):
        wanted = (bytes([i + 1]) * page + bytes(page)) * (pages // 2)
        assert b.call(read, f"kv{i}") == wanted, f"layer {i}"
    # Back, all of it, and asked about.
    for i in range(layers):
        a.call("gpu_fill", f"kv{i}", 0)
    sizes = [size] * layers
    batch = a.call("do", "batch_transfer_async_read", session, here, there, sizes)
    assert a.call("finish", batch) == 1
    for i in range(layers):
        assert a.call("gpu_bytes", f"kv{i}") == b.call(read, f"kv{i}")
    # The memory ends, as a sleeping engine's does, and comes back at the same addresses.
    assert b.call("do", "batch_unregister_memory", there) == 0
    assert a.call("do", "batch_transfer_sync_write", session, sources, targets, lengths) == -1
    assert b.call("do", "batch_register_memory", there, sizes) == 0
    assert a.call("do", "batch_transfer_sync_write", session, sources, targets, lengths) == 0
