# Made by `cargo xtask stubs` from crates/uccl-py.
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, Union, overload

from typing_extensions import Buffer, Self, TypeAlias, disjoint_base, final

__all__ = [
    "AddressTransfer",
    "Endpoint",
    "EpBlock",
    "EpCombine",
    "EpCudaDispatchLayout",
    "EpCudaDispatchPlan",
    "EpCudaDispatchResult",
    "EpCudaGroup",
    "EpCudaLayoutWorkspace",
    "EpCudaLowLatencyCombine",
    "EpCudaLowLatencyDispatch",
    "EpCudaLowLatencyHandle",
    "EpCudaLowLatencyWorkspace",
    "EpCudaNormalCombine",
    "EpCudaNormalHandle",
    "EpCudaPoolHold",
    "EpCudaWorkspaceLayout",
    "EpCudaZeroCopyView",
    "EpDispatch",
    "EpGroup",
    "EpHandle",
    "EpNodes",
    "EpReceiveCounts",
    "EpRouting",
    "EpRowLayout",
    "EpSettings",
    "PreparedTransfer",
    "RankGroup",
    "RankWork",
    "SharedMemory",
    "WeightsPublisher",
    "WeightsReader",
    "XferDesc",
    "XferHandle",
    "__version__",
    "_nixl_plugin_dir",
    "ep_cuda_combine_scratch_len",
    "ep_cuda_layout",
    "ep_cuda_origin_rank",
    "ep_dispatch_len",
    "ep_node",
    "ep_nodes",
    "ep_row_place_len",
    "ep_row_slots",
    "ep_settings",
    "get_oob_ip",
    "last_error",
    "rank_card",
    "weights_area",
    "weights_plan",
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

class _DispatchMemory(Protocol):
    def workspace(self, layout: EpCudaWorkspaceLayout, waits: bool, /) -> int: ...
    def rows(self, num_rows: int, /) -> int: ...
    def scales(self, num_rows: int, /) -> _RowScales: ...
    def announce_too_many(self) -> None: ...

# Values of the settings.
_Transport: TypeAlias = Literal[
    "auto", "local", "tcp", "verbs", "libfabric", "cxi", "efa", "udp", "fifo"
]
_Checksum: TypeAlias = Union[bool, Literal["auto", "on", "off"]]

class _DispatchShape(Protocol):
    @property
    def hidden(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def scales(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def alignment(self) -> int | None: ...
    @property
    def choice_words(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def zero_foreign_weights(self) -> bool: ...
    @property
    def zero_gaps(self) -> bool: ...
    @property
    def is_col_major(self) -> bool: ...
    @property
    def zero_copy(self) -> bool: ...
    @property
    def fills_tables(self) -> bool: ...

class _PlanOptions(Protocol):
    @property
    def fan_out(self) -> int | None: ...
    @property
    def waves(self) -> int | None: ...
    @property
    def cut_bytes(self) -> int | None: ...

class _RowScales(Protocol):
    @property
    def words(self) -> int: ...
    @property
    def row_stride(self) -> int: ...
    @property
    def expert_stride(self) -> int: ...
    @property
    def word_stride(self) -> int: ...

class _ScaleTiles(Protocol):
    @property
    def words(self) -> int: ...
    @property
    def tile_rows(self) -> int: ...

class _SendArgs(Protocol):
    @property
    def rows(self) -> int: ...
    @property
    def scales(self) -> _TokenScales | None: ...
    @property
    def weights(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def is_64(self) -> bool: ...
    @property
    def token_in_rank(self) -> int | None: ...
    @property
    def per_expert(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def layout(self) -> EpCudaDispatchLayout | None: ...
    @property
    def cached(self) -> EpCudaNormalHandle | None: ...
    @property
    def row_layout(self) -> EpRowLayout | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def needs_counts(self) -> bool: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def stream(self) -> int: ...

class _TokenScales(Protocol):
    @property
    def words(self) -> int: ...
    @property
    def token_words(self) -> int: ...
    @property
    def token_stride(self) -> int: ...
    @property
    def word_stride(self) -> int: ...

class _WeightShard(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def ptr(self) -> int: ...
    @property
    def memory_ptr(self) -> int: ...
    @property
    def memory_len(self) -> int: ...

@disjoint_base
class Endpoint:
    """One process's engine for one GPU (or none).

    Calls of UCCL's API return `False`, or a tuple that starts with it, when they fail;
    `last_error()` then returns the reason.
    """

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
        transport: _Transport | None = None,
        tcp_streams: int | None = None,
        tcp_congestion: str | None = None,
        checksum: _Checksum | None = None,
        cma: bool | None = None,
        ipc: bool | None = None,
        spin_us: int | None = None,
        numa_affinity: bool | None = None,
        publish: bool | None = None,
        rdma_dev: str | None = None,
    ) -> Self: ...
    def publish(self, mr_id: int) -> bool:
        """Publishes a region: connected peers read and write it by address, without an advert,
        until it is deregistered. The endpoint must have been made with `publish=True`.
        """

    def reach(self, address: str, *, timeout: float | None = None) -> tuple[bool, int]:
        """The connection to the endpoint that listens at `address` (`"10.0.0.1:28100"`), made when
        it is first needed and again when its peer has died: `(ok, conn_id)`. All threads share it.
        """

    def look_up(
        self, conn_id: int, addr: int, size: int, *, timeout: float | None = None
    ) -> tuple[bool, list[bytes]]:
        """The adverts of the peer's published memory at an address: `(ok, [bytes])`, more than one
        where the range spans several regions. Asks the peer each time.
        """

    def read_by_address(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        remote_ptr_v: _Ids,
        size_v: _Sizes | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Reads the peer's published memory into registered memory, both named by their addresses.
        The peer's regions are looked up once and kept; regions that it has registered anew are
        looked up again.
        """

    def write_by_address(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        remote_ptr_v: _Ids,
        size_v: _Sizes | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Writes registered memory to the peer's published memory, as `read_by_address` reads
        it.
        """

    def read_by_address_async(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        remote_ptr_v: _Ids,
        size_v: _Sizes | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, AddressTransfer | None]:
        """Reads as `read_by_address`, without waiting: `(ok, transfer)`."""

    def write_by_address_async(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        remote_ptr_v: _Ids,
        size_v: _Sizes | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, AddressTransfer | None]:
        """Writes as `write_by_address`, without waiting: `(ok, transfer)`."""

    @overload
    def connect(
        self,
        remote_ip_addr: str,
        remote_gpu_idx: int | str | None = None,
        remote_port: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Connects to the endpoint that listens at an address: `(ok, conn_id)`.

        The addresses of a name are tried in order, all within `timeout`. Without a port, the
        call uses the GPU's well-known port, and waits within `timeout` for an endpoint that does
        not listen yet. At a given port an endpoint must listen already.
        """

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
    ) -> tuple[bool, int]:
        """Connects to the endpoint of a GPU of this host, and waits within `timeout` until it
        listens: `(ok, conn_id)`.
        """

    @overload
    def connect_local(
        self, *, remote_gpu_bdf: str, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    def accept(self, *, timeout: float | None = None) -> tuple[bool, str, int, int]:
        """Waits for a peer to connect: `(ok, ip, gpu_idx, conn_id)`."""

    def accept_local(self, *, timeout: float | None = None) -> tuple[bool, int, int]:
        """Waits for a peer of this host to connect: `(ok, gpu_idx, conn_id)`."""

    def start_passive_accept(self) -> bool:
        """Accepts connections in the background from now on; accept will not return them."""

    def add_remote_endpoint(self, metadata_bytes: Buffer) -> tuple[bool, int]:
        """Connects to the peer with this metadata, once: `(ok, conn_id)`. A lost connection is
        replaced by one to the endpoint that listens there now.
        """

    def remove_remote_endpoint(self, conn_id: int) -> bool:
        """Closes a connection; its unfinished transfers fail."""

    def get_metadata(self) -> bytes:
        """The address of this endpoint, for `add_remote_endpoint` of its peers."""

    @staticmethod
    def parse_metadata(metadata: Buffer) -> tuple[str, int, int | str]:
        """`(ip, port, gpu)` of metadata; the GPU is an index or a PCI address, as in the
        metadata.
        """

    def connection(self, conn_id: int) -> dict[str, Any] | None:
        """Information on a connection; None if there is no such connection."""

    def path(self, conn_id: int, meta: Buffer, mr_id: int | None = None) -> str | None:
        """The path of one-sided transfers with this metadata: 'mapped', 'cma', 'cuda_ipc', 'shm',
        'verbs', 'libfabric', 'udp', 'tcp' or 'fifo'; with a region of ours also 'owner', if the
        peer makes long copies.
        """

    def close(self) -> bool:
        """Fails unfinished transfers, ends all regions, closes all connections and stops the
        endpoint.

        True when no byte lands in this endpoint's memory any more. If a peer may still touch
        some of it, the result is False, `last_error()` names the regions, their buffers are kept
        allocated, and the same call waits once more.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None:
        """Closes the endpoint. A `RuntimeError` names the regions that a peer may still touch. If
        the block has raised an exception, that is raised instead, and `last_error()` names the
        regions.
        """

    @staticmethod
    def last_error() -> str | None:
        """The reason of the last failed call on this thread; None if none has failed."""

    def stats(self) -> dict[str, int]:
        """Counters since the endpoint was made."""

    def worker_cpus(self) -> list[int] | None:
        """The CPUs of the worker threads, near the GPU; None if they may run on all CPUs of the
        process.
        """

    def conn_id_of_rank(self, rank: int) -> int:
        """Always 2**64 - 1: no connection belongs to a rank."""

    @overload
    def reg(self, ptr: SupportsIndex, size: int, floatType: int | None = None) -> tuple[bool, int]:
        """Registers memory: `(ok, mr_id)`.

        Memory given by its address must stay allocated until `dereg`; an object is kept until
        then.
        """

    @overload
    def reg(
        self, ptr: _Memory, size: int | None = None, floatType: int | None = None
    ) -> tuple[bool, int]: ...
    def regv(self, ptrs: _Pointers, sizes: _Sizes | None = None) -> tuple[bool, list[int]]:
        """Registers many pieces of memory, all or none: `(ok, [mr_id])`."""

    def dereg(self, mr_id: int) -> bool:
        """Ends a region: no access of a peer lands in it any more. If a peer may still touch it,
        this fails, the memory has to stay allocated, and the same call waits once more. A region
        that several tensors of `register_memory` share ends with the last of their `mr_id`s.
        """

    def region_info(self, mr_id: int) -> dict[str, Any] | None:
        """Information on a region: `addr`, `len`, `kind` ('host', 'pinned', 'cuda:0', ...),
        `numa_node` and the nearest `nic`, if they are known; None if there is no such region.
        """

    def _alloc(self, size: int) -> SharedMemory:
        """Allocates memory that peers on this host can map; `uccl.p2p` makes it a buffer."""

    def register_memory(self, tensor_list: Iterable[_Memory]) -> list[XferDesc]:
        """Registers tensors, all or none, and describes them.

        A tensor that lies in an earlier one shares its region: the keys are equal, each has an
        `mr_id` of its own, and each needs a `deregister_memory`.
        """

    def deregister_memory(self, desc_list: Iterable[XferDesc]) -> None:
        """Ends the regions of descriptors, each with the last descriptor that shares it."""

    def get_serialized_descs(self, desc_list: Iterable[XferDesc]) -> bytes:
        """The bytes of descriptors, for a peer's `deserialize_descs`."""

    def deserialize_descs(self, serialized_bytes: Buffer) -> list[XferDesc]:
        """The descriptors in a peer's `get_serialized_descs`."""

    @overload
    def advertise(self, mr_id: int, ptr: SupportsIndex, size: int) -> tuple[bool, bytes]:
        """Makes an advert, with which a peer can read and write memory of a region: `(ok, bytes)`,
        or `ok` with `out_buf`.
        """

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
    def advertise(self, mr_id: int, ptr: _Pointer, size: int | None, out_buf: Buffer) -> bool: ...
    @overload
    def advertisev(
        self,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]:
        """Makes adverts, with which a peer can read and write many pieces of memory: `(ok,
        [bytes])`, or `ok` with `out_buf_list`: a buffer for each, or one of 64 bytes times the
        number of pieces.
        """

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
    @overload
    def advertisev(
        self,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        out_buf_list: _Blobs,
    ) -> bool: ...
    def advertise_ipc(
        self, conn_id: int, ptr: _Pointer, size: int | None = None
    ) -> tuple[bool, bytes]:
        """Makes the info with which a peer of this host can read and write memory: `(ok, info)`.

        An object is advertised until its end, or until the end of the object that it is a view
        of. An object without weak references, such as a `bytearray`, is kept until the connection
        is removed, or until the first advertisement after the connection was lost. Memory given by
        its address must stay allocated for the same time.
        """

    def advertisev_ipc(
        self,
        conn_id: int,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]:
        """Makes infos with which a peer of this host can access many pieces of memory: `(ok,
        [info])`.
        """

    def wait_signal(
        self,
        ptr: _Pointer,
        value: int,
        mr_id: int | None = None,
        *,
        equals: bool = False,
        timeout: float | None = None,
        conn_id: int | None = None,
    ) -> tuple[bool, int]:
        """Waits until a word of eight bytes, which peers' signals change, is `value` or more, or
        with `equals` is `value`: `(ok, value)`. `ok` is `False` if `timeout` seconds pass before,
        the connection `conn_id` is lost before, or there is no such word.
        """

    def stream_wait_signal(
        self,
        stream: _Stream,
        ptr: _Pointer,
        value: int,
        mr_id: int | None = None,
        *,
        conn_id: int | None = None,
    ) -> bool:
        """Has later work on a CUDA stream wait until a word of eight bytes, in a GPU's memory or in
        pinned host memory, has reached `value`: `True`, or `False` with `last_error()`. With
        `conn_id` the stream also goes on when that connection is lost or the time is over: read the
        word to know.
        """

    def send_notif(self, conn_id: int, payload: Buffer, *, timeout: float | None = None) -> bool:
        """Sends a message to the peer and waits until it is delivered."""

    def send_notif_async(
        self, conn_id: int, payload: Buffer, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Sends a message to the peer: `(ok, transfer_id)`."""

    def get_notifs(self) -> list[tuple[int, bytes]]:
        """Takes the messages that have arrived: `[(conn_id, bytes)]`, in order per connection."""

    def wait_notifs(
        self, timeout: float | None = None, *, conn_id: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Waits until messages are there or `timeout` seconds have passed, and takes them. With
        `conn_id` the wait also ends when that connection is lost, once all messages have been
        taken; `last_error()` then tells that from the end of the time. Either way the messages of
        all connections are taken.
        """

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
    ) -> bool:
        """Sends memory to the peer's matching receive."""

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
    ) -> tuple[bool, int]:
        """Sends memory to the peer's matching receive, without waiting: `(ok, transfer_id)`."""

    def recv(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool:
        """Receives at most `size` bytes from the peer's matching send."""

    def recv_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]:
        """Receives at most `size` bytes from the peer's matching send, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Sends many pieces of memory as one message."""

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
    ) -> tuple[bool, int]:
        """Sends many pieces of memory as one message, without waiting: `(ok, transfer_id)`."""

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
    ) -> bool:
        """Receives one message of many pieces."""

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
    ) -> tuple[bool, int]:
        """Receives one message of many pieces, without waiting: `(ok, transfer_id)`."""

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
    ) -> bool:
        """Reads the peer's advertised memory into local memory."""

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
    ) -> tuple[bool, int]:
        """Reads the peer's advertised memory into local memory, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Writes local memory to the peer's advertised memory."""

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
    ) -> tuple[bool, int]:
        """Writes local memory to the peer's advertised memory, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Reads many pieces as one transfer."""

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
    ) -> tuple[bool, int]:
        """Reads many pieces as one transfer, without waiting: `(ok, transfer_id)`."""

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
    ) -> bool:
        """Writes many pieces as one transfer."""

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
    ) -> tuple[bool, int]:
        """Writes many pieces as one transfer, without waiting: `(ok, transfer_id)`."""

    def send_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool:
        """Sends memory, registered or not, to the peer's matching receive."""

    def send_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]:
        """Sends memory, registered or not, to the peer's matching receive, without waiting: `(ok,
        transfer_id)`.
        """

    def recv_ipc(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> bool:
        """Receives at most `size` bytes into memory, registered or not."""

    def recv_ipc_async(
        self,
        conn_id: int,
        ptr: _Pointer,
        size: int | None = None,
        *,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]:
        """Receives at most `size` bytes into memory, registered or not, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Reads memory that `advertise_ipc` of the peer named."""

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
    ) -> tuple[bool, int]:
        """Reads memory that `advertise_ipc` of the peer named, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Writes memory that `advertise_ipc` of the peer named."""

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
    ) -> tuple[bool, int]:
        """Writes memory that `advertise_ipc` of the peer named, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Reads many pieces that `advertisev_ipc` of the peer named."""

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
    ) -> tuple[bool, int]:
        """Reads many pieces that `advertisev_ipc` of the peer named, without waiting: `(ok,
        transfer_id)`.
        """

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
    ) -> bool:
        """Writes many pieces that `advertisev_ipc` of the peer named."""

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
    ) -> tuple[bool, int]:
        """Writes many pieces that `advertisev_ipc` of the peer named, without waiting: `(ok,
        transfer_id)`.
        """

    def transfer(
        self,
        conn_id: int,
        op_name: Literal["read", "write", "READ", "WRITE"],
        local_desc_list: Iterable[XferDesc],
        remote_desc_list: Iterable[XferDesc],
        *,
        notif: Buffer | None = None,
        timeout: float | None = None,
        stream: _Stream | None = None,
    ) -> tuple[bool, int]:
        """Starts a `"read"` or `"write"` between descriptors: `(ok, transfer_id)`."""

    def prepare(
        self,
        op_name: Literal["read", "write", "READ", "WRITE"],
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        meta_v: _Blobs,
        num_iovs: int | None = None,
    ) -> tuple[bool, PreparedTransfer | None]:
        """Checks a `"read"` or `"write"` of many pieces once, for any number of posts: `(ok,
        prepared)`, and then `prepared.post(conn_id)`. No byte moves, and no connection is needed.
        """

    def poll_async(self, transfer_id: int) -> tuple[bool, bool]:
        """The state of a transfer: `(True, False)` in flight, `(True, True)` done, `(False, True)`
        failed.
        """

    def check_xfer_state(self, xfer_handle: int | tuple[bool, int] | XferHandle) -> bool:
        """Whether a transfer has ended, for UCCL's callers of `transfer` that ask by this name.
        `xfer_handle` is the result of `transfer`, an `XferHandle`, or a transfer's id. Raises
        `RuntimeError` with the reason if the transfer failed or was not started.
        """

    def wait(self, transfer_id: int, timeout: float | None = None) -> tuple[bool, bool]:
        """Waits for a transfer's end: the result of `poll_async`, or `(True, False)` if `timeout`
        seconds pass first.
        """

    def stream_wait(self, transfer_id: int, stream: _Stream) -> bool:
        """Has later work on a CUDA stream wait until the transfer has ended, without a wait of the
        caller: `True`, or `False` with `last_error()`. If `CUDA_DEVICE_MAX_CONNECTIONS` is below 8,
        the call itself waits for a transfer that is staged through host memory.
        """

    def cancel(self, transfer_id: int) -> bool:
        """Ends a transfer. When this returns True, no byte of it lands in either side's memory any
        more; `transfer_error` tells whether it had finished before.
        """

    def transfer_error(self, transfer_id: int) -> str | None:
        """The reason why a transfer failed; None if it has not."""

    def transfer_bytes(self, transfer_id: int) -> int | None:
        """The number of bytes that a finished transfer moved (for a receive: received); None unless
        it has succeeded.
        """

