"""``mooncake.engine.TransferEngine`` between two processes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from engines import HOST, Engine
from peer import can_make_namespaces

KIB = 1024
Pair = tuple[Engine, Engine]


def test_memory_is_written_and_read_by_address(pair: Pair) -> None:
    a, b = pair
    session = b.call("session")
    for size in (1, 4 * KIB, 4096 * KIB):
        here, there = a.call("registered", "m", size, 7), b.call("registered", "m", size)
        assert a.call("do", "transfer_sync_write", session, here, there, size) == 0
        assert b.call("bytes_of", "m") == b"\x07" * size
        b.call("fill", "m", 9)
        assert a.call("do", "transfer_sync_read", session, here, there, size) == 0
        assert a.call("bytes_of", "m") == b"\x09" * size
        for end, address in ((a, here), (b, there)):
            assert end.call("do", "unregister_memory", address) == 0


def test_an_engine_reaches_itself(pair: Pair) -> None:
    a, _ = pair
    session = a.call("session")
    one, two = a.call("registered", "one", 64, 7), a.call("registered", "two", 64)
    assert a.call("do", "transfer_sync_write", session, one, two, 64) == 0
    assert a.call("bytes_of", "two") == b"\x07" * 64


def test_batches_of_many_pieces(pair: Pair) -> None:
    a, b = pair
    pieces, size = 4096, 64
    session = b.call("session")
    here, there = a.call("registered", "m", pieces * size), b.call("registered", "m", pieces * size)
    pattern = b"".join(i.to_bytes(2, "little") * (size // 2) for i in range(pieces))
    a.call("put", "m", 0, pattern)
    order = list(reversed(range(pieces)))
    sources = [here + at * size for at in order]
    targets = [there + at * size for at in range(pieces)]
    lengths = [size] * pieces
    assert a.call("do", "batch_transfer_sync_write", session, sources, targets, lengths) == 0
    turned = b"".join(pattern[at * size : (at + 1) * size] for at in order)
    assert b.call("bytes_of", "m") == turned
    assert a.call("do", "batch_transfer_sync_read", session, sources, targets, lengths) == 0
    assert a.call("bytes_of", "m") == pattern
    assert a.call("do", "batch_transfer_sync_read", session, [], [], []) == 0
    assert a.call("do", "batch_transfer_sync_read", session, [here], [], [1]) == -1
    batch = a.call("do", "batch_transfer_async_write", session, sources, targets, lengths)
    other = a.call("do", "transfer_submit_write", session, here, there, 0)
    assert 0 < batch < other < 2**63
    assert a.call("finish", batch) == 1
    assert a.call("do", "transfer_check_status", batch) == -1, "the number has ended"
    assert a.call("do", "get_batch_transfer_status", [other]) == 0


def test_the_numbers_of_registration(pair: Pair) -> None:
    a, _ = pair
    start = a.call("memory", "m", 4 * KIB)
    assert a.call("do", "batch_register_memory", [start, start + KIB], [KIB, KIB]) == 0
    for at, size in ((0, 1), (KIB - 1, 2), (KIB, KIB), (-8, 9), (-8, 8 * KIB)):
        assert a.call("do", "register_memory", start + at, size) == -7, (at, size)
    assert "overlap" in a.call("said")
    # All or none.
    lists = [start + 2 * KIB, start], [KIB, 1]
    assert a.call("do", "batch_register_memory", *lists) == -7
    assert a.call("do", "unregister_memory", start + 2 * KIB) == -3
    assert a.call("do", "batch_register_memory", [start + 3 * KIB], [0]) == -1
    assert a.call("do", "batch_register_memory", [start + 3 * KIB], []) == -1
    assert a.call("do", "register_memory", start + 2 * KIB, KIB, "cpu:0") == 0
    ends = [start, start + KIB, start + 2 * KIB]
    assert a.call("do", "batch_unregister_memory", ends) == 0
    assert a.call("do", "batch_unregister_memory", ends) == -3
    assert "nothing is registered" in a.call("said")


def test_memory_that_ended_is_not_touched(pair: Pair) -> None:
    a, b = pair
    session = b.call("session")
    here, there = a.call("registered", "m", KIB, 7), b.call("registered", "m", KIB)
    write = ("do", "transfer_sync_write", session, here, there, KIB)
    assert a.call(*write) == 0
    b.call("do", "unregister_memory", there)
    b.call("fill", "m", 1)
    assert a.call(*write) == -1
    assert "not published" in a.call("said")
    # Registered again, for this process alone.
    assert b.call("do", "register_memory", there, KIB, "*", False) == 0
    assert a.call(*write) == -1
    assert b.call("bytes_of", "m") == b"\x01" * KIB
    assert b.call("do", "unregister_memory", there) == 0
    # And for peers, in two pieces: the writer notices nothing.
    assert b.call("do", "batch_register_memory", [there, there + 512], [512, 512]) == 0
    assert a.call(*write) == 0
    assert b.call("bytes_of", "m") == b"\x07" * KIB


def test_many_threads_share_an_engine(pair: Pair) -> None:
    a, b = pair
    threads, length = 16, KIB
    here = a.call("registered", "m", threads * length)
    for at in range(threads):
        a.call("put", "m", at * length, bytes([at + 1]) * length)
    there = b.call("registered", "m", threads * length)
    pool = ("from_a_pool", threads, 20, b.call("session"), here, there, length)
    assert set(a.call(*pool)) == {0}
    assert b.call("bytes_of", "m") == a.call("bytes_of", "m")


def test_a_dead_peer_is_a_number_and_its_successor_is_reached(
    engines: Callable[..., Engine],
) -> None:
    env = {"MC_FORCE_TCP": "1", "MC_LEGACY_RPC_PORT_BINDING": "1"}
    a, b = engines(env=env), engines(env=env)
    assert a.call("initialize") == b.call("initialize") == 0
    session = b.call("session")
    here, there = a.call("registered", "m", KIB, 7), b.call("registered", "m", KIB)
    write = ("do", "transfer_sync_write", session, here, there, KIB)
    assert a.call(*write) == 0
    assert a.call("do", "send_probe", session) == 0
    b.kill()
    b.process.wait()
    assert a.call(*write) == -1
    assert a.call("do", "send_probe", session) == -1
    assert "cannot connect" in a.call("said")
    assert a.call("do", "batch_transfer_async_read", session, [here], [there], [8]) == 2**64 - 1
    assert set(a.call("from_a_pool", 8, 1, session, here, there, 64)) == {-1}
    again = engines(env=env)
    assert again.call("initialize", session, "P2PHANDSHAKE", "tcp", "") == 0
    assert again.call("session") == session
    assert a.call("do", "send_probe", session) == 0
    there = again.call("registered", "m", KIB)
    assert a.call("do", "transfer_sync_write", session, here, there, KIB) == 0
    assert again.call("bytes_of", "m") == b"\x07" * KIB


@pytest.mark.parametrize("is_known", [True, False], ids=["a write", "a look-up"])
@pytest.mark.parametrize("tcp", ["1", "0"], ids=["tcp", "one host"])
def test_a_peer_that_stands_still_is_a_number(
    engines: Callable[..., Engine], tcp: str, is_known: bool
) -> None:
    env = {"MC_FORCE_TCP": tcp, "UCCL_P2P_TIMEOUT_MS": "3000"}
    a, b = engines(env=env), engines(env=env)
    assert a.call("initialize") == b.call("initialize") == 0
    session = b.call("session")
    here, there = a.call("registered", "m", KIB, 7), b.call("registered", "m", KIB)
    if is_known:
        assert a.call("do", "transfer_sync_write", session, here, there, KIB) == 0
    else:
        assert a.call("do", "send_probe", session) == 0
    b.kill(signal.SIGSTOP)
    code, turns = a.call("while_it_waits", session, here, there, KIB)
    if tcp == "0" and is_known:
        # Within a host the writer copies by itself, where the kernel lets it.
        assert code in (0, -1)
    else:
        assert code == -1
        assert turns > 10, "other threads run meanwhile"
    b.kill(signal.SIGCONT)
    assert a.call("do", "transfer_sync_write", session, here, there, KIB) == 0
    assert b.call("bytes_of", "m") == b"\x07" * KIB


def test_a_secret_keeps_strangers_out(engines: Callable[..., Engine]) -> None:
    env = {"UCCL_P2P_PSK": "0123456789abcdef"}
    a, b, stranger = engines(env=env), engines(env=env), engines()
    for engine in (a, b, stranger):
        assert engine.call("initialize") == 0
    session = b.call("session")
    there = b.call("registered", "m", KIB)
    for engine, code in ((a, 0), (stranger, -1)):
        here = engine.call("registered", "m", KIB, 7)
        write = ("do", "transfer_sync_write", session, here, there, KIB)
        assert engine.call(*write) == code


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((HOST, "etcd://10.0.0.1:2379", "tcp", ""), "P2PHANDSHAKE"),
        ((HOST, "P2PHANDSHAKE", "ascend", ""), "ascend"),
        ((HOST, "P2PHANDSHAKE", "hip", ""), "hip"),
    ],
)
def test_unsupported_requests_say_so(
    engines: Callable[..., Engine], arguments: tuple[str, ...], why: str
) -> None:
    engine = engines()
    with pytest.raises(AssertionError, match="initialize"):
        engine.call("session")
    assert engine.call("initialize", *arguments) == -1
    assert why in engine.call("said")
    assert engine.call("initialize") == 0
    assert engine.call("initialize") == -1
    assert not engine.call("has", "get_notifies")
    assert not engine.call("has", "submit_scatter_write")
    with pytest.raises(AssertionError, match="store"):
        engine.call("do", "get_engine")


def test_managed_buffers(pair: Pair) -> None:
    a, b = pair
    here, there = (end.call("do", "allocate_managed_buffer", KIB) for end in pair)
    assert a.call("do", "write_bytes_to_buffer", here, b"text", 4) == 0
    session = b.call("session")
    assert a.call("do", "transfer_sync_write", session, here, there, 4) == 0
    assert b.call("do", "read_bytes_from_buffer", there, 4) == b"text"
    assert b.call("do", "free_managed_buffer", there, KIB) == 0
    assert a.call("do", "transfer_sync_write", session, here, there, 4) == -1


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_two_hosts(engines: Callable[..., Engine], family: str) -> None:
    """Network namespaces that a veth pair joins; the link is cut and joined again."""
    if (lacking := can_make_namespaces()) is not None:
        pytest.skip(f"lacks {lacking}")
    from test_two_hosts import Hosts

    hosts = Hosts(family)
    try:
        env = {"MC_FORCE_TCP": "1", "UCCL_P2P_TIMEOUT_MS": "3000"}
        a, b = (engines(netns=name, env=env) for name in hosts.names)
        for engine, ip in zip((a, b), hosts.ips):
            assert engine.call("initialize", ip, "P2PHANDSHAKE", "tcp", "") == 0
        port = b.call("do", "get_rpc_port")
        session = f"[{hosts.ips[1]}]:{port}" if family == "ipv6" else f"{hosts.ips[1]}:{port}"
        size = 4096 * KIB
        here, there = a.call("registered", "m", size, 7), b.call("registered", "m", size)
        write = ("do", "transfer_sync_write", session, here, there, size)
        assert a.call(*write) == 0
        assert b.call("bytes_of", "m") == b"\x07" * size
        hosts.link("down")
        assert a.call(*write) == -1
        assert a.call("do", "send_probe", session) == -1
        hosts.link("up")
        assert a.call("do", "send_probe", session) == 0
        assert a.call(*write) == 0
    finally:
        hosts.close()
