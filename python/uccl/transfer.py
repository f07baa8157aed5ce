"""Whole tensors from one process to another, one-sided, under the names of UCCL's ``uccl.transfer``.

A receiver registers a tensor and posts its address, a sender fetches that and writes:

>>> manager = TransferManager(local_gpu_idx=0, num_cpus=4, listen_port=29999)
>>> conn_id = manager.connect(remote_ip, 29999)         # the receiver: manager.accept()
>>> transfer_id = manager.register_transfer(conn_id, tensor)
>>> metadata = manager.fetch_transfer_metadata(transfer_id)     # the receiver: post_transfer_metadata
>>> poll_id = manager.do_transfer_async(transfer_id, metadata)
>>> while not manager.check_transfer_done(transfer_id, poll_id): ...

The manager's endpoint itself listens at ``listen_port``, and addresses travel as messages of the endpoint: they are
covered by its secret, and nothing of a peer is unpickled.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

from uccl import _core, p2p

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["TransferError", "TransferManager"]

#: A message that has the address of a tensor begins so.
_ADDRESS = b"UTM1"
_ADVERT_LEN = 64
#: Seconds that a connect waits for a manager that does not listen yet, and between two tries.
_PATIENCE, _PAUSE = 60, 0.1


class TransferError(RuntimeError, AssertionError):
    """A call failed. It is an AssertionError too, which UCCL raises."""


class TransferManager:
    """An endpoint, its connections, and the tensors that are registered for transfers.

    ``timeout`` is the number of seconds that ``connect``, ``accept`` and ``fetch_transfer_metadata`` wait; None is a
    minute for ``connect`` and the endpoint's ``transfer_timeout`` for the others, 0 has no end. ``settings`` are further keywords of
    :class:`uccl.p2p.Endpoint`.
    """

    @dataclass
    class ConnState:
        """A connection."""

        local_gpu_idx: int
        remote_gpu_idx: int
        #: UCCL has a socket of its own for each connection. There is none here.
        socket: None
        conn_id: int
        is_local: bool

    @dataclass
    class TransferState:
        """A tensor that is registered."""

        data: int
        size: int
        mr_id: int
        conn_state: TransferManager.ConnState
        tensor: Any

    def __init__(
        self,
        local_gpu_idx: int,
        num_cpus: int,
        listen_port: int,
        *,
        timeout: Optional[float] = None,
        **settings: Any,
    ) -> None:
        self.local_gpu_idx = local_gpu_idx
        self.num_cpus = num_cpus
        self.timeout = timeout
        self.ep = p2p.Endpoint(local_gpu_idx, num_cpus, port=listen_port, **settings)
        self.local_ep_ip, port, _ = p2p.Endpoint.parse_metadata(self.ep.get_metadata())
        self.listen_port = self.local_ep_port = port
        self.conn_table: dict[int, TransferManager.ConnState] = {}
        self.transfer_table: dict[int, TransferManager.TransferState] = {}
        self.next_transfer_id = 0
        self._addresses: dict[int, collections.deque[bytes]] = collections.defaultdict(
            collections.deque
        )

    def connect(self, remote_ip: str, remote_listen_port: int) -> int:
        """Connects to another manager, for which it waits until it listens. Returns the connection's number."""
        until = time.monotonic() + (_PATIENCE if self.timeout is None else self.timeout)
        ok, conn_id = self.ep.connect(remote_ip, 0, remote_listen_port)
        while not ok and (self.timeout == 0 or time.monotonic() < until):
            time.sleep(_PAUSE)
            ok, conn_id = self.ep.connect(remote_ip, 0, remote_listen_port)
        return self._connected(ok, conn_id, f"no connection to {remote_ip}:{remote_listen_port}")

    def accept(self) -> int:
        """Waits for another manager's connect. Returns the connection's number."""
        ok, _, _, conn_id = self.ep.accept(timeout=self.timeout)
        return self._connected(ok, conn_id, "nobody has connected")

    def _connected(self, ok: bool, conn_id: int, failure: str) -> int:
        _expect(ok, failure)
        info = self.ep.connection(conn_id)
        _expect(info is not None, failure)
        assert info is not None
        state = self.ConnState(
            self.local_gpu_idx, info["gpu_index"], None, conn_id, info["same_host"]
        )
        self.conn_table[conn_id] = state
        return conn_id

    def register_transfer(self, conn_id: int, tensor: torch.Tensor) -> int:
        """Registers a contiguous tensor. Returns the number of the transfer."""
        conn_state = self.conn_table[conn_id]
        _expect(tensor.is_contiguous(), "the tensor is not contiguous")
        data, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        ok, mr_id = self.ep.reg(data, size)
        _expect(ok, "the tensor cannot be registered")
        transfer_id, self.next_transfer_id = self.next_transfer_id, self.next_transfer_id + 1
        self.transfer_table[transfer_id] = self.TransferState(data, size, mr_id, conn_state, tensor)
        return transfer_id

    def deregister_transfer(self, transfer_id: int) -> bool:
        """Ends a registration. When this returns, no byte of a peer lands in the tensor any more."""
        state = self.transfer_table[transfer_id]
        _expect(self.ep.dereg(state.mr_id), "the tensor is in use")
        del self.transfer_table[transfer_id]
        return True

    def post_transfer_metadata(self, transfer_id: int) -> bool:
        """Sends the address of a tensor to the other manager, which may then write it."""
        state = self.transfer_table[transfer_id]
        conn_id = state.conn_state.conn_id
        ok, advert = self.ep.advertise(conn_id, state.mr_id, state.data, state.size)
        _expect(ok, "the tensor cannot be advertised")
        _expect(self.ep.send_notif(conn_id, _ADDRESS + advert), "the other manager is not there")
        return True

    def fetch_transfer_metadata(self, transfer_id: int) -> bytes:
        """Waits for the address of the other manager's next tensor."""
        conn_id = self.transfer_table[transfer_id].conn_state.conn_id
        waiting = self._addresses[conn_id]
        while not waiting:
            arrived = self.ep.wait_notifs(self.timeout, conn_id=conn_id)
            _expect(bool(arrived), "no address has come")
            for sender, message in arrived:
                is_address = len(message) == len(_ADDRESS) + _ADVERT_LEN and message.startswith(
                    _ADDRESS
                )
                _expect(is_address, f"connection {sender} has sent a message that is no address")
                self._addresses[sender].append(message[len(_ADDRESS) :])
        return waiting.popleft()

    def do_transfer_async(self, transfer_id: int, transfer_metadata: bytes) -> int:
        """Begins to write the whole tensor to the other manager's. Returns the number to ask for."""
        state = self.transfer_table[transfer_id]
        conn_id = state.conn_state.conn_id
        ok, poll_id = self.ep.write_async(
            conn_id, state.mr_id, state.data, state.size, transfer_metadata
        )
        _expect(ok, "the tensor cannot be written")
        return poll_id

    def check_transfer_done(self, transfer_id: int, poll_id: int) -> bool:
        """Whether the write has ended. All its bytes are there then."""
        ok, is_done = self.ep.poll_async(poll_id)
        _expect(ok, f"transfer {transfer_id} has failed")
        return is_done

    def close(self) -> None:
        """Ends all connections and registrations."""
        self.ep.close()
        self.conn_table.clear()
        self.transfer_table.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


def _expect(ok: bool, failure: str) -> None:
    if not ok:
        raise TransferError(f"{failure}: {_core.last_error()}")