@final
class XferDesc:
    """A registered tensor: its own process knows it by `mr_id`, others by `rkeys`."""

    def __new__(
        cls,
        addr: int = 0,
        size: int = 0,
        mr_id: int = ...,
        lkeys: Sequence[int] = ...,
        rkeys: Sequence[int] = ...,
    ) -> Self: ...
    @property
    def mr_id(self) -> int:
        """The tensor's number in the process that registered it; 2**64 - 1 elsewhere."""

    @mr_id.setter
    def mr_id(self, mr_id: int) -> None: ...
    @property
    def addr(self) -> int:
        """Address in the owner's process."""

    @addr.setter
    def addr(self, addr: int) -> None: ...
    @property
    def size(self) -> int:
        """Size in bytes."""

    @size.setter
    def size(self, size: int) -> None: ...
    @property
    def lkeys(self) -> list[int]:
        """Keys for the owner's own use."""

    @lkeys.setter
    def lkeys(self, lkeys: Sequence[int]) -> None: ...
    @property
    def rkeys(self) -> list[int]:
        """Keys for its peers."""

    @rkeys.setter
    def rkeys(self, rkeys: Sequence[int]) -> None: ...

@final
class XferHandle:
    """A transfer that `transfer` started."""

    def __new__(cls, conn_id: int, op_name: str, transfer_id: int) -> Self: ...
    @property
    def conn_id(self) -> int: ...
    @property
    def op_name(self) -> str: ...
    @property
    def transfer_id(self) -> int: ...

