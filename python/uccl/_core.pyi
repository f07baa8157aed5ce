from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, SupportsIndex, Union, overload

from typing_extensions import Buffer, Self, TypeAlias, disjoint_base, final

__all__ = [
    "Endpoint",
    "EpBlock",
    "EpCombine",
    "EpCudaCombine",
    "EpCudaDispatch",
    "EpCudaGroup",
    "EpCudaHandle",
    "EpCudaLaidOut",
    "EpCudaNormalCombine",
    "EpCudaNormalDispatch",
    "EpCudaNormalHandle",
    "EpCudaNormalKind",
    "EpCudaParts",
    "EpDispatch",
    "EpGroup",
    "EpHandle",
    "EpRouting",
    "SharedMemory",
    "XferDesc",
    "XferHandle",
    "__version__",
    "ep_cuda_combine_scratch_len",
    "ep_cuda_layout",
    "ep_cuda_records_len",
    "ep_cuda_room_for",
    "ep_cuda_scratch_len",
    "ep_dispatch_len",
    "ep_node",
    "ep_nodes",
    "ep_row_place_len",
    "ep_row_slots",
    "get_oob_ip",
    "last_error",
]
__version__: str

class _Tensor(Protocol):
    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...

class _Array(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

_Memory: TypeAlias = Union[_Tensor, _Array, Buffer]
_Pointer: TypeAlias = Union[SupportsIndex, _Memory]

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...
    @property
    def device(self) -> Any: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...
    @property
    def device_id(self) -> int: ...

_Signal: TypeAlias = tuple[Buffer, int, str]
_Stream: TypeAlias = Union[SupportsIndex, _TorchStream, _CupyStream]

# Elements that calls on vectors take. A buffer is an array of 64-bit integers, the cheapest form
# for many.
_Ids: TypeAlias = Union[Iterable[int], Buffer]
_Pointers: TypeAlias = Union[Iterable[_Pointer], Buffer]
_Sizes: TypeAlias = Union[Iterable[Union[int, None]], Buffer]
# One buffer holds them all, one after another: 64 bytes for an advert, 104 for one of
# advertise_ipc.
_Blobs: TypeAlias = Union[Iterable[Buffer], Buffer]

def get_oob_ip(local_gpu_idx: int | None = None) -> str: ...
def last_error() -> str | None: ...
def _nixl_plugin_dir(ours: str, theirs: str) -> Path: ...
@final
class SharedMemory:
    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...

@final
class XferDesc:
    addr: int
    size: int
    mr_id: int
    lkeys: list[int]
    rkeys: list[int]
    def __new__(
        cls,
        addr: int = 0,
        size: int = 0,
        mr_id: int = ...,
        lkeys: Sequence[int] = ...,
        rkeys: Sequence[int] = ...,
    ) -> Self: ...

@final
class XferHandle:
    @property
    def conn_id(self) -> int: ...
    @property
    def op_name(self) -> str: ...
    @property
    def transfer_id(self) -> int: ...
    def __new__(cls, conn_id: int, op_name: str, transfer_id: int) -> Self: ...

# Parameters have further names, those of UCCL's other releases, for callers that use them; the ones
# here are the positional order's.
@disjoint_base
class Endpoint:
    def __new__(
        cls,
        local_gpu_idx: int | None = None,
        num_cpus: int | None = None,
        *,
        psk: str | Buffer | None = None,
        bind: str | None = None,
        port: int | None = None,
        base_port: int | None = None,
        timeout: float | None = None,
        transfer_timeout: float | None = None,
        transport: Literal["auto", "local", "tcp", "verbs", "libfabric", "cxi", "efa", "fifo"]
        | None = None,
        tcp_streams: int | None = None,
        tcp_congestion: str | None = None,
        checksum: bool | Literal["auto", "on", "off"] | None = None,
        cma: bool | None = None,
        ipc: bool | None = None,
        spin_us: int | None = None,
        numa_affinity: bool | None = None,
    ) -> Self: ...
    @overload
    def connect(
        self,
        remote_ip_addr: str,
        remote_gpu_idx: int | str | None = None,
        remote_port: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]: ...
    @overload
    def connect(
        self,
        remote_ip_addr: str,
        *,
        remote_gpu_bdf: str,
        remote_port: int | None = None,
        timeout: float | None = None,
    ) -> tuple[bool, int]: ...
    @overload
    def connect_local(
        self, remote_gpu_idx: int | str, *, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    @overload
    def connect_local(
        self, *, remote_gpu_bdf: str, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    def accept(self, *, timeout: float | None = None) -> tuple[bool, str, int, int]: ...
    def accept_local(self, *, timeout: float | None = None) -> tuple[bool, int, int]: ...
    def start_passive_accept(self) -> bool: ...
    def add_remote_endpoint(self, metadata_bytes: Buffer) -> tuple[bool, int]: ...
    def remove_remote_endpoint(self, conn_id: int) -> bool: ...
    def get_metadata(self) -> bytes: ...
    @staticmethod
    def parse_metadata(metadata: Buffer) -> tuple[str, int, int | str]: ...
    @overload
    def reg(
        self, ptr: SupportsIndex, size: int, floatType: int | None = None
    ) -> tuple[bool, int]: ...
    @overload
    def reg(
        self, ptr: _Memory, size: int | None = None, floatType: int | None = None
    ) -> tuple[bool, int]: ...
    def regv(self, ptrs: _Pointers, sizes: _Sizes | None = None) -> tuple[bool, list[int]]: ...
    def dereg(self, mr_id: int) -> bool: ...
    def register_memory(self, tensor_list: Iterable[_Memory]) -> list[XferDesc]: ...
    def deregister_memory(self, desc_list: Iterable[XferDesc]) -> None: ...
    def get_serialized_descs(self, desc_list: Iterable[XferDesc]) -> bytes: ...
    def deserialize_descs(self, serialized_bytes: Buffer) -> list[XferDesc]: ...
    def transfer(
        self,
        conn_id: int,
        op_name: Literal["read", "write"],
        local_desc_list: Iterable[XferDesc],
        remote_desc_list: Iterable[XferDesc],
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    @overload
    def advertise(self, mr_id: int, ptr: SupportsIndex, size: int) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, mr_id: int, ptr: _Memory, size: int | None = None
    ) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, conn_id: int, mr_id: int, ptr: _Pointer, size: int | None = None
    ) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, conn_id: int, mr_id: int, ptr: _Pointer, size: int | None, out_buf: Buffer
    ) -> bool: ...
    @overload
    def advertisev(
        self,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]: ...
    @overload
    def advertisev(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]: ...
    @overload
    def advertisev(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        out_buf_list: _Blobs,
        num_iovs: int | None = None,
    ) -> bool: ...
    def advertise_ipc(
        self, conn_id: int, ptr: _Pointer, size: int | None = None
    ) -> tuple[bool, bytes]: ...
    def advertisev_ipc(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]: ...
    def send(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def send_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def recv(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def recv_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def sendv(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def sendv_async(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def recvv(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def recvv_async(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def read(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None,
        meta: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def read_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None,
        meta: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def write(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None,
        meta: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
        signal: _Signal | None = None,
        strong: bool = False,
        context: int = 0,
    ) -> bool: ...
    def write_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None,
        meta: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
        signal: _Signal | None = None,
        strong: bool = False,
        context: int = 0,
    ) -> tuple[bool, int]: ...
    def readv(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        meta_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def readv_async(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        meta_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def writev(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        meta_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
        signal: _Signal | None = None,
        strong: bool = False,
        context: int = 0,
    ) -> bool: ...
    def writev_async(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        meta_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
        signal: _Signal | None = None,
        strong: bool = False,
        context: int = 0,
    ) -> tuple[bool, int]: ...
    def send_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def send_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def recv_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def recv_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def read_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None,
        info: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def read_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None,
        info: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def write_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None,
        info: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def write_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None,
        info: Buffer,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def readv_ipc(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        info_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def readv_ipc_async(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        info_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def writev_ipc(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        info_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool: ...
    def writev_ipc_async(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        info_v: _Blobs,
        num_iovs: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]: ...
    def poll_async(self, transfer_id: int) -> tuple[bool, bool]: ...
    def wait(self, transfer_id: int, timeout: float | None = None) -> tuple[bool, bool]: ...
    def stream_wait(self, transfer_id: int, stream: _Stream) -> bool: ...
    def wait_signal(
        self,
        ptr: _Pointer,
        value: int,
        mr_id: int | None = None,
        *,
        equals: bool = False,
        timeout: float | None = None,
        conn_id: int | None = None,
    ) -> tuple[bool, int]: ...
    def stream_wait_signal(
        self,
        stream: _Stream,
        ptr: _Pointer,
        value: int,
        mr_id: int | None = None,
        *,
        conn_id: int | None = None,
    ) -> bool: ...
    def cancel(self, transfer_id: int) -> bool: ...
    def transfer_error(self, transfer_id: int) -> str | None: ...
    def transfer_bytes(self, transfer_id: int) -> int | None: ...
    @staticmethod
    def last_error() -> str | None: ...
    def send_notif(
        self, conn_id: int, payload: Buffer, *, timeout: float | None = None
    ) -> bool: ...
    def send_notif_async(
        self, conn_id: int, payload: Buffer, *, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    def get_notifs(self) -> list[tuple[int, bytes]]: ...
    def wait_notifs(self, timeout: float | None = None) -> list[tuple[int, bytes]]: ...
    def stats(self) -> dict[str, int]: ...
    def path(self, conn_id: int, meta: Buffer, mr_id: int | None = None) -> str | None: ...
    def connection(self, conn_id: int) -> dict[str, Any] | None: ...
    def region_info(self, mr_id: int) -> dict[str, Any] | None: ...
    def worker_cpus(self) -> list[int] | None: ...
    def conn_id_of_rank(self, rank: int) -> int: ...
    def close(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...
    def _alloc(self, size: int) -> SharedMemory: ...

class EpGroup:
    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        pool: int,
        timeout: float,
        masks_late: bool,
        node: int | None,
        exchange: Callable[[bytes], list[bytes | None]],
    ) -> None: ...
    def regroup(self, exchange: Callable[[bytes], list[bytes | None]]) -> EpGroup: ...
    def barrier(self) -> None: ...
    @property
    def generation(self) -> int: ...
    def there(self) -> list[bool]: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def nodes(self) -> tuple[int, int]: ...
    @property
    def pool(self) -> int: ...
    @property
    def pool_len(self) -> int: ...
    def has_block(self, address: int, len: int) -> bool: ...
    def mask(self, rank: int, is_masked: bool) -> None: ...
    def masks(self) -> list[bool]: ...

class EpBlock:
    def __init__(self, group: EpGroup, len: int) -> None: ...
    @property
    def address(self) -> int: ...
    def is_read(self) -> bool: ...

class EpRouting:
    @staticmethod
    def by_choices(
        *, experts: int, is_64: bool, tokens: int, top_k: int, num_experts: int, ranks: int
    ) -> EpRouting: ...
    @staticmethod
    def by_rank(*, goes: int, tokens: int, per_expert: list[int], ranks: int) -> EpRouting: ...
    @property
    def tokens(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def local_experts(self) -> int: ...
    def per_rank(self) -> list[int]: ...
    def per_expert(self) -> list[int]: ...
    def fill_goes(self, out: int) -> None: ...

class EpHandle:
    @property
    def routing(self) -> EpRouting: ...
    @property
    def relays(self) -> int: ...
    def fill_low_latency(self, src_info: int, layout_range: int, slots: int) -> None: ...
    def fill_source_metadata(self, out: int, most: int) -> None: ...
    def check_is_last(self) -> None: ...
    def counts(self) -> list[int]: ...

class EpDispatch:
    def __init__(
        self,
        group: EpGroup,
        routing: EpRouting,
        *,
        rows: int,
        stride: int,
        kind: str,
        len: int,
        global_scale: float = 1.0,
        scales: tuple[int, int, int, int] | None = None,
        weights: int = 0,
        slots: int | None = None,
        room: int = 0,
        relays: bool = False,
        stays: bool = False,
    ) -> None: ...
    def __enter__(self) -> EpDispatch: ...
    def __exit__(self, *_raised: object) -> None: ...
    def counts(self) -> tuple[list[int], list[int]]: ...
    def waited(self) -> list[int]: ...
    def receive(
        self,
        *,
        len: int,
        rows: int,
        stride: int,
        scales: tuple[int, int, int, int] | None = None,
        tiles: tuple[int, int] | None = None,
        choices: int = 0,
        is_64: bool = False,
        weights: int = 0,
        zeroes_foreign: bool = False,
        starts: list[int] | None = None,
    ) -> EpHandle: ...

class EpCombine:
    def __init__(
        self,
        handle: EpHandle,
        *,
        rows: int,
        len: int,
        stride: int,
        hidden: int,
        sends: str,
        weights: int = 0,
        is_packed: bool = False,
        stays: bool = False,
        leaves: bool = False,
        relays: str | None = None,
    ) -> None: ...
    def finish(
        self,
        *,
        rows: int,
        sums: str,
        choice_weights: int = 0,
        bias: tuple[int, int] = (0, 0),
        weights: int = 0,
        experts: int = 0,
        is_64: bool = False,
    ) -> list[int]: ...

class EpCudaGroup:
    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        pool: int,
        timeout: float,
        masks_late: bool,
        device: int,
        blocks: int,
        is_alone: bool,
        node: int | None,
        by_host: bool,
        exchange: Callable[[bytes], list[bytes | None]],
    ) -> None: ...
    @property
    def pool(self) -> int: ...
    @property
    def is_by_host(self) -> bool: ...
    @property
    def has_whole_calls(self) -> bool: ...
    @property
    def nodes(self) -> tuple[int, int]: ...
    @property
    def unreached(self) -> str | None: ...
    @property
    def pool_len(self) -> int: ...
    def check(self) -> None: ...
    def tell_too_many(self, stream: int) -> None: ...
    def mask(self, *, left_out: int, let_in: int, status: int, stream: int) -> None: ...

class EpCudaDispatch:
    def __init__(
        self,
        group: EpCudaGroup,
        *,
        rows: int,
        stride: int,
        kind: str,
        len: int,
        global_scale: tuple[float, int],
        experts: int,
        is_64: bool,
        tokens: int,
        top_k: int,
        num_experts: int,
        slots: int,
        scratch: int,
        stream: int,
    ) -> None: ...
    def begin(self) -> None: ...
    def receive(
        self,
        *,
        rows: int,
        stride: int,
        count: int,
        stats: int,
        waits: int,
        table: tuple[int, int, int],
        scales: tuple[int, int, int, int] | None = None,
        tiles: tuple[int, int] | None = None,
    ) -> EpCudaHandle: ...

class EpCudaHandle: ...

class EpCudaCombine:
    def __init__(
        self,
        group: EpCudaGroup,
        handle: EpCudaHandle,
        *,
        rows: int,
        hidden: int,
        records: int,
        is_packed: bool,
        scratch: int,
        stream: int,
    ) -> None: ...
    def begin(self) -> None: ...
    def finish(self, *, rows: int, weights: int, experts: int, waits: int) -> None: ...

class EpCudaLaidOut: ...

class EpCudaNormalDispatch:
    def counts(self, limit: float) -> tuple[list[int], list[int]]: ...
    def in_place(self) -> tuple[int, int, int, int] | None: ...

class EpCudaNormalHandle: ...

class EpCudaNormalKind:
    def __init__(self, alike: Any) -> None: ...
    def begin(self, group: EpCudaGroup, sending: _Sending) -> EpCudaNormalDispatch: ...
    def receive(
        self, dispatch: EpCudaNormalDispatch, receiving: _Receiving
    ) -> EpCudaNormalHandle: ...
    def dispatch(
        self, group: EpCudaGroup, sending: _Sending, receiving: _Receiving, limit: float | None
    ) -> tuple[
        EpCudaNormalHandle | None, EpCudaNormalDispatch | None, tuple[list[int], list[int]] | None
    ]: ...

class EpCudaParts:
    def __init__(self, parts: Any) -> None: ...

#: The types of these names in `uccl.ep._gpu_dispatch`.
_Sending: TypeAlias = tuple[
    int,
    Union[tuple[int, int, int, int], None],
    int,
    int,
    bool,
    Union[tuple[int, int], None],
    int,
    Union[EpCudaLaidOut, None],
    Union[EpCudaNormalHandle, None],
    int,
    int,
    int,
    int,
]
_Receiving: TypeAlias = tuple[
    int, int, Union[tuple[int, int, int], None], bool, int, int, EpCudaParts
]

class EpCudaNormalCombine:
    def __init__(
        self,
        group: EpCudaGroup,
        handle: EpCudaNormalHandle,
        *,
        len: int,
        rows: int,
        hidden: int,
        weights: int,
        sends: str,
        blocks: int,
        scratch: int,
        stream: int,
    ) -> None: ...
    def finish(self, *, rows: int, sums: str, bias: tuple[int, int], weights: int) -> None: ...

def ep_cuda_combine_scratch_len() -> int: ...
def ep_cuda_layout(
    group: EpCudaGroup,
    *,
    experts: int,
    is_64: bool,
    tokens: int,
    top_k: int,
    num_experts: int,
    per_rank: int,
    per_expert: int,
    goes: int,
    scratch: int,
    stream: int,
) -> EpCudaLaidOut: ...
def ep_cuda_records_len(slots: int, ranks: int, top_k: int) -> int: ...
def ep_cuda_room_for(
    group: EpCudaGroup,
    tokens: int,
    *,
    payload: int,
    scales: int,
    hidden: int,
    top_k: int,
    local_experts: int,
    stays: bool,
) -> int: ...
def ep_cuda_scratch_len(tokens: int, top_k: int, num_experts: int, ranks: int) -> int: ...
def ep_dispatch_len(
    payload: int, scales: int, top_k: int, local_experts: int, slots: int, spread: tuple[int, int]
) -> int: ...
def ep_row_place_len(values: int, weights: int, slots: int, tokens: int) -> int: ...
def ep_row_slots(top_k: int, spread: tuple[int, int]) -> int: ...
def ep_node(node: int | None) -> bytes: ...
def ep_nodes(of_ranks: list[bytes]) -> tuple[int, int]: ...
