"""Weights in GPU memory: trainers on one GPU, servers on another, or all on the same one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")
if not torch.cuda.is_available():
    pytest.skip("lacks a GPU", allow_module_level=True)

ROWS, COLUMNS = 512, 768


def whole(version: int, device: Any) -> Any:
    count = torch.arange(ROWS * COLUMNS, dtype=torch.float32, device=device)
    return (count + version).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("server_memory", ["cuda", "cpu"])
def test_rows_become_columns(server_memory: str) -> None:
    from uccl import p2p
    from uccl.weights import Publisher, Reader, Shard

    last = torch.cuda.device_count() - 1
    devices: list[Any] = [torch.device("cuda", 0)] * 2
    devices += [torch.device(server_memory, last if server_memory == "cuda" else None)] * 2
    gpus = [0, 0, last, last]
    ends = [p2p.Endpoint(local_gpu_idx=gpu, port=0, bind="127.0.0.1") for gpu in gpus]
    rows = [torch.zeros(ROWS // 2, COLUMNS, device=devices[i]) for i in range(2)]
    columns = [torch.zeros(ROWS, COLUMNS // 2, device=devices[2 + i]) for i in range(2)]
    shape = (ROWS, COLUMNS)
    publishers = [
        Publisher(ends[i], {"w": Shard(rows[i], shape=shape, offsets=(i * ROWS // 2, 0))})
        for i in range(2)
    ]
    readers = [
        Reader(ends[2 + i], {"w": Shard(columns[i], shape=shape, offsets=(0, i * COLUMNS // 2))})
        for i in range(2)
    ]
    sources = [publisher.manifest() for publisher in publishers]
    targets = [reader.manifest() for reader in readers]
    groups: tuple[list[Any], list[Any]] = (publishers, readers)
    for group in groups:
        for index, end in enumerate(group):
            end.join(sources, targets, index)
    for version in (1, 2, 3):
        for publisher, part, expected in zip(publishers, rows, whole(version, devices[0]).chunk(2)):
            publisher.begin()
            part.copy_(expected)
            torch.cuda.synchronize()
            publisher.publish(version)
        for reader, part, expected in zip(
            readers, columns, whole(version, devices[2]).chunk(2, dim=1)
        ):
            fetched = reader.fetch(version, timeout=50)
            assert fetched == (version, ROWS * COLUMNS * 2, 0)
            assert torch.equal(part, expected)
    everything: list[Any] = [*publishers, *readers, *ends]
    for end in everything:
        end.close()
