"""Ray's tensor transport over this engine: ``tensor_transport="UCCL"``.

>>> import uccl.ray
>>> uccl.ray.register()                       # in the driver, before it makes actors
>>> @ray.remote
... class Trainer:
...     @ray.method(tensor_transport="UCCL")
...     def weights(self): ...

The receiver reads the sender's tensors one-sidedly, on CPUs and GPUs. An abort fences: when it returns, no byte of the
transfer lands any more. The free of an object ends its memory's regions, which waits for readers that are in the
middle.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

from uccl import p2p

__all__ = ["UcclTransport", "register"]

NAME = "UCCL"
#: Aborts of objects whose fetch has not begun that are remembered.
_ABORTS = 1024
#: Seconds of a wait between two looks at an abort.
_SLICE = 0.05


def register() -> None:
    """Registers the transport, unless this process has done so. Call it in the driver, before it makes actors."""
    from ray.experimental.rdt.util import transport_manager_info

    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, ["cuda", "cpu"], UcclTransport, torch.Tensor)


@dataclass
class UcclCommunicatorMetadata(CommunicatorMetadata):
    """Nothing: adverts and address are with the tensors."""


@dataclass
class UcclTransportMetadata(TensorTransportMetadata):
    """Where the tensors of an object are."""

    #: ``"ip:port"`` of the sender's endpoint.
    address: str = ""
    #: An advert for each tensor; that of one without bytes is empty.
    adverts: list[bytes] = field(default_factory=list)


@dataclass
class UcclFetchRequest(FetchRequest):
    """A fetch under way. Its drop ends it, so that its memory can be freed."""

    transport: Any = None
    transfer: int | None = None
    regions: list[int] = field(default_factory=list)

    def end(self) -> None:
        """Fences the transfer and ends the regions of its memory."""
        if self.transport is not None:
            self.transport._end(self)

    def __del__(self) -> None:
        self.end()


class UcclTransport(TensorTransportManager):
    """The eleven calls that Ray makes; each is one or two of the engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: p2p.Endpoint | None = None
        #: By object: its description, and its regions.
        self._objects: dict[str, tuple[UcclTransportMetadata, list[int]]] = {}
        self._fetches: dict[str, UcclFetchRequest] = {}
        self._aborts: OrderedDict[str, None] = OrderedDict()

    def _endpoint(self) -> p2p.Endpoint:
        with self._lock:
            if self._made is None:
                gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
                self._made = p2p.Endpoint(local_gpu_idx=gpu, port=0)
                self._made.start_passive_accept()
            return self._made

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        import ray

        def is_there(_: Any) -> bool:
            import importlib.util

            return importlib.util.find_spec("uccl") is not None

        call = actor.__ray_call__.options(concurrency_group="_ray_system")
        return bool(ray.get(call.remote(is_there)))

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> UcclTransportMetadata:
        with self._lock:
            # A task that Ray runs again describes the same tensors.
            if obj_id in self._objects:
                return self._objects[obj_id][0]
            _check(rdt_object)
            endpoint = self._endpoint()
            regions: list[int] = []
            try:
                adverts = [_advertise(endpoint, tensor, regions) for tensor in rdt_object]
            except BaseException:
                _release(endpoint, regions)
                raise
            ip, port, _ = p2p.Endpoint.parse_metadata(endpoint.get_metadata())
            host = f"[{ip}]" if ":" in ip else ip
            made = UcclTransportMetadata(
                tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
                tensor_device=rdt_object[0].device.type if rdt_object else None,
                address=f"{host}:{port}",
                adverts=adverts,
            )
            self._objects[obj_id] = (made, regions)
            return made

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> UcclCommunicatorMetadata:
        return UcclCommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        request = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(request)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> UcclFetchRequest:
        meta: Any = tensor_transport_metadata
        request = UcclFetchRequest(obj_id=obj_id, tensors=[], transport=self)
        try:
            self._begin(request, meta, target_buffers)
        except BaseException as error:
            request.end()
            if not isinstance(error, Exception):
                raise
            raise _failure(obj_id, error) from error
        return request

    def _begin(
        self,
        request: UcclFetchRequest,
        meta: UcclTransportMetadata,
        targets: list[torch.Tensor] | None,
    ) -> None:
        with self._lock:
            if request.obj_id in self._aborts:
                del self._aborts[request.obj_id]
                raise RuntimeError("it was aborted before it began")
        request.tensors = targets or [
            torch.empty(shape, dtype=dtype, device=meta.tensor_device)
            for shape, dtype in meta.tensor_meta
        ]
        _check(request.tensors)
        endpoint = self._endpoint()
        pieces = [pair for pair in zip(request.tensors, meta.adverts) if pair[1]]
        if not pieces:
            return
        ok, conn = endpoint.reach(meta.address)
        _need(ok)
        for tensor, _ in pieces:
            ok, region = endpoint.reg(tensor)
            _need(ok)
            request.regions.append(region)
        sizes = [math.prod(tensor.shape) * tensor.element_size() for tensor, _ in pieces]
        tensors, adverts = [tensor for tensor, _ in pieces], [advert for _, advert in pieces]
        with self._lock:
            ok, transfer = endpoint.readv_async(conn, request.regions, tensors, sizes, adverts)
            _need(ok)
            request.transfer = transfer
            self._fetches[request.obj_id] = request

    def wait_fetch_complete(
        self, fetch_request: FetchRequest, timeout: float = -1
    ) -> list[torch.Tensor]:
        request: Any = fetch_request
        end = None if timeout < 0 else time.monotonic() + timeout
        while request.transfer is not None:
            left = _SLICE if end is None else min(_SLICE, max(end - time.monotonic(), 0))
            ok, is_done = self._endpoint().wait(request.transfer, left)
            if not ok:
                why = RuntimeError(p2p.last_error())
                request.end()
                raise _failure(request.obj_id, why)
            if is_done:
                request.end()
            elif end is not None and time.monotonic() >= end:
                raise TimeoutError(f"the fetch of {request.obj_id} took more than {timeout} s")
        tensors: list[torch.Tensor] = request.tensors
        return tensors

    def _end(self, request: UcclFetchRequest) -> None:
        with self._lock:
            transfer, request.transfer = request.transfer, None
            regions, request.regions = request.regions, []
            if self._fetches.get(request.obj_id) is request:
                del self._fetches[request.obj_id]
        if transfer is not None:
            # One that has ended stays as it is.
            self._endpoint().cancel(transfer)
        if regions:
            _release(self._endpoint(), regions)

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise NotImplementedError("the receiver reads: nothing is sent")

    def garbage_collect(
        self,
        obj_id: str,
        tensor_transport_meta: TensorTransportMetadata,
        tensors: list[torch.Tensor],
    ) -> None:
        with self._lock:
            _, regions = self._objects.pop(obj_id, (None, []))
        if regions:
            _release(self._endpoint(), regions)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        with self._lock:
            request = self._fetches.get(obj_id)
            transfer = request.transfer if request is not None else None
            if transfer is None:
                self._aborts[obj_id] = None
                while len(self._aborts) > _ABORTS:
                    self._aborts.popitem(last=False)
        if transfer is not None:
            _need(self._endpoint().cancel(transfer))


def _check(tensors: list[torch.Tensor]) -> None:
    if len({tensor.device.type for tensor in tensors}) > 1:
        raise ValueError("the tensors of an object are on devices of several types")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the tensors of an object have to be contiguous")
    # The work that fills or uses them was enqueued on any stream.
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _advertise(endpoint: p2p.Endpoint, tensor: torch.Tensor, regions: list[int]) -> bytes:
    if tensor.numel() == 0:
        return b""
    ok, region = endpoint.reg(tensor)
    _need(ok)
    regions.append(region)
    ok, advert = endpoint.advertise(region, tensor)
    _need(ok)
    return advert


def _release(endpoint: p2p.Endpoint, regions: list[int]) -> None:
    # The engine keeps the tensors of a region that a peer still touches.
    failed = [p2p.last_error() for region in regions if not endpoint.dereg(region)]
    if failed:
        raise RuntimeError(failed[0])


def _need(ok: bool) -> None:
    if not ok:
        raise RuntimeError(p2p.last_error())


def _failure(obj_id: str, why: Exception) -> Exception:
    from ray.exceptions import RayDirectTransportError

    error: Exception = RayDirectTransportError(f"UCCL did not fetch object {obj_id}: {why}")
    return error