@final
class SharedMemory:
    """The memory of a `uccl.p2p.SharedBuffer`; freed when the last region and buffer over it are
    gone.
    """

    @property
    def ptr(self) -> int:
        """The start address."""

    @property
    def size(self) -> int:
        """The length in bytes."""

@final
class AddressTransfer:
    """A transfer of `read_by_address_async` or `write_by_address_async`. It goes on as long as it
    is polled or waited for.
    """

    def poll(self) -> tuple[bool, bool]:
        """Its state: `(True, False)` in flight, `(True, True)` done, `(False, True)` failed, with
        `last_error()`.
        """

    def wait(self, timeout: float | None = None) -> tuple[bool, bool]:
        """Waits for its end: the result of `poll`, or `(True, False)` if `timeout` seconds pass
        first.
        """

    @property
    def timed_out(self) -> bool:
        """Whether it has failed because its deadline passed."""

    def cancel(self) -> bool:
        """Ends it. When this returns True, no byte of it lands in either side's memory any more."""

@final
class PreparedTransfer:
    """A read or write that `prepare` has checked. It keeps no region: a post after one of its
    regions was deregistered is refused.
    """

    def post(self, conn_id: int, notif: Buffer | None = None) -> tuple[bool, int]:
        """Starts it over a connection to the endpoint of its adverts: `(ok, transfer_id)`. The cost
        does not depend on the number of its pieces. `notif` goes with this post alone.
        """

    @property
    def nbytes(self) -> int:
        """The number of bytes that each post moves."""

