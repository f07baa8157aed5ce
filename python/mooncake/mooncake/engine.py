"""Mooncake's transfer engine over :mod:`uccl.p2p`.

A peer is a session, ``"host:port"``, and memory an address. Both ends run this module: it does not
speak Mooncake's protocol. Calls answer with Mooncake's numbers, and the logger ``mooncake.engine``
says why one failed.
"""

from __future__ import annotations

import bisect
import ctypes
import enum
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from uccl import p2p

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]

logger = logging.getLogger(__name__)

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MULTI_PROTOCOL = False
SUPPORT_MUSA = False

FAILED = -1
INVALID_ARGUMENT = -1
ADDRESS_NOT_REGISTERED = -3
BUSY = -4
ADDRESS_OVERLAPPED = -7
INVALID_BATCH = 2**64 - 1
"""The number of an asynchronous transfer to a peer that cannot be reached."""

PROTOCOLS = ("", "efa", "nvlink_intra", "rdma", "shm", "tcp")
"""The protocols that are taken. None of them chooses the link: see
:meth:`TransferEngine.initialize`."""

CONNECT_SECONDS = 5.0
"""How long a peer may take to answer a connect."""


class TransferOpcode(enum.IntEnum):
    """The direction of a transfer."""

    Read = 0
    Write = 1


_Opcode = TransferOpcode
Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferNotify:
    """A message that would follow a transfer. :class:`TransferEngine` takes none."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg


def _patience() -> float:
    """Seconds that a transfer may take, beyond a nanosecond for each of its bytes."""
    try:
        return max(5.0, float(int(os.environ.get("MC_TRANSFER_TIMEOUT", "30"))))
    except ValueError:
        return 30.0


def _current_gpu() -> int | None:
    """The GPU that PyTorch uses on this thread, if it uses any."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return int(cuda.current_device())


