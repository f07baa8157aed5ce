"""verl's side of a checkpoint engine, where verl is not installed: the classes and functions of
``verl/checkpoint_engine/base.py`` of verl 0.9.1 that engines use, with their contracts.

``TensorMeta`` (line 34), ``CheckpointEngineRegistry.register`` (line 60), ``CheckpointEngine`` (line 116),
``split_weight_chunks`` (line 565), ``merge_weight_chunks`` (line 594).
"""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Callable

import torch


@dataclass
class TensorMeta:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    chunk_offset: int
    chunk_size: int
    offset: int | None


class CheckpointEngine:
    wire_format = "named_tensors"


class CheckpointEngineRegistry:
    made: dict[str, type[Any]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type[Any]], type[Any]]:
        def keep(engine: type[Any]) -> type[Any]:
            cls.made[backend] = engine
            return engine

        return keep

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls.made[backend](*args, **kwargs)


async def split_weight_chunks(
    weights: Any, bucket_size: int, meta_only: bool = False
) -> AsyncIterator[tuple[TensorMeta, Any]]:
    for name, weight in weights:
        flat = weight.view(-1).view(torch.uint8)
        for at in range(0, len(flat), bucket_size):
            chunk = flat[at : at + bucket_size]
            meta = TensorMeta(name, weight.shape, weight.dtype, at, len(chunk), None)
            yield meta, None if meta_only else chunk


async def merge_weight_chunks(
    chunks: Any, bucket_size: int
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    whole: Any = None
    async for meta, chunk in chunks:
        size = meta.shape.numel() * meta.dtype.itemsize
        if size <= bucket_size:
            yield meta.name, chunk.view(meta.dtype).view(meta.shape)
            continue
        if meta.chunk_offset == 0:
            whole = torch.empty(size, dtype=torch.uint8)
        whole[meta.chunk_offset : meta.chunk_offset + meta.chunk_size] = chunk
        if meta.chunk_offset + meta.chunk_size == size:
            yield meta.name, whole.view(meta.dtype).view(meta.shape)


MODULES = {
    "verl": types.ModuleType("verl"),
    "verl.checkpoint_engine": types.ModuleType("verl.checkpoint_engine"),
    "verl.checkpoint_engine.base": sys.modules[__name__],
}
"""By the names under which engines import them."""