@final
class EpNodes:
    """The nodes of a group."""

    def __new__(cls, count: int, ranks: int) -> Self: ...
    @property
    def count(self) -> int:
        """The number of nodes."""

    @property
    def ranks(self) -> int:
        """Ranks of each node."""

@final
class EpGroup:
    """One rank's end of a group."""

    def __new__(
        cls,
        *,
        rank: int,
        ranks: int,
        pool: int,
        timeout: float,
        masks_late: bool,
        node: int | None,
        exchange: Callable[[bytes], list[bytes | None]],
    ) -> Self:
        """Joins a group. `exchange(bytes)` returns the bytes of all ranks, by rank; None for a
        missing rank.
        """

    def regroup(self, exchange: Callable[[bytes], list[bytes | None]]) -> Self:
        """The group with the ranks that are present now: those that take part in `exchange`."""

    def barrier(self) -> None:
        """Waits until every rank that takes part has called this too."""

    @property
    def generation(self) -> int:
        """The number of times that the ranks have met."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def nodes(self) -> EpNodes:
        """The group's nodes. It is one node, unless all have the same number of consecutive
        ranks.
        """

    @property
    def pool(self) -> int:
        """The address of the pool."""

    @property
    def pool_len(self) -> int:
        """Bytes of the pool."""

    def has_block(self, address: int, len: int) -> bool:
        """Whether memory lies in a block of this rank."""

    def present(self) -> list[bool]:
        """By rank, whether it is present, masked or not."""

    def mask(self, rank: int, is_masked: bool) -> None:
        """Masks a rank in later calls, or unmasks it."""

    def masks(self) -> list[bool]:
        """By rank, whether it is masked."""

@final
class EpRouting:
    """The receivers of a rank's tokens."""

    @staticmethod
    def by_choices(
        *, experts: int, is_64: bool, tokens: int, top_k: int, num_experts: int, ranks: int
    ) -> EpRouting:
        """Routes tokens by the experts that they chose: `tokens * top_k` integers at `experts`."""

    @staticmethod
    def by_rank(
        *, token_in_rank: int, tokens: int, per_expert: Sequence[int], ranks: int
    ) -> EpRouting:
        """Routes tokens by ranks: `tokens * ranks` bytes at `token_in_rank`, each 0 or 1.
        `per_expert` counts the tokens of each expert.
        """

    @property
    def tokens(self) -> int:
        """The number of tokens."""

    @property
    def top_k(self) -> int:
        """The number of choices of a token."""

    @property
    def local_experts(self) -> int:
        """The number of experts of each rank."""

    def per_rank(self) -> list[int]:
        """By rank, the number of tokens that are sent to it."""

    def per_expert(self) -> list[int]:
        """By expert, the number of tokens that chose it."""

    def fill_token_in_rank(self, out: int) -> None:
        """Fills `tokens * ranks` bytes: by token and rank, 1 if the token is sent to the rank, else
        0.
        """

