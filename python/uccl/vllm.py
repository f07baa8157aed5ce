"""vLLM's weight transfer over this engine: backend ``uccl`` (vLLM 0.33).

Inference, where the entry point of the wheel has registered it: ``weight_transfer_config={"backend": "uccl"}``. Trainers:

>>> import uccl.vllm
>>> info = uccl.vllm.UcclTrainerInitInfo(rank=rank)
>>> engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
>>> engine.send_weights()

Trainers publish the pieces that their source yields, in place where they stay at their addresses. Workers read whole
tensors, group by group, into memory that all groups share, and load each group when it has come with the version that
was asked for. The workers of a vLLM read along the tree of :mod:`uccl.weights`, so that a trainer sends each byte
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import Shard as Cut
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)

from uccl import p2p
from uccl.weights import Options, Publisher, Reader, Shard, area_of_rank

__all__ = [
    "UcclInitInfo",
    "UcclTrainerInitInfo",
    "UcclTrainerWeightTransferEngine",
    "UcclUpdateInfo",
    "UcclWeightTransferEngine",
    "register",
]

#: The alignment of a tensor in a worker's memory, in bytes.
_ALIGNMENT = 256


def register() -> None:
    """Registers both engines, unless this process has done so."""
    from uccl._start import register_weight_transfer

    register_weight_transfer()


@dataclass
class UcclInitInfo(WeightTransferInitInfo):
    """The trainers, for the workers. All of it can be JSON."""

    #: The manifests of the trainers.
    sources: list[str]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    #: Seconds that a group may take; None is the endpoint's time.
    timeout: float | None = None
    fan_out: int | None = None


@dataclass
class UcclUpdateInfo(WeightTransferUpdateInfo):
    """The version that the trainers have published."""

    version: int


class _Group:
    """Tensors that are read and loaded together."""

    def __init__(self, endpoint: p2p.Endpoint, memory: torch.Tensor, tensors: list[Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0
        for name, dtype, shape in tensors:
            end = at + math.prod(shape) * dtype.itemsize
            self.tensors[name] = memory[at:end].view(dtype).view(shape)
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.reader = Reader(endpoint, self.tensors)

    @staticmethod
    def size(tensors: list[Any]) -> int:
        sizes = (math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class UcclWeightTransferEngine(WeightTransferEngine[UcclInitInfo, UcclUpdateInfo]):
    """A worker's side."""

    init_info_cls = UcclInitInfo
    update_info_cls = UcclUpdateInfo

    _endpoint: p2p.Endpoint | None = None
    _groups: list[_Group]
    _timeout: float | None

    def init_transfer_engine(self, init_info: UcclInitInfo) -> None:
        self.shutdown()
        endpoint = p2p.Endpoint(local_gpu_idx=self.device.index or 0, port=0)
        self._endpoint, self._timeout = endpoint, init_info.timeout
        dtypes = [getattr(torch, name) for name in init_info.dtype_names]
        tensors = {one[0]: one for one in zip(init_info.names, dtypes, init_info.shapes)}
        groups = [[tensors[name] for name in names] for names in layerwise_groups(init_info.names)]
        largest = max(map(_Group.size, groups), default=0)
        memory = torch.empty(largest, dtype=torch.uint8, device=self.device)
        self._groups = [_Group(endpoint, memory, group) for group in groups]
        sources = [manifest.encode() for manifest in init_info.sources]
        rank, all_manifests = _of_all_workers([group.reader.manifest() for group in self._groups])
        for number, group in enumerate(self._groups):
            targets = [manifests[number] for manifests in all_manifests]
            group.reader.join(sources, targets, rank, Options(fan_out=init_info.fan_out))

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UcclUpdateInfo) -> None:
        if self._endpoint is None:
            raise RuntimeError("the transfer of weights is not initialised")
        version = update_info.version
        for group in self._groups:
            fetched = group.reader.fetch(version, self._timeout)
            if fetched.version != version:
                raise RuntimeError(
                    f"the trainers went on to version {fetched.version} before version {version} was loaded"
                )
            self.model.load_weights(list(group.tensors.items()))
            # The next group comes to the same memory.
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            group.reader.wait_taken(version, self._timeout)
            group.reader.begin()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            for group in self._groups:
                group.reader.close()
            self._groups = []
            endpoint.close()


