# Made by `cargo xtask stubs` from crates/uccl-py.
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, Union, overload

from typing_extensions import Buffer, Self, TypeAlias, disjoint_base, final

__all__ = []

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