class TransferEngine:
    """One process's memory and its connections to others. All threads may use it at once; a call
    that waits lets go of the interpreter's lock."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._endpoint: p2p.Endpoint | None = None
        # Held while memory is registered, which may take seconds.
        self._memory = threading.Lock()
        # The start addresses of all registered memory in their order, and the end and the region's
        # number of each.
        self._starts: list[int] = []
        self._regions: dict[int, tuple[int, int]] = {}
        self._managed: dict[int, p2p.SharedBuffer] = {}
        self._lock = threading.Lock()
        self._batches: dict[int, p2p.AddressTransfer] = {}
        self._last_batch = 0
        self._seconds = _patience()

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /
    ) -> int:
        """Starts to listen on any free port: 0, or -1.

        The metadata server must be ``"P2PHANDSHAKE"``: peers are named by their addresses. The
        protocol does not choose the link: processes of one host use its memory or its GPUs, others
        RDMA where both have devices, else TCP. ``UCCL_P2P_TRANSPORT`` and ``MC_FORCE_TCP=1`` do.
        ``device_name`` has RDMA devices with commas between them, or is empty.
        """
        if self._endpoint is not None:
            return self._refuse("initialize", "this engine has been initialized already")
        if metadata_server != "P2PHANDSHAKE":
            return self._refuse(
                "initialize",
                f"metadata server {metadata_server!r}: only P2PHANDSHAKE is there, which names peers"
                " by host and port",
            )
        if protocol not in PROTOCOLS:
            return self._refuse(
                "initialize", f"protocol {protocol!r}: it is one of {', '.join(PROTOCOLS[1:])}"
            )
        settings: dict[str, Any] = {"port": 0, "publish": True}
        if (gpu := _current_gpu()) is not None:
            settings["local_gpu_idx"] = gpu
        if os.environ.get("MC_FORCE_TCP") == "1":
            settings["transport"] = "tcp"
        if device_name:
            settings["rdma_dev"] = device_name
        if os.environ.get("MC_LEGACY_RPC_PORT_BINDING"):
            _, _, port = local_hostname.rpartition(":")
            settings["port"] = int(port) if port.isdigit() else 0
        try:
            endpoint = p2p.Endpoint(**settings)
        except (OSError, RuntimeError, ValueError) as e:
            return self._refuse("initialize", str(e))
        endpoint.start_passive_accept()
        self._endpoint = endpoint
        return 0

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
        /,
    ) -> int:
        """:meth:`initialize`; there is no metadata server, so its type has no effect."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port of this engine's session."""
        endpoint = self._open()
        return p2p.Endpoint.parse_metadata(endpoint.get_metadata())[1]

    # Memory.

    def register_memory(
        self, buffer_addr: int, capacity: int, location: str = "*", remote_accessible: bool = True
    ) -> int:
        """Registers memory, and lets peers read and write it: 0, -7 if it overlaps registered
        memory, or -1. It must stay allocated until :meth:`unregister_memory` has returned 0."""
        return self._register([buffer_addr], [capacity], remote_accessible)

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Ends the region at this address. Returns 0 when no access of a peer lands in it any more,
        -3 if there is none, or -4: it is in use, keep the memory and call again."""
        return self.batch_unregister_memory([buffer_addr])

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Registers many pieces of memory, all or none."""
        return self._register(buffer_addresses, capacities, True)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int], /) -> int:
        """Ends the regions at these addresses, as many as possible; the first error counts."""
        endpoint = self._open()
        failed = 0
        for start in map(int, buffer_addresses):
            with self._memory:
                region = self._regions.get(start)
            if region is None:
                self._refuse("unregister_memory", f"nothing is registered at {start:#x}")
                failed = failed or ADDRESS_NOT_REGISTERED
            elif endpoint.dereg(region[1]):
                self._forget(start)
            else:
                # It stays listed: the same call waits once more.
                self._refuse("unregister_memory", p2p.last_error())
                failed = failed or BUSY
        return failed

    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of new registered memory, or 0."""
        endpoint = self._open()
        try:
            buffer = endpoint.alloc(length)
        except (OSError, RuntimeError) as e:
            self._refuse("allocate_managed_buffer", str(e))
            return 0
        if self._register([buffer.ptr], [length], True) != 0:
            return 0
        with self._memory:
            self._managed[buffer.ptr] = buffer
        return buffer.ptr

    def free_managed_buffer(self, user_tensor: int, length: int, /) -> int:
        """Ends and frees memory of :meth:`allocate_managed_buffer`."""
        if (failed := self.unregister_memory(user_tensor)) != 0:
            return failed
        with self._memory:
            self._managed.pop(user_tensor, None)
        return 0

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int, /) -> int:
        """Copies bytes of this process to an address of its own."""
        source = src_ptr.encode() if isinstance(src_ptr, str) else src_ptr
        if length > len(source):
            return self._refuse("write_bytes_to_buffer", f"{length} of {len(source)} bytes")
        ctypes.memmove(dest_address, source, length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """The bytes at an address of this process."""
        return ctypes.string_at(source_address, length)

    # Transfers.

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Writes to a peer's memory: 0 when the bytes are there, or -1."""
        return self._move("write", target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Reads a peer's memory: 0 when the bytes are here, or -1."""
        return self._move("read", target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """One of the two above."""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Writes many pieces to a peer's memory: 0 when all bytes are there, or -1."""
        return self._move("write", target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Reads many pieces of a peer's memory: 0 when all bytes are here, or -1."""
        return self._move("read", target_hostname, buffers, peer_buffer_addresses, lengths)

    # Lists and arrays of 64-bit integers are taken alike.
    batch_transfer_sync_write_arrays = batch_transfer_sync_write
    batch_transfer_sync_read_arrays = batch_transfer_sync_read

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """One of the two above."""
        if notify is not None:
            raise NotImplementedError("a notification with a transfer: this engine sends none")
        op = "write" if opcode == TransferOpcode.Write else "read"
        return self._move(op, target_hostname, buffers, peer_buffer_addresses, lengths)

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts a write: a number for :meth:`transfer_check_status`, or 2**64 - 1."""
        batch = self._begin("write", target_hostname, [buffer], [peer_buffer_address], [length])
        return batch or INVALID_BATCH

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts to write many pieces: a number for :meth:`transfer_check_status`, 0 if it was
        refused, or 2**64 - 1 if the peer cannot be reached. Its state has to be asked for until
        it has ended: that moves it on."""
        return self._begin("write", target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts to read many pieces, as :meth:`batch_transfer_async_write`."""
        return self._begin("read", target_hostname, buffers, peer_buffer_addresses, lengths)

    batch_transfer_async_write_arrays = batch_transfer_async_write
    batch_transfer_async_read_arrays = batch_transfer_async_read

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """One of the two above."""
        op = "write" if opcode == TransferOpcode.Write else "read"
        return self._begin(op, target_hostname, buffers, peer_buffer_addresses, lengths)

    def transfer_check_status(self, batch_id: int, /) -> int:
        """The state of a transfer that was started: 0 under way, 1 done, -1 failed, -2 out of time.
        The number ends with the transfer."""
        with self._lock:
            transfer = self._batches.get(batch_id)
        if transfer is None:
            return self._refuse("transfer_check_status", f"there is no transfer {batch_id}")
        return self._ended(batch_id, transfer, transfer.poll())

    def get_batch_transfer_status(self, batch_ids: Sequence[int], /) -> int:
        """Waits for all of these transfers: 0 if all have succeeded, else -1."""
        failed = 0
        for batch_id in batch_ids:
            with self._lock:
                transfer = self._batches.get(batch_id)
            if transfer is None:
                failed = self._refuse("get_batch_transfer_status", f"there is no {batch_id}")
            elif self._ended(batch_id, transfer, transfer.wait()) != 1:
                failed = FAILED
        return failed

    # Peers.

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer can be reached now, else -1."""
        endpoint = self._open()
        ok, _ = endpoint.reach(peer_server_name, timeout=CONNECT_SECONDS)
        return 0 if ok else self._refuse(f"send_probe to {peer_server_name}", p2p.last_error())

    def get_engine(self) -> Any:
        """Mooncake's store would share this engine; there is no store."""
        raise NotImplementedError(
            "mooncake.store is not part of uccl-rs-mooncake, and nothing else takes this object"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"TransferEngine.{name}: uccl-rs-mooncake does not have it")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _open(self) -> p2p.Endpoint:
        if self._endpoint is None:
            raise RuntimeError("TransferEngine: initialize() comes first")
        return self._endpoint

    def _refuse(self, call: str, why: str | None) -> int:
        logger.warning("%s: %s", call, why)
        return FAILED

    def _register(
        self, addresses: Sequence[int], capacities: Sequence[int], published: bool
    ) -> int:
        endpoint = self._open()
        if len(addresses) != len(capacities):
            return self._refuse(
                "register_memory", f"{len(addresses)} addresses and {len(capacities)} lengths"
            )
        made: list[int] = []
        for start, size in zip(map(int, addresses), map(int, capacities)):
            if (failed := self._add(endpoint, start, size, published)) != 0:
                # The regions are new: peers may have found them, but no caller relies on them.
                if made:
                    self.batch_unregister_memory(made)
                return failed
            made.append(start)
        return 0

    def _add(self, endpoint: p2p.Endpoint, start: int, size: int, published: bool) -> int:
        if start <= 0 or size <= 0:
            self._refuse("register_memory", f"{size} bytes at {start:#x}")
            return INVALID_ARGUMENT
        with self._memory:
            if (other := self._overlapping(start, size)) is not None:
                end, _ = self._regions[other]
                self._refuse(
                    "register_memory",
                    f"{size} bytes at {start:#x} overlap those from {other:#x} to {end:#x}",
                )
                return ADDRESS_OVERLAPPED
            ok, region = endpoint.reg(start, size)
            if not ok:
                return self._refuse("register_memory", p2p.last_error())
            if published and not endpoint.publish(region):
                failed = self._refuse("register_memory", p2p.last_error())
                endpoint.dereg(region)
                return failed
            bisect.insort(self._starts, start)
            self._regions[start] = (start + size, region)
        return 0

    def _overlapping(self, start: int, size: int) -> int | None:
        """The start of registered memory that shares bytes with this. They do not overlap each
        other, so only the neighbours count."""
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] < start + size:
            return self._starts[at]
        if at > 0 and self._regions[self._starts[at - 1]][0] > start:
            return self._starts[at - 1]
        return None

    def _forget(self, start: int) -> None:
        with self._memory:
            if self._regions.pop(start, None) is not None:
                del self._starts[bisect.bisect_left(self._starts, start)]

    def _deadline(self, lengths: Any) -> float:
        return self._seconds + float(sum(lengths)) * 1e-9

    def _reach(self, call: str, session: str) -> int | None:
        endpoint = self._open()
        ok, conn = endpoint.reach(session, timeout=CONNECT_SECONDS)
        if not ok:
            self._refuse(f"{call} {session}", p2p.last_error())
            return None
        return conn

    def _move(self, op: str, session: str, buffers: Any, peers: Any, lengths: Any) -> int:
        endpoint = self._open()
        if not len(buffers) == len(peers) == len(lengths):
            return self._refuse(op, f"{len(buffers)}, {len(peers)}, {len(lengths)} items")
        if (conn := self._reach(op, session)) is None:
            return FAILED
        move = endpoint.write_by_address if op == "write" else endpoint.read_by_address
        if move(conn, buffers, peers, lengths, timeout=self._deadline(lengths)):
            return 0
        return self._refuse(f"{op} {session}", p2p.last_error())

    def _begin(self, op: str, session: str, buffers: Any, peers: Any, lengths: Any) -> int:
        endpoint = self._open()
        if not len(buffers) == len(peers) == len(lengths):
            self._refuse(op, f"{len(buffers)}, {len(peers)}, {len(lengths)} items")
            return 0
        if (conn := self._reach(op, session)) is None:
            return INVALID_BATCH
        begin = endpoint.write_by_address_async if op == "write" else endpoint.read_by_address_async
        ok, transfer = begin(conn, buffers, peers, lengths, timeout=self._deadline(lengths))
        if not ok or transfer is None:
            self._refuse(f"{op} {session}", p2p.last_error())
            return 0
        with self._lock:
            self._last_batch += 1
            self._batches[self._last_batch] = transfer
            return self._last_batch

    def _ended(self, batch_id: int, transfer: p2p.AddressTransfer, state: tuple[bool, bool]) -> int:
        ok, is_done = state
        if not is_done:
            return 0
        with self._lock:
            self._batches.pop(batch_id, None)
        if ok:
            return 1
        self._refuse(f"transfer {batch_id}", p2p.last_error())
        return -2 if transfer.timed_out else FAILED


_ABSENT = frozenset(
    {
        "batch_transfer_read_on_cuda",
        "batch_transfer_sync_read_pages",
        "batch_transfer_sync_write_pages",
        "batch_transfer_write_on_cuda",
        "get_engine_ptr",
        "get_first_buffer_address",
        "get_local_topology",
        "get_notifies",
        "scatter_transfer_sync_read_with_ticket",
        "scatter_transfer_sync_write_with_ticket",
        "submit_scatter_read",
        "submit_scatter_write",
        "transfer_read_on_cuda",
        "transfer_write_on_cuda",
        "warmup_efa_segment",
    }
)
"""Calls of Mooncake's engine that are not here: programs ask with ``hasattr``."""