@final
class EpBlock:
    """Memory that peers read in place. It lives as long as this object, and as peers may read
    it.
    """

    def __new__(cls, group: EpGroup, len: int) -> Self:
        """Makes a block of `len` bytes."""

    @property
    def address(self) -> int:
        """The block's address."""

    def is_read(self) -> bool:
        """Whether no peer reads it any more."""

@final
class EpDispatch:
    """A dispatch in flight. At the end of its context, peers are notified that this rank gave up on
    it, unless it has ended.
    """

    def __new__(
        cls,
        group: EpGroup,
        routing: EpRouting,
        *,
        rows: int,
        stride: int,
        format: str,
        len: int,
        global_scale: float = 1.0,
        scales: _TokenScales | None = None,
        weights: int = 0,
        max_tokens: int | None = None,
        relays: bool = False,
        is_stable: bool = False,
    ) -> Self:
        """Starts to send tokens; with `relays`, once to each other node, if the group can.
        `max_tokens` is the limit of each rank's tokens; without it the tokens go in rounds. With
        `is_stable` the rows do not change until the call has ended.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_raised: object) -> None:
        """Ends the dispatch, unless it has ended."""

    def counts(self) -> EpReceiveCounts:
        """The received numbers, once every rank has sent them."""

    def waited(self) -> list[int]:
        """By rank, the nanoseconds that `counts` waited for it."""

    def receive(
        self,
        *,
        len: int,
        rows: int,
        stride: int,
        scales: _RowScales | None = None,
        tiles: _ScaleTiles | None = None,
        choices: int = 0,
        is_64: bool = False,
        weights: int = 0,
        zero_foreign_weights: bool = False,
        starts: Sequence[int] | None = None,
    ) -> EpHandle:
        """Takes the received rows. `starts`, if given, are the first rows of this rank's
        experts.
        """

@final
class EpReceiveCounts:
    """The received numbers of a dispatch."""

    @property
    def per_rank(self) -> list[int]:
        """Tokens by rank."""

    @property
    def per_expert(self) -> list[int]:
        """Rows by local expert."""

@final
class EpHandle:
    """The state of a dispatch that its combine needs."""

    @property
    def routing(self) -> EpRouting:
        """The routing of this rank's own tokens."""

    @property
    def relays(self) -> int:
        """The number of nodes over which tokens were relayed; 1 if they were not."""

    def fill_low_latency(self, src_info: int, layout_range: int, rows: int) -> None:
        """Fills the tables of low latency mode, with `rows` rows for each local expert: the token
        of each row (i32), and, by expert and rank, the first row and the number of rows (i64).
        """

    def fill_source_metadata(self, out: int, max_tokens: int) -> None:
        """Fills `[m, K + 2]` i32 for the received tokens: `rank * max_tokens + token`, `rank * K +
        k` with the last choice `k` that is of this rank, and, by choice, its row by experts, or -1.
        """

    def check_is_last(self) -> None:
        """Raises if ranks have connected or left since the dispatch."""

    def counts(self) -> list[int]:
        """By rank, the number of tokens received from it."""

@final
class EpCombine:
    """A combine in flight."""

    def __new__(
        cls,
        handle: EpHandle,
        *,
        rows: int,
        len: int,
        stride: int,
        hidden: int,
        sends: str,
        weights: int = 0,
        is_packed: bool = False,
        is_stable: bool = False,
        has_hook: bool = False,
        relays: str | None = None,
    ) -> Self:
        """Starts to send rows back. `sends` is "row", "each" or "sum". `relays`, "rank" or
        "choice", is the order in which relays sum them; without it every row is sent all the way.
        `has_hook` leaves rows in a block, where their receivers read them.
        """

    def finish(
        self,
        *,
        rows: int,
        sums: str,
        choice_weights: int = 0,
        bias: int = 0,
        second_bias: int = 0,
        weights: int = 0,
        experts: int = 0,
        is_64: bool = False,
    ) -> list[int]:
        """Sums the returned rows. `sums` is "rank", "choice" or "weighted", with weights of
        choices. Rows of experts are left out if their choice is negative in `experts`, if that is
        given. The biases are up to two first addends, or 0. Returns, by rank, the nanoseconds that
        this waited for it.
        """