def _of_all_workers(mine: list[bytes]) -> tuple[int, list[list[bytes]]]:
    """This worker's rank among those of its vLLM, and the manifests of all."""
    if not torch.distributed.is_initialized():
        return 0, [mine]
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    all_manifests: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(all_manifests, mine, group=world.cpu_group)
    return world.rank_in_group, all_manifests


@dataclass
class UcclTrainerInitInfo(TrainerInitInfo):
    """The trainer's side: ``rank`` is this trainer's among all of ``torch.distributed``'s default group, if there is
    one."""

    backend: ClassVar[str] = "uccl"

    timeout: float | None = None
    fan_out: int | None = None


class UcclTrainerWeightTransferEngine(TrainerWeightTransferEngine[UcclTrainerInitInfo]):
    """A trainer's side."""

    init_info_cls = UcclTrainerInitInfo

    _endpoint: p2p.Endpoint
    _publisher: Publisher
    _pieces: dict[str, torch.Tensor]
    _version = 0

    @classmethod
    def trainer_init(
        cls, init_info: UcclTrainerInitInfo, *, client: Any, source: Any = None
    ) -> UcclTrainerWeightTransferEngine:
        if source is None:
            raise ValueError("the transfer of weights needs a WeightSource")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank
        )
        engine._pieces = {name: tensor.contiguous() for name, tensor in engine._iterate()}
        engine._endpoint = p2p.Endpoint(local_gpu_idx=_gpu_of(engine._pieces), port=0)
        engine._publisher = Publisher(engine._endpoint, engine._shards())
        manifests = _of_all_trainers(engine._publisher.manifest())
        if engine.is_sender:
            metas = source.metadata
            info = UcclInitInfo(
                sources=[manifest.decode() for manifest in manifests],
                names=[meta.name for meta in metas],
                dtype_names=[str(meta.dtype).replace("torch.", "") for meta in metas],
                shapes=[list(meta.shape) for meta in metas],
                timeout=init_info.timeout,
                fan_out=init_info.fan_out,
            )
            client.init_weight_transfer_engine(asdict(info))
        return engine

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        source: Any = self.source
        whole: Iterator[tuple[str, torch.Tensor]] = (
            source.iter_local() if source.implements_iter_local() else source.iter_full()
        )
        return ((name, tensor.detach()) for name, tensor in whole)

    def _shards(self) -> dict[str, Shard]:
        source: Any = self.source
        cuts = source.implements_iter_local()
        return {
            meta.name: Shard(
                self._pieces[meta.name],
                shape=meta.shape,
                offsets=_offsets(meta, self.rank) if cuts else None,
            )
            for meta in source.metadata
            if meta.name in self._pieces
        }

    def send_weights(self) -> None:
        self._version += 1
        self._publisher.begin()
        for name, tensor in self._iterate():
            piece = self._pieces[name]
            if piece.data_ptr() != tensor.data_ptr():
                piece.copy_(tensor)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._publisher.publish(self._version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights(asdict(UcclUpdateInfo(version=self._version)))
            self.client.finish_weight_update()
        _of_all_trainers(b"")
        # The trainer may change them from now on.
        self._publisher.begin()

    def shutdown(self) -> None:
        self._publisher.close()
        self._endpoint.close()


def _offsets(meta: Any, rank: int) -> list[int] | None:
    if meta.owners is None or meta.placements is None:
        return None
    position, axes = meta.owners.index(rank), []
    for ranks, placement in zip(reversed(meta.mesh_shape), reversed(meta.placements)):
        dim = placement.dim if isinstance(placement, Cut) else None
        axes.append((ranks, position % ranks, dim))
        position //= ranks
    return area_of_rank(meta.shape, axes[::-1])[0]


def _gpu_of(pieces: dict[str, torch.Tensor]) -> int:
    gpus = [piece.get_device() for piece in pieces.values() if piece.is_cuda]
    return gpus[0] if gpus else 0


def _of_all_trainers(mine: bytes) -> list[bytes]:
    """What each trainer has given. All of them call this."""
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


register()
