"""vLLM's weight transfer over this engine: backend ``uccl`` (vLLM 0.33).

Inference, where the entry point of the wheel has registered it: ``weight_transfer_config={"backend": "uccl"}``. Trainers:

>>> import uccl.vllm
>>> info = uccl.vllm.UcclTrainerInitInfo(rank=rank)
>>> engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
>>> engine.send_weights()

Trainers publish the pieces that their source yields, in place where they stay at their addresses. Workers read whole
tensors, group by group, into memory that all groups share, and load each group when it has come with the version that
was asked for. The workers of a vLLM read from each other as :mod:`uccl.weights` plans it, so that a trainer sends each
byte once to a host.

With ``UcclTrainerInitInfo(overlap=True)`` weights arrive in host memory while the engine serves with the old ones, and
are loaded all at once by ``finish_weight_update``. A transfer that fails leaves the old ones in place.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
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
#: Seconds that a trainer waits for workers that read beside their work, if no timeout is set.
_PATIENCE = 600.0
#: Seconds between two attempts to end a worker's transfer.
_SLICE = 0.05


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
    #: Whether weights arrive while the engine serves.
    overlap: bool = False


@dataclass
class UcclUpdateInfo(WeightTransferUpdateInfo):
    """The version that the trainers have published."""

    version: int
    #: Whether the call returns when the transfer has begun.
    begins: bool = False


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

    def fetch(self, version: int, timeout: float | None) -> None:
        """Reads the tensors of this version, and of no other."""
        fetched = self.reader.fetch(version, timeout)
        if fetched.version != version:
            raise RuntimeError(
                f"the trainers went on to version {fetched.version} before version {version} was loaded"
            )

    @staticmethod
    def size(tensors: list[Any]) -> int:
        sizes = (math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class _Arrival:
    """A transfer of all groups beside the engine's work, on a thread of its own."""

    def __init__(self, groups: Sequence[_Group], version: int, timeout: float | None) -> None:
        self._groups, self._version, self._timeout = groups, version, timeout
        self._error: Exception | None = None
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="uccl-weights", daemon=True)

    def begin(self, link: _TrainerLink) -> None:
        """Starts it. The trainer is told of its end."""
        self._link = link
        self._thread.start()

    def _run(self) -> None:
        try:
            for group in self._groups:
                if self._is_ended:
                    raise RuntimeError("the transfer of weights was shut down")
                group.fetch(self._version, self._timeout)
        except Exception as error:
            self._error = error
        try:
            self._link.tell(self._version, str(self._error or ""))
        except Exception as error:
            self._error = self._error or error

    def wait(self) -> None:
        """Waits for its end, which the time of a group bounds. Raises its failure."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ends it: no byte lands any more."""
        self._is_ended = True
        while self._thread.is_alive():
            for group in self._groups:
                group.reader.abort()
            self._thread.join(_SLICE)


class _TrainerLink:
    """Messages from a worker to the first trainer."""

    def __init__(self, endpoint: p2p.Endpoint, manifest: str) -> None:
        self._endpoint, self._address = endpoint, json.loads(manifest)["address"]

    def tell(self, version: int, error: str = "") -> None:
        """Says that the worker is there (version 0), or that its transfer has ended."""
        message = json.dumps({"uccl_weights": version, "error": error}).encode()
        ok, conn = self._endpoint.reach(self._address)
        if not ok or not self._endpoint.send_notif(conn, message):
            raise RuntimeError(f"the trainer at {self._address} is not told: {p2p.last_error()}")