@final
class EpCudaGroup:
    """One rank's end of a group of ranks with GPUs."""

    def __new__(
        cls,
        *,
        rank: int,
        ranks: int,
        pool: int,
        timeout: float,
        masks_late: bool,
        device: int,
        node: int | None,
        via_host: bool,
        in_fabric: bool,
        exchange: Callable[[bytes], list[bytes | None]],
    ) -> Self:
        """Joins a group. `exchange(bytes)` returns the bytes of all ranks, by rank. Ranks of one
        GPU share its multiprocessors, less those that the environment reserves. With `via_host` no
        rank accesses the memory of another's GPU. With `in_fabric` ranks on several hosts of an
        NVLink domain do so too.
        """

    @property
    def pool(self) -> int:
        """The address of the pool on the GPU."""

    @property
    def is_via_host(self) -> bool:
        """Whether ranks reach each other through the host's memory."""

    @property
    def can_fuse(self) -> bool:
        """Whether one launch may do a whole call of normal mode."""

    @property
    def nodes(self) -> EpNodes:
        """The group's nodes. It is one node, unless all have the same number of consecutive
        ranks.
        """

    @property
    def unreached_reason(self) -> str | None:
        """The reason why ranks of one node, or of one NVLink domain, do not reach each other's GPU
        memory, or None.
        """

    @property
    def fabric_refusal(self) -> str | None:
        """The reason why this rank's window has no fabric handle, though it was made with
        `in_fabric`; or None.
        """

    @property
    def pool_len(self) -> int:
        """Bytes of the pool."""

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far."""

    def present(self) -> list[bool]:
        """By rank, whether it is there, left out or not."""

    def masks(self, *, stream: int) -> list[bool]:
        """By rank, whether it is left out behind the work on a stream, for which this waits."""

    def regroup(
        self, *, streams: Sequence[int], exchange: Callable[[bytes], list[bytes | None]]
    ) -> None:
        """Has the ranks that exchange bytes now meet anew. Waits for the calls on these streams;
        none may be on others. Ranks of one GPU share its multiprocessors anew.
        """

    def pool_hold(self) -> EpCudaPoolHold:
        """An object that keeps the memory of the pool, also when ranks meet anew."""

    def check(self) -> None:
        """Raises the error of a call that has failed. Waits for no call."""

    def announce_too_many(self, stream: int) -> None:
        """Enqueues a notice to peers that this rank has more tokens than a call has room for, and
        so makes no call.
        """

    def mask(
        self, *, left_out: Sequence[int], let_in: Sequence[int], status: int, stream: int
    ) -> None:
        """Enqueues masks: ranks that are left out, and ranks that are let in. Unless `status` is 0,
        writes an i32 by rank there: whether it is left out then.
        """

@final
class EpCudaPoolHold:
    """The memory of a pool."""

@final
class EpCudaLowLatencyDispatch:
    """A dispatch."""

    def __new__(
        cls,
        group: EpCudaGroup,
        *,
        rows: int,
        stride: int,
        format: str,
        len: int,
        global_scale: float,
        global_scale_at: int,
        experts: int,
        is_64: bool,
        tokens: int,
        top_k: int,
        num_experts: int,
        max_tokens: int,
        expert_rows: int,
        scratch: int,
        stream: int,
    ) -> Self:
        """Makes a dispatch of tokens, without enqueuing it. NVFP4's global scale is at an address,
        unless that is 0, and else a number. The outputs have `expert_rows` rows for each local
        expert.
        """

    def begin(self) -> None:
        """Enqueues the sends."""

    def receive(
        self,
        *,
        rows: int,
        stride: int,
        count: int,
        stats: int,
        waits: int,
        src_info: int,
        records: int,
        layout_range: int,
        scales: _RowScales | None = None,
        tiles: _ScaleTiles | None = None,
    ) -> EpCudaLowLatencyHandle:
        """Enqueues the receipt, and the sends unless they were enqueued. `src_info`, `records` and
        `layout_range` are the handle's tables.
        """

@final
class EpCudaLowLatencyHandle:
    """The state of a dispatch that its combine needs."""

@final
class EpCudaLowLatencyCombine:
    """A combine."""

    def __new__(
        cls,
        group: EpCudaGroup,
        handle: EpCudaLowLatencyHandle,
        *,
        rows: int,
        hidden: int,
        records: int,
        is_packed: bool,
        scratch: int,
        stream: int,
    ) -> Self:
        """Makes a combine, without enqueuing it. It sends rows back to the ranks of their tokens,
        as LogFMT-10 if `is_packed`.
        """

    def begin(self) -> None:
        """Enqueues the sends."""

    def finish(self, *, rows: int, weights: int, experts: int, waits: int) -> None:
        """Enqueues the sums, and the sends unless they were enqueued."""

@final
class EpCudaLowLatencyWorkspace:
    """The offsets of a dispatch's sub-buffers in one allocation, in words of four bytes."""

    def __new__(
        cls, *, tokens: int, top_k: int, num_experts: int, max_tokens: int, ranks: int
    ) -> Self:
        """The workspace of a dispatch with at most `max_tokens` tokens of each rank."""

    @property
    def combine_scratch(self) -> int:
        """Scratch of the handle's first combine."""

    @property
    def dispatch_scratch(self) -> int:
        """Scratch of the dispatch."""

    @property
    def records(self) -> int:
        """The records for the combine."""

    @property
    def src_info(self) -> int:
        """`[E/R, R * T]` i32: token numbers at their ranks."""

    @property
    def count(self) -> int:
        """`[E/R]` i32: rows of each local expert."""

    @property
    def len(self) -> int:
        """Words of the memory."""

@final
class EpCudaLayoutWorkspace:
    """The offsets of a layout's counts and scratch in one allocation, in words of four bytes."""

    def __new__(cls, *, tokens: int, top_k: int, num_experts: int, ranks: int) -> Self:
        """The workspace of `ep_cuda_layout`."""

    @property
    def per_expert(self) -> int:
        """`[E]` i32: tokens that chose each expert."""

    @property
    def per_rank(self) -> int:
        """`[R]` i32: tokens for each rank."""

    @property
    def scratch(self) -> int:
        """Scratch."""

    @property
    def len(self) -> int:
        """Words of the memory."""

@final
class EpCudaDispatchLayout:
    """The layout of tokens, for dispatches of the same tokens."""

@final
class EpCudaNormalHandle:
    """The state of a dispatch that a combine, or a dispatch to the same rows, needs."""

    @property
    def row_layout(self) -> EpRowLayout:
        """The layout of the received rows; without counts an upper bound."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of any rank."""

@final
class EpCudaDispatchPlan:
    """The shape of dispatches, and their plan."""

    def __new__(cls, group: EpCudaGroup, shape: _DispatchShape) -> Self:
        """The plan of a group's dispatches of this shape."""

    @property
    def estimate(self) -> EpRowLayout | None:
        """The estimated layout of the next received rows."""

    @estimate.setter
    def estimate(self, estimate: EpRowLayout | None) -> None: ...
    def dispatch(
        self, group: EpCudaGroup, send_args: _SendArgs, memory: _DispatchMemory, limit: float
    ) -> EpCudaDispatchResult:
        """Enqueues a dispatch, with memory that it asks for. If it waits for counts, it does so at
        most `limit` seconds.
        """

@final
class EpCudaDispatchResult:
    """The result of a dispatch."""

    @property
    def handle(self) -> EpCudaNormalHandle:
        """The handle."""

    @property
    def row_layout(self) -> EpRowLayout:
        """The layout of received rows; without counts an upper bound."""

    @property
    def per_expert(self) -> list[int] | None:
        """Tokens that chose each local expert; None unless the call waited for counts."""

    @property
    def view(self) -> EpCudaZeroCopyView | None:
        """The rows, if they are a view of the communication buffer."""

    @property
    def next_workspace(self) -> EpCudaWorkspaceLayout | None:
        """The likely layout of the next call's workspace, or None."""

