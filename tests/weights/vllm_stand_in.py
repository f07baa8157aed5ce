"""vLLM's side of weight transfer, where vLLM 0.33 is not installed: the classes that engines use, with their contracts.

``vllm/distributed/weight_transfer/base.py`` of 0.33.0: ``layerwise_groups`` (line 49), ``Replicate`` and ``Shard`` (118,
123), ``ParamMeta`` (133), ``WeightSource`` (215), the info classes (365 to 411), ``WeightTransferEngine`` (428:
``defers_processing``, ``drain_pending``, constructor, ``parse_init_info``, ``update_weights``),
``TrainerWeightTransferEngine`` (645). ``factory.py``: ``register_engine`` (41), ``create_engine`` (85),
``trainer_init`` (167).
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch

TInit = TypeVar("TInit")
TUpdate = TypeVar("TUpdate")


def layerwise_groups(names: list[str]) -> list[list[str]]:
    """Names before the first layer, each layer, and the other names without a number."""
    ends: dict[bool, list[str]] = {False: [], True: []}
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        if not numbers:
            ends[bool(layers)].append(name)
            continue
        stack = layers.setdefault(".".join(parts[: numbers[0]]), {})
        stack.setdefault(int(parts[numbers[0]]), []).append(name)
    whole = [group for _, stack in layers.items() for _, group in sorted(stack.items())]
    return [group for group in (ends[False], *whole, ends[True]) if group]


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(Generic[TInit, TUpdate]):
    init_info_cls: Any
    update_info_cls: Any
    receive_weights: Any
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.device, self.model, self.model_config = device, model, None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))


class TrainerWeightTransferEngine(Generic[TInit]):
    def __init__(self, *, client: Any, source: Any, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


class _Factory:
    def __init__(self) -> None:
        self.made: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.made:
            raise ValueError(f"{name} is already registered")
        self.made[name] = (module, class_name)

    def engine(self, name: str) -> Any:
        module, class_name = self.made[name]
        return getattr(importlib.import_module(module), class_name)


WeightTransferEngineFactory = _Factory()
WeightTransferTrainerFactory = _Factory()


class Reloads:
    """``vllm.model_executor.model_loader.reload``: the calls of ``nccl_engine.py:167`` and ``:175``."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def initialize_layerwise_reload(self, model: Any) -> None:
        self.calls.append("initialize")

    def finalize_layerwise_reload(self, model: Any, model_config: Any) -> None:
        self.calls.append("finalize")


reloads = Reloads()


MODULES: dict[str, Any] = {
    "vllm": types.ModuleType("vllm"),
    "vllm.distributed": types.ModuleType("vllm.distributed"),
    "vllm.distributed.weight_transfer": types.ModuleType("vllm.distributed.weight_transfer"),
    "vllm.distributed.weight_transfer.base": sys.modules[__name__],
    "vllm.distributed.weight_transfer.factory": sys.modules[__name__],
    "vllm.model_executor": types.ModuleType("vllm.model_executor"),
    "vllm.model_executor.model_loader": types.ModuleType("vllm.model_executor.model_loader"),
    "vllm.model_executor.model_loader.reload": reloads,
}
"""By the names under which engines import them."""
