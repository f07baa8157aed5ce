"""verl's checkpoint engine over this engine.

.. code-block:: yaml

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: uccl
      custom_backend_module: uccl.verl

The trainer of rank 0 fills a bucket with weights and publishes it. Rollout ranks read it along the tree of
:mod:`uccl.weights`: the trainer sends each byte once, and the ranks pass it on side by side. A second bucket is filled
and read meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import torch
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

from uccl import p2p
from uccl.weights import Options, Publisher, Reader

__all__ = ["UcclCheckpointEngine"]

#: Bytes for the names and shapes of a bucket's tensors.
_HEADER = 1 << 20
#: A bucket is filled, or given to the server, while the other one travels.
_BUCKETS = 2


class _Bucket:
    """Memory for weights, and a header that says which. Trainers and servers have equal ones."""

    def __init__(self, size: int, device: str) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, device=device)
        self.header = torch.zeros(_HEADER, dtype=torch.uint8)
        self._entries: list[dict[str, Any]] = []
        self._used = 0
        self._header_len = 64

    def shards(self) -> dict[str, torch.Tensor]:
        return {"data": self.data, "header": self.header}

    def add(self, meta: TensorMeta, chunk: torch.Tensor) -> bool:
        """Adds a chunk, if there is room for it."""
        entry = {
            "name": meta.name,
            "shape": list(meta.shape),
            "dtype": str(meta.dtype).replace("torch.", ""),
            "chunk_offset": meta.chunk_offset,
            "chunk_size": meta.chunk_size,
            "offset": self._used,
        }
        header_len = self._header_len + len(json.dumps(entry)) + 2
        end = self._used + meta.chunk_size
        if end > len(self.data) or header_len > _HEADER:
            return False
        self.data[self._used : end].copy_(chunk.detach(), non_blocking=True)
        self._entries.append(entry)
        # Tensors of every type begin at a multiple of their elements' size.
        self._used, self._header_len = -(-end // 16) * 16, header_len
        return True

    def seal(self, is_last: bool) -> None:
        """Writes the header, and waits for the copies."""
        text = json.dumps({"is_last": is_last, "tensors": self._entries}).encode()
        self.header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.header[len(text)] = 0
        self._entries, self._used, self._header_len = [], 0, 64
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)

    def chunks(self) -> tuple[bool, list[tuple[TensorMeta, torch.Tensor]]]:
        """Whether it is the last one, and views of its chunks."""
        text = bytes(self.header.numpy()).partition(b"\0")[0]
        header = json.loads(text)
        chunks = []
        for entry in header["tensors"]:
            shape, dtype = torch.Size(entry.pop("shape")), getattr(torch, entry.pop("dtype"))
            meta = TensorMeta(shape=shape, dtype=dtype, **entry)
            chunks.append((meta, self.data[meta.offset : meta.offset + meta.chunk_size]))
        return header["is_last"], chunks


@CheckpointEngineRegistry.register("uccl")
class UcclCheckpointEngine(CheckpointEngine):
    """Sends weights from the trainer of rank 0 to all rollout ranks.

    ``bucket_size`` is in bytes; a rank has two buckets. ``device`` is where they are, ``timeout`` the seconds that
    one bucket may take, ``fan_out`` that of :class:`uccl.weights.Options`.
    """

    def __init__(
        self,
        bucket_size: int,
        device: str = "cuda",
        rollout_dtype: torch.dtype = torch.bfloat16,
        is_master: bool = False,
        timeout: float | None = None,
        fan_out: int | None = None,
    ) -> None:
        self.bucket_size = bucket_size
        self.device = device
        self.rollout_dtype = rollout_dtype
        self.is_master = is_master
        self.timeout = timeout
        self.options = Options(fan_out=fan_out)
        self.rank: int | None = None
        self._buckets: list[_Bucket] = []
        self._ends: list[Any] = []
        gpu = torch.cuda.current_device() if device == "cuda" else 0
        self._endpoint = p2p.Endpoint(local_gpu_idx=gpu, port=0)

    def prepare(self) -> dict[str, Any]:
        """Allocates and registers the buckets: their manifests."""
        kind = Publisher if self.is_master else Reader
        self._buckets = [_Bucket(self.bucket_size, self.device) for _ in range(_BUCKETS)]
        self._ends = [kind(self._endpoint, bucket.shards()) for bucket in self._buckets]
        return {"manifests": [end.manifest() for end in self._ends]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The ranks: 0 is the trainer that sends, -1 one that does not, others are servers."""
        parties = {
            "source": metadata[0]["manifests"],
            "targets": [one["manifests"] for one in metadata[-rollout_world_size:]],
        }

        def of(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, **{name: [one] * len(ranks) for name, one in parties.items()}}

        return of([0] + [-1] * (actor_wg_world_size - 1)), of(
            list(range(1, rollout_world_size + 1))
        )

    def init_process_group(
        self, rank: int, source: list[bytes], targets: list[list[bytes]]
    ) -> None:
        self.rank = rank
        if rank < 0:
            return
        for slot, end in enumerate(self._ends):
            these = [target[slot] for target in targets]
            end.join([source[slot]], these, max(rank - 1, 0), self.options)

    def finalize(self) -> None:
        for end in self._ends:
            end.close()
        self._ends, self._buckets, self.rank = [], [], None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        if self.rank != 0:
            # Its part in the trainers' gathers.
            async for _ in split_weight_chunks(weights, self.bucket_size, meta_only=True):
                pass
            return
        number = 1
        self._ends[0].begin()
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if not self._buckets[(number - 1) % _BUCKETS].add(meta, chunk):
                number = await self._publish(number, is_last=False)
                if not self._buckets[(number - 1) % _BUCKETS].add(meta, chunk):
                    raise ValueError(f"{meta.name} does not fit a bucket")
        await self._publish(number, is_last=True)
        await self._taken(number - 1)
        await self._taken(number)

    async def _publish(self, number: int, is_last: bool) -> int:
        """Publishes a bucket, and begins the next one when all have its last contents."""
        slot = (number - 1) % _BUCKETS
        self._buckets[slot].seal(is_last)
        self._ends[slot].publish(number)
        if not is_last:
            await self._taken(number + 1 - _BUCKETS)
            self._ends[number % _BUCKETS].begin()
        return number + 1

    async def _taken(self, number: int) -> None:
        if number > 0:
            end = self._ends[(number - 1) % _BUCKETS]
            await asyncio.to_thread(end.wait_taken, number, self.timeout)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async for name, weight in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, weight

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        number, is_last = 0, False
        coming: asyncio.Task[None] | None = asyncio.create_task(self._fetch(1))
        try:
            while not is_last and coming is not None:
                await coming
                number += 1
                is_last, chunks = self._buckets[(number - 1) % _BUCKETS].chunks()
                coming = None if is_last else asyncio.create_task(self._fetch(number + 1))
                for meta, chunk in chunks:
                    yield meta, chunk
                if self.device == "cuda":
                    # The copies out of the bucket.
                    torch.cuda.synchronize()
            await self._taken(number - 1)
            await self._taken(number)
        finally:
            if coming is not None and not coming.done():
                for end in self._ends:
                    await asyncio.to_thread(end.abort)
                await asyncio.gather(coming, return_exceptions=True)

    async def _fetch(self, number: int) -> None:
        # Ranks that read from this one have the bucket's last contents.
        await self._taken(number - _BUCKETS)
        end = self._ends[(number - 1) % _BUCKETS]
        fetched = await asyncio.to_thread(end.fetch, number, self.timeout)
        if fetched.version != number:
            raise RuntimeError(f"bucket {fetched.version} came in place of bucket {number}")