@final
class EpRowLayout:
    """The layout of received rows: one for each token, or one for each token and local expert."""

    def __new__(cls, tokens: int, alignment: int | None = None, rows: int | None = None) -> Self:
        """Makes the layout of `tokens` tokens, or of an upper bound of them. Without `alignment`
        and `rows` it has rows by token.
        """

    @staticmethod
    def upper_bound(
        tokens: int, alignment: int | None, top_k: int, local_experts: int
    ) -> EpRowLayout:
        """The layout with room for `tokens` tokens, for any choices of local experts."""

    @property
    def tokens(self) -> int:
        """Received tokens, or an upper bound if the host has no counts."""

    @property
    def alignment(self) -> int | None:
        """The alignment of each expert's first row; None for rows by token."""

    @property
    def rows(self) -> int | None:
        """Rows by expert, with the gaps between experts; None for rows by token."""

    def num_rows(self) -> int:
        """Rows of the output tensor."""

@final
class EpCudaWorkspaceLayout:
    """The offsets of a workspace's sub-buffers, and its length, in words of four bytes."""

    @property
    def combine_scratch(self) -> int:
        """Scratch of the handle's first combine."""

    @property
    def dispatch_scratch(self) -> int:
        """Scratch of the dispatch."""

    @property
    def starts(self) -> int:
        """`[R + 1]`: the first token of each rank."""

    @property
    def per_expert(self) -> int:
        """`[E/R]`: tokens of each local expert."""

    @property
    def src_info(self) -> int:
        """`[m]`: token numbers at their ranks."""

    @property
    def origin(self) -> int:
        """`[m]`: ranks of tokens, and this rank's index among the token's ranks."""

    @property
    def ends(self) -> int:
        """`[E/R]`: the end of each expert's rows, for rows by expert."""

    @property
    def metadata(self) -> int:
        """`[m, K + 2]`: sources and rows of tokens, for rows by expert."""

    @property
    def choices(self) -> int:
        """Received choices."""

    @property
    def weights(self) -> int:
        """Received weights."""

    @property
    def scales(self) -> int:
        """Received scales."""

    @property
    def len(self) -> int:
        """Words of the workspace."""

    def is_same(self, other: Self) -> bool:
        """Whether sub-buffers have the same offsets and lengths."""

@final
class EpCudaZeroCopyView:
    """Received rows in the pool."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    @property
    def offset(self) -> int:
        """The offset of the first row in the pool."""

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""

    @property
    def scales_offset(self) -> int:
        """The offset of the first scale in the pool; 0 without scales."""

@final
class EpCudaNormalCombine:
    """A combine that has begun."""

    def __new__(
        cls,
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
    ) -> Self:
        """Enqueues the sends of rows back to the ranks of their tokens. `sends` is "row", or, for
        rows by expert, "sum" or "each".
        """

    def finish(self, *, rows: int, sums: str, bias: int, second_bias: int, weights: int) -> None:
        """Enqueues the sums. `sums` is "rank" or "choice". The biases are up to two first addends,
        or 0.
        """

@final
class EpSettings:
    """The settings of a buffer of expert parallelism."""

    @property
    def device(self) -> str | None:
        """The device: "cpu", "cuda" or "cuda:1"; None if the environment names none."""

    @property
    def node(self) -> int | None:
        """The number of this rank's node; None if the environment has none."""

    @property
    def reserved_sms(self) -> int:
        """Multiprocessors that launches leave to other kernels."""

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for its peers."""

    @property
    def tokens_at_once(self) -> int:
        """Tokens of each rank for which a size hint has room."""

@final
class RankGroup:
    """A rank's end of a group of ranks. `options` is `(timeout, stream)`: seconds that the messages
    may take, and the stream whose work they follow.
    """

    def __new__(
        cls,
        endpoint: Endpoint,
        rank: int,
        cards: Sequence[bytes],
        *,
        timeout: float | None = None,
        needs_registration: bool = False,
    ) -> Self:
        """Joins a group, and waits until all ranks have. `cards` are those of all ranks, from
        `rank_card`. With `needs_registration`, messages to ranks of other hosts need registered
        memory.
        """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def members(self) -> list[int]:
        """The numbers that the ranks had in the first group."""

    def is_local(self, rank: int) -> bool:
        """Whether a rank has this one's address."""

    def connection(self, rank: int) -> int:
        """The connection to another rank."""

    def register(self, tensor: _Tensor) -> int:
        """Registers a tensor's memory, unless registered memory holds it: the region's number."""

    def deregister(self, tensor: _Tensor) -> bool:
        """Ends the registration of exactly this tensor's memory; `False` if there is none."""

    def registered(self, tensor: _Tensor) -> int | None:
        """The number of the region that holds a tensor's memory, if it was registered."""

    def send(
        self, tensor: _Tensor, peer: int, options: tuple[float | None, _Stream | None] | None = None
    ) -> RankWork:
        """Sends a tensor to a rank."""

    def recv(
        self, tensor: _Tensor, peer: int, options: tuple[float | None, _Stream | None] | None = None
    ) -> RankWork:
        """Receives a tensor from a rank."""

    def all_gather(
        self,
        input: _Tensor,
        outputs: Sequence[_Tensor],
        options: tuple[float | None, _Stream | None] | None = None,
    ) -> RankWork:
        """Every rank gets the input of every rank. The own part is the caller's to copy, as in all
        collectives.
        """

    def all_to_all(
        self,
        inputs: Sequence[_Tensor],
        outputs: Sequence[_Tensor],
        options: tuple[float | None, _Stream | None] | None = None,
    ) -> RankWork:
        """Every rank gets a part of every rank's."""

    def broadcast(
        self, root: int, tensor: _Tensor, options: tuple[float | None, _Stream | None] | None = None
    ) -> RankWork:
        """Every rank gets the root's tensor."""

    def scatter(
        self,
        root: int,
        inputs: Sequence[_Tensor],
        output: _Tensor,
        options: tuple[float | None, _Stream | None] | None = None,
    ) -> RankWork:
        """Every rank gets its part of the root's; other ranks have no `inputs`."""

    def gather(
        self,
        root: int,
        input: _Tensor,
        outputs: Sequence[_Tensor],
        options: tuple[float | None, _Stream | None] | None = None,
    ) -> RankWork:
        """The root gets every rank's input; other ranks have no `outputs`."""

    def barrier(self, options: tuple[float | None, _Stream | None] | None = None) -> RankWork:
        """Ends on each rank when every rank has begun it."""

    def work(self, id: int) -> RankWork:
        """The call of a number."""

    def lost(self) -> list[int]:
        """The ranks that are lost, as far as this rank can tell now."""

    def shrink(self, *, timeout: float | None = None) -> Self:
        """The group of those ranks that are not lost. All of them call this."""

    def close(self) -> None:
        """Ends all calls and registrations, and leaves the ranks. The endpoint stays open."""

