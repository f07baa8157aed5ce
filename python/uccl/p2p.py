"""The point-to-point engine, under the names of UCCL's API.

Calls that UCCL has answer as UCCL's do: ``False``, or a tuple that starts with it, is a failure, and
:func:`last_error` tells why. They take the argument names of all its releases. Wherever they take a
pointer, they take an integer address, or an object that has one: anything with the buffer protocol, a
tensor with ``data_ptr()``, an array with ``__array_interface__``; a size may then be left out.

Calls on vectors take lists, or arrays, which cost less: where region ids, addresses or sizes are taken,
anything with the buffer protocol that holds 64-bit integers in one dimension (``numpy.uint64``,
``array.array("Q")``), and for ``n`` adverts one bytes-like object of ``n * 64`` bytes, which ``advertisev``
fills if it is given one as ``out_buf_list``.

>>> from uccl import p2p
>>> with p2p.Endpoint(local_gpu_idx=0) as endpoint:
...     ip, port, gpu = p2p.Endpoint.parse_metadata(endpoint.get_metadata())
"""

from __future__ import annotations

import ctypes
import enum
from typing import TYPE_CHECKING, Any

from uccl import _core
from uccl._core import (
    AddressTransfer,
    PreparedTransfer,
    SharedMemory,
    XferDesc,
    XferHandle,
    get_oob_ip,
    last_error,
)

__all__ = [
    "AddressTransfer",
    "Endpoint",
    "FloatType",
    "PreparedTransfer",
    "SharedBuffer",
    "XferDesc",
    "XferHandle",
    "get_oob_ip",
    "kBFloat16",
    "kFloat16",
    "kFloat32",
    "kFloat8E4M3FN",
    "kFloat8E5M2",
    "kUndefined",
    "last_error",
]


class FloatType(enum.IntEnum):
    """The type of registered memory's elements, with UCCL's numbers. ``reg`` accepts it and makes
    no use of it."""

    kUndefined = 0
    kFloat16 = 1
    kBFloat16 = 2
    kFloat32 = 3
    kFloat8E4M3FN = 4
    kFloat8E5M2 = 5


kUndefined = FloatType.kUndefined
kFloat16 = FloatType.kFloat16
kBFloat16 = FloatType.kBFloat16
kFloat32 = FloatType.kFloat32
kFloat8E4M3FN = FloatType.kFloat8E4M3FN
kFloat8E5M2 = FloatType.kFloat8E5M2


class SharedBuffer:
    """Writable memory that peers on this host can map, from :meth:`Endpoint.alloc`.

    It has the buffer protocol: ``np.frombuffer(buffer, dtype)`` and ``memoryview(buffer)`` are views of
    it and keep it allocated, as does registering it.
    """

    # The limited API of the Pythons supported has no way for an extension type to export a buffer, so
    # each one is an array of ctypes over the same memory; the array keeps the memory's owner.
    _memory: SharedMemory

    def __new__(cls, *args: object, **kwargs: object) -> SharedBuffer:
        raise TypeError("a SharedBuffer comes from Endpoint.alloc()")

    @property
    def ptr(self) -> int:
        """The address of its first byte."""
        return self._memory.ptr

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._memory.size

    def data_ptr(self) -> int:
        """The address of its first byte, under PyTorch's name."""
        return self._memory.ptr

    if TYPE_CHECKING:

        def __len__(self) -> int: ...
        def __buffer__(self, flags: int, /) -> memoryview: ...

    def __repr__(self) -> str:
        return f"<SharedBuffer ptr={self.ptr:#x} size={self.size}>"


def _exporting(memory: SharedMemory) -> SharedBuffer:
    bases = (SharedBuffer, ctypes.c_ubyte * memory.size)
    array: Any = type("SharedBuffer", bases, {"__module__": __name__})
    buffer: SharedBuffer = array.from_address(memory.ptr)
    buffer._memory = memory
    return buffer


class Endpoint(_core.Endpoint):
    """One process's engine for one GPU (or none).

    ``local_gpu_idx`` is the GPU that it serves (0 where there is none), ``num_cpus`` the most threads it
    works with. The other arguments change the environment's settings: ``psk`` (a secret that both ends
    prove), ``bind`` and ``port`` (where to listen), ``base_port`` (where well-known ports start),
    ``timeout`` (seconds until a silent peer is lost), ``transfer_timeout`` (seconds a transfer may take),
    ``transport`` (``"auto"``, ``"local"``, ``"tcp"``, ``"verbs"``, ``"libfabric"``, ``"cxi"``, ``"efa"``, ``"udp"``, ``"fifo"``),
    ``tcp_streams``, ``tcp_congestion``, ``checksum`` (``"auto"``, ``True``, ``False``), ``cma``, ``ipc``,
    ``spin_us``, ``publish`` (whether peers may look up published regions; :meth:`publish`), ``rdma_dev`` (RDMA devices to use, with
    commas between them),
    ``numa_affinity`` (whether worker threads keep to the CPUs near the GPU; :meth:`worker_cpus`
    says which these are).

    Transfers take ``stream=``, a ``torch.cuda.Stream``, a CuPy stream or a handle: the transfer begins after
    the work that is on that stream when it is posted, and the caller does not wait. Without it, the
    caller must have synchronised with the work that fills or uses the memory. :meth:`stream_wait` has a
    stream wait for a transfer in the same way.

    Writes take ``signal=(meta, value, "set" or "add")``: when all their bytes are visible at the peer, also to its GPU, the
    word of eight bytes at the start of ``meta`` there becomes ``value``, or ``value`` is added to it, once. It stays as it
    is when the write fails. ``strong=True`` waits for all earlier writes of the same ``context`` (a number) as well.
    :meth:`wait_signal` waits for a word to reach a value, :meth:`stream_wait_signal` has a stream wait.

    Memory is named by its address alone where the peer has published it (:meth:`publish`):
    :meth:`write_by_address` and :meth:`read_by_address` look its region up once and keep the key.

    A transfer of the same memory again and again is checked once (:meth:`prepare`) and posted often
    (:meth:`PreparedTransfer.post`).

    A ``timeout`` of zero seconds (or infinity) waits for ever.
    """

    def alloc(self, size: int) -> SharedBuffer:
        """Allocates zeroed memory that peers on this host can map, so that a transfer is one copy."""
        return _exporting(self._alloc(size))
