"""vLLM's side of weight transfer, where vLLM 0.33 is not installed: the classes that engines use, with their contracts.

``vllm/distributed/weight_transfer/base.py``: ``layerwise_groups`` (line 48, by the first number in a name),
``Replicate`` and ``Shard`` (106, 111), ``ParamMeta`` (122), ``WeightSource`` (202), the info classes (370 to 420),
``WeightTransferEngine`` (447: constructor, ``parse_init_info``, ``update_weights``), ``TrainerWeightTransferEngine``
(658). ``factory.py``: ``register_engine`` (33), ``create_engine`` (78), ``trainer_init`` (169).
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
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        groups.setdefault(tuple(parts[: number + 1]), []).append(name)
    return list(groups.values())


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
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


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
    """``vllm.model_executor.model_loader.reload``: the calls of ``nccl_engine.py:162`` and ``:170``."""

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