@final
class RankWork:
    """A call of a group that has begun."""

    @property
    def id(self) -> int:
        """The number of the call in its group."""

    def poll(self) -> bool:
        """Whether it has ended well. Raises if it has failed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for its end, for at most `timeout` seconds: whether it has ended. Raises if it has
        failed.
        """

    def cancel(self) -> None:
        """Ends it: when this returns, no byte of it lands any more."""

@final
class WeightsPublisher:
    """A rank that publishes its shards, version after version."""

    def __new__(cls, endpoint: Endpoint, shards: Sequence[_WeightShard], owners: object) -> Self:
        """Registers shards with an endpoint, which accepts every peer from now on. `owners` keeps
        their memory allocated.
        """

    def manifest(self) -> bytes:
        """The description of this rank, for all others."""

    def join(
        self,
        sources: Sequence[bytes],
        targets: Sequence[bytes],
        index: int,
        options: _PlanOptions | None = None,
    ) -> None:
        """Tells it the manifests of all ranks. It is source `index` of them."""

    def begin(self) -> None:
        """Says that bytes are about to change."""

    def publish(self, version: int) -> None:
        """Says that all bytes are of a version, which is higher than those before."""

    @property
    def mark(self) -> tuple[int, bool]:
        """The last version, and whether all bytes are of it."""

    def wait_taken(self, version: int, timeout: float | None = None) -> None:
        """Waits until every target that reads from this rank has a version."""

    def close(self) -> None:
        """Ends the regions. If a peer may still read, this fails, and the same call waits again."""

@final
class WeightsReader:
    """A rank that reads shards into its memory."""

    def __new__(cls, endpoint: Endpoint, shards: Sequence[_WeightShard], owners: object) -> Self:
        """Registers the memory of shards with an endpoint, which accepts every peer from now on.
        `owners` keeps it allocated.
        """

    def manifest(self) -> bytes:
        """The description of this rank, for all others."""

    def join(
        self,
        sources: Sequence[bytes],
        targets: Sequence[bytes],
        index: int,
        options: _PlanOptions | None = None,
    ) -> None:
        """Plans with the manifests of all ranks. It is target `index` of them."""

    def fetch(self, version: int = 0, timeout: float | None = None) -> tuple[int, int, int]:
        """Reads the newest version that all its sources have, which is `version` or a later one,
        and waits for it: `(version, bytes, retries)`.
        """

    def begin(self) -> None:
        """Says that the memory is about to change by other means than a fetch."""

    def abort(self) -> None:
        """Ends the fetch of another thread. When this returns, no byte of it lands any more."""

    @property
    def mark(self) -> tuple[int, bool]:
        """The version of the last fetch, and whether all bytes are of it."""

    def wait_taken(self, version: int, timeout: float | None = None) -> None:
        """Waits until every target that reads from this one has a version."""

    def close(self) -> None:
        """Aborts a fetch and ends the regions. If a peer may still read, this fails, and the same
        call waits again.
        """

def rank_card(endpoint: Endpoint) -> bytes:
    """The bytes with which other ranks find an endpoint."""

def weights_area(
    shape: Sequence[int], axes: Sequence[tuple[int, int, int | None]]
) -> tuple[list[int], list[int]]:
    """The elements of one rank of a mesh, cut as PyTorch's `chunk` does: `(offsets, sizes)`. Each
    axis is `(ranks, rank, dimension)`; None is a dimension of replicas.
    """

def weights_plan(
    sources: Sequence[bytes], targets: Sequence[bytes], options: _PlanOptions | None = None
) -> list[list[list[tuple[bool, int, list[tuple[int, int, int, int, int]]]]]]:
    """The reads of each target, by step: `(is_source, rank, pieces)`. A piece is the target's
    buffer and offset there, the source's buffer and offset there, and a length, all in bytes.
    """

def ep_settings() -> EpSettings:
    """The settings that the environment has now. A ValueError says the variable that is not
    understood, its value, and the allowed values.
    """

def ep_dispatch_len(
    *, payload: int, scales: int, top_k: int, local_experts: int, slots: int, nodes: EpNodes
) -> int:
    """Bytes of a dispatch's place with `slots` slots for tokens of each rank. With several nodes
    tokens are relayed.
    """

def ep_row_place_len(*, values: int, weights: int, slots: int, tokens: int) -> int:
    """Bytes of a combine's place."""

def ep_row_slots(top_k: int, nodes: EpNodes) -> int:
    """The number of rows of a token in a combine's place if each rank sends one."""

def ep_node(node: int | None) -> bytes:
    """Bytes that identify the node of this process: the one of this number, or of the processes
    that can see it.
    """

def ep_nodes(of_ranks: Sequence[bytes]) -> EpNodes:
    """The nodes, from the `ep_node` of all ranks. It is one node, unless all have the same number
    of consecutive ranks.
    """

def ep_cuda_combine_scratch_len() -> int:
    """Bytes of memory that a combine needs on the GPU until it has ended."""

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
    token_in_rank: int,
    scratch: int,
    stream: int,
) -> EpCudaDispatchLayout:
    """Enqueues the counts of tokens: i32 by rank, i32 by expert, and a byte by token and rank.
    Dispatches with the returned layout use the scratch memory.
    """

def ep_cuda_origin_rank() -> int:
    """The origin of a received token is its rank times this, plus this rank's index among the
    token's ranks.
    """

def last_error() -> str | None:
    """The reason of the last failed call on this thread; None if none has failed."""

def get_oob_ip(local_gpu_idx: int | None = None) -> str:
    """The address of this host that an endpoint for this GPU advertises to its peers."""

def _nixl_plugin_dir(
    ours: str | PathLike[str], theirs: str | PathLike[str], instead_of_ucx: bool
) -> Path:
    """The folder for `NIXL_PLUGIN_DIR`, which links this project's plugin, under UCX's name too if
    so asked, and those in NIXL's own folder.
    """
