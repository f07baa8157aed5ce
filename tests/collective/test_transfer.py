"""``uccl.transfer``: whole tensors, one-sided."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")

from uccl import p2p
from uccl.transfer import TransferError, TransferManager

HERE = "127.0.0.1"


def test_tensors_are_written_where_their_addresses_say() -> None:
    with (
        TransferManager(0, 1, 0, bind=HERE) as receiver,
        TransferManager(1, 1, 0, bind=HERE) as sender,
        ThreadPoolExecutor(1) as thread,
    ):
        accepted = thread.submit(receiver.accept)
        to_receiver = sender.connect(HERE, receiver.listen_port)
        to_sender = accepted.result(30)
        state = receiver.conn_table[to_sender]
        assert (state.local_gpu_idx, state.remote_gpu_idx, state.is_local) == (0, 1, True)
        rooms = [torch.zeros(count) for count in (3, 100_000)]
        posted = [receiver.register_transfer(to_sender, room) for room in rooms]
        for transfer_id in posted:
            assert receiver.post_transfer_metadata(transfer_id)
        for room in rooms:
            tensor = torch.arange(room.numel(), dtype=torch.float32)
            transfer_id = sender.register_transfer(to_receiver, tensor)
            metadata = sender.fetch_transfer_metadata(transfer_id)
            assert len(metadata) == 64
            for _ in range(3):
                poll_id = sender.do_transfer_async(transfer_id, metadata)
                while not sender.check_transfer_done(transfer_id, poll_id):
                    pass
            assert torch.equal(room, tensor)
            assert sender.deregister_transfer(transfer_id)
        assert receiver.deregister_transfer(posted[0])
        with pytest.raises(KeyError):
            receiver.post_transfer_metadata(posted[0])
        assert not sender.transfer_table


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(TransferError) as caught:
        call(*args)
    assert isinstance(caught.value, AssertionError), "as UCCL's"
    return str(caught.value)


def test_failures_are_errors_with_a_reason() -> None:
    with TransferManager(0, 1, 0, bind=HERE, timeout=2) as manager:
        assert "nobody has connected" in refused(manager.accept)
        assert "no connection to" in refused(manager.connect, HERE, 1)
        with p2p.Endpoint(0, port=0, bind=HERE) as other:
            ok, conn = other.connect(HERE, 0, manager.listen_port)
            assert ok
            conn_id = manager.accept()
            refused(manager.register_transfer, conn_id, torch.zeros(4, 4).t())
            transfer_id = manager.register_transfer(conn_id, torch.zeros(4))
            assert "no address" in refused(manager.fetch_transfer_metadata, transfer_id)
            # Nothing that a peer sends is unpickled.
            for message in (b"cos\nsystem\n(S'true'\ntR.", b"UTM1" + bytes(63), b""):
                assert other.send_notif(conn, message)
                text = refused(manager.fetch_transfer_metadata, transfer_id)
                assert "no address" in text
            assert other.send_notif(conn, b"UTM1" + bytes(64))
            nowhere = manager.fetch_transfer_metadata(transfer_id)
            refused(manager.do_transfer_async, transfer_id, nowhere)