class UcclWeightTransferEngine(WeightTransferEngine[UcclInitInfo, UcclUpdateInfo]):
    """A worker's side."""

    init_info_cls = UcclInitInfo
    update_info_cls = UcclUpdateInfo

    _endpoint: p2p.Endpoint | None = None
    _groups: list[_Group]
    _timeout: float | None
    _link: _TrainerLink | None = None
    _arrival: _Arrival | None = None

    def init_transfer_engine(self, init_info: UcclInitInfo) -> None:
        self.shutdown()
        self.defers_processing = init_info.overlap
        endpoint = p2p.Endpoint(local_gpu_idx=self.device.index or 0, port=0)
        self._endpoint, self._timeout = endpoint, init_info.timeout
        dtypes = [getattr(torch, name) for name in init_info.dtype_names]
        tensors = {one[0]: one for one in zip(init_info.names, dtypes, init_info.shapes)}
        groups = [[tensors[name] for name in names] for names in layerwise_groups(init_info.names)]
        memories = self._memories([_Group.size(group) for group in groups], init_info.overlap)
        self._groups = [_Group(endpoint, memory, group) for memory, group in zip(memories, groups)]
        sources = [manifest.encode() for manifest in init_info.sources]
        rank, all_manifests = _of_all_workers([group.reader.manifest() for group in self._groups])
        for number, group in enumerate(self._groups):
            targets = [manifests[number] for manifests in all_manifests]
            group.reader.join(sources, targets, rank, Options(fan_out=init_info.fan_out))
        if init_info.overlap:
            self._link = _TrainerLink(endpoint, init_info.sources[0])
            self._link.tell(0)

    def _memories(self, sizes: list[int], overlap: bool) -> list[torch.Tensor]:
        """Memory of each group: all have the same, or each has its own, in the host's memory."""
        if not overlap:
            shared = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
            return [shared] * len(sizes)
        is_pinned = self.device.type == "cuda"
        return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]

    def start_weight_update(self) -> None:
        # With overlap the model serves until all weights are there.
        if self._link is None:
            self._initialize_reload()

    def _initialize_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UcclUpdateInfo) -> None:
        if self._endpoint is None:
            raise RuntimeError("the transfer of weights is not initialised")
        version = update_info.version
        if self._link is not None:
            self._receive_beside(self._link, update_info)
            return
        for group in self._groups:
            group.fetch(version, self._timeout)
            self.model.load_weights(list(group.tensors.items()))
            # The next group comes to the same memory.
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            group.reader.wait_taken(version, self._timeout)
            group.reader.begin()

    def _receive_beside(self, link: _TrainerLink, update_info: UcclUpdateInfo) -> None:
        """Begins a transfer, or waits for the end of the one that has begun."""
        if update_info.begins:
            self._end_arrival()
            self._arrival = _Arrival(self._groups, update_info.version, self._timeout)
            self._arrival.begin(link)
        elif self._arrival is not None:
            try:
                self._arrival.wait()
            except BaseException:
                # vLLM ends the update.
                self._arrival = None
                raise

    def drain_pending(self) -> None:
        """Loads the weights that have arrived beside the engine's work."""
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        arrival.wait()
        self._initialize_reload()
        for group in self._groups:
            self.model.load_weights(list(group.tensors.items()))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _end_arrival(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.end()

    def finish_weight_update(self) -> None:
        self.drain_pending()
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._end_arrival()
        endpoint, self._endpoint, self._link = self._endpoint, None, None
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
    #: Whether weights arrive, in the workers' host memory, while the engine serves with the old ones.
    overlap: bool = False


class UcclTrainerWeightTransferEngine(TrainerWeightTransferEngine[UcclTrainerInitInfo]):
    """A trainer's side."""

    init_info_cls = UcclTrainerInitInfo

    _endpoint: p2p.Endpoint
    _publisher: Publisher
    _pieces: dict[str, torch.Tensor]
    _version = 0
    #: Workers that tell of the end of their transfers; None if the engine waits for them.
    _workers: int | None = None
    _patience = _PATIENCE

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
                overlap=init_info.overlap,
            )
            client.init_weight_transfer_engine(asdict(info))
            if init_info.overlap:
                # Each has told before its call returned.
                engine._workers = len(engine._messages(0, 0, 0.0))
            if init_info.timeout is not None:
                engine._patience = init_info.timeout * (len(metas) + 1)
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
            if self._workers is None:
                self.client.update_weights(asdict(UcclUpdateInfo(version=self._version)))
            else:
                self._send_beside(self._workers)
            self.client.finish_weight_update()
        _of_all_trainers(b"")
        # The trainer may change them from now on.
        self._publisher.begin()

    def _send_beside(self, workers: int) -> None:
        """Waits until all workers have the weights, while their engines serve."""
        version = self._version
        self.client.update_weights(asdict(UcclUpdateInfo(version=version, begins=True)))
        errors = self._messages(version, workers, self._patience)
        failures = [error for error in errors if error]
        if failures or len(errors) < workers:
            # A worker that has failed raises its error here, and vLLM ends the update.
            self.client.update_weights(asdict(UcclUpdateInfo(version=version)))
            late = f"{workers - len(errors)} of {workers} workers are late"
            raise RuntimeError(f"version {version} has not arrived: {[*failures, late][0]}")

    def _messages(self, version: int, count: int, timeout: float) -> list[str]:
        """The errors of so many workers, empty for those without one: those that tell of a version in
        time, or have told already."""
        errors: list[str] = []
        end = time.monotonic() + timeout
        while True:
            left = max(end - time.monotonic(), 0.0)
            for _, message in self._endpoint.wait_notifs(left):
                told = json.loads(message)
                if told.get("uccl_weights") == version:
                    errors.append(told["error"])
            if len(errors) >= count or time.monotonic() >= end:
                return errors

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
