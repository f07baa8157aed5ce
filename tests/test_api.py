"""The Python interface: forms, names and types of both generations of UCCL's API."""

from __future__ import annotations

import array
import gc
import inspect
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from peer import U64
from uccl import _core, p2p

# Lengths of the pieces of 256 bytes.
CUTS = [100, 7, 1, 20, 128]


@pytest.fixture
def ep() -> Iterator[p2p.Endpoint]:
    with p2p.Endpoint(port=0, bind="127.0.0.1") as endpoint:
        yield endpoint


class Two:
    """Two endpoints of this process, connected."""

    def __init__(self, a: p2p.Endpoint, b: p2p.Endpoint) -> None:
        self.a, self.b = a, b
        ip, port, gpu = a.parse_metadata(b.get_metadata())
        ok, self.conn_a = a.connect(ip, gpu, port)
        assert ok, p2p.last_error()
        ok, _ip, _gpu, self.conn_b = b.accept(timeout=10)
        assert ok, p2p.last_error()


@pytest.fixture
def two(transport: str) -> Iterator[Two]:
    settings: dict[str, Any] = {"port": 0, "bind": "127.0.0.1", "transport": transport}
    with p2p.Endpoint(**settings) as a, p2p.Endpoint(**settings) as b:
        yield Two(a, b)


def region(endpoint: p2p.Endpoint, array: Any) -> int:
    ok, mr = endpoint.reg(array)
    assert ok, p2p.last_error()
    return mr


def ended(endpoint: p2p.Endpoint, posted: tuple[bool, int]) -> tuple[bool, bool]:
    ok, transfer = posted
    assert ok, p2p.last_error()
    return endpoint.wait(transfer, 20)


class TestModule:
    def test_names(self) -> None:
        for name in p2p.__all__:
            assert hasattr(p2p, name)

    def test_float_types(self) -> None:
        names = ["kUndefined", "kFloat16", "kBFloat16", "kFloat32", "kFloat8E4M3FN", "kFloat8E5M2"]
        for value, name in enumerate(names):
            assert getattr(p2p, name) is getattr(p2p.FloatType, name)
            assert int(getattr(p2p, name)) == value

    def test_descriptor(self) -> None:
        desc = p2p.XferDesc()
        assert (desc.addr, desc.size, desc.mr_id, desc.lkeys, desc.rkeys) == (0, 0, U64, [], [])
        desc.addr, desc.size, desc.mr_id = 1 << 40, 1 << 33, 7
        desc.lkeys, desc.rkeys = [1, 2], [3, 4]
        assert (desc.addr, desc.size, desc.mr_id) == (1 << 40, 1 << 33, 7)
        assert (desc.lkeys, desc.rkeys) == ([1, 2], [3, 4])
        with pytest.raises(TypeError):
            desc["addr"]  # type: ignore[index]

    def test_handle(self) -> None:
        handle = p2p.XferHandle(1, "read", 2)
        assert (handle.conn_id, handle.op_name, handle.transfer_id) == (1, "read", 2)
        with pytest.raises(AttributeError):
            handle.conn_id = 3  # type: ignore[misc]

    def test_oob_ip_is_an_address(self) -> None:
        socket.getaddrinfo(p2p.get_oob_ip(), 1, flags=socket.AI_NUMERICHOST)

    def test_oob_ip_is_the_address_that_endpoints_tell(self) -> None:
        with p2p.Endpoint(port=0) as ep:
            told, _port, _gpu = p2p.Endpoint.parse_metadata(ep.get_metadata())
        assert told == p2p.get_oob_ip() == p2p.get_oob_ip(0) == p2p.get_oob_ip(local_gpu_idx=0)

    def test_oob_ip_is_the_address_to_bind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCCL_P2P_BIND", "127.0.0.1")
        assert p2p.get_oob_ip() == "127.0.0.1"

    def test_every_method_is_documented(self) -> None:
        methods = [m for name, m in vars(_core.Endpoint).items() if not name.startswith("_")]
        assert len(methods) > 50
        for method in methods:
            method = getattr(method, "__func__", method)
            assert inspect.getdoc(method)
            assert inspect.signature(method)


class TestSignals:
    """Words that writes change after their bytes have arrived."""

    def test_set_and_add(self, two: Two) -> None:
        here, there = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
        words = np.zeros(4, np.uint64)
        m, n, w = region(two.a, here), region(two.b, there), region(two.b, words)
        meta = two.b.advertise(n, there)[1]
        word = two.b.advertise(w, words[1:2])[1]
        assert two.a.write(two.conn_a, m, here, None, meta, signal=(word, 7, "set"))
        assert (words == [0, 7, 0, 0]).all() and (there == here).all()
        posted = two.a.write_async(two.conn_a, m, here, None, meta, signal=(word, 3, "add"))
        assert two.b.wait_signal(words[1:2], 10, timeout=20) == (True, 10)
        assert ended(two.a, posted) == (True, True)
        pieces = [here[:100], here[100:]]
        metas = [two.b.advertise(n, part)[1] for part in (there[:100], there[100:])]
        there[:] = 0
        for strong in (False, True):
            assert two.a.writev(
                two.conn_a,
                [m, m],
                pieces,
                None,
                metas,
                signal=(word, -1, "add"),
                strong=strong,
                context=4,
                notif=b"both",
            ), p2p.last_error()
        assert (words == [0, 8, 0, 0]).all() and (there == here).all()

    def test_a_signal_is_waited_for_until_its_value_or_the_timeout(self, two: Two) -> None:
        words = np.zeros(2, np.uint64)
        assert two.b.wait_signal(words, 0) == (False, 0)
        assert "no registered memory" in (p2p.last_error() or "")
        w = region(two.b, words)
        assert two.b.wait_signal(words, 0) == (True, 0)
        assert two.b.wait_signal(words.ctypes.data + 8, 1, w, timeout=0.02) == (False, 0)
        assert "in time" in (p2p.last_error() or "")
        words[0] = 5
        assert two.b.wait_signal(words, 4) == (True, 5)
        assert two.b.wait_signal(words, 4, equals=True, timeout=0.02) == (False, 0)
        assert two.b.wait_signal(words, 5, equals=True) == (True, 5)

    def test_a_wait_ends_with_the_connection_that_it_names(self, two: Two) -> None:
        words = np.array([5, 0], np.uint64)
        w = region(two.b, words)
        assert two.a.remove_remote_endpoint(two.conn_a)
        assert two.b.wait_signal(words[1:2], 1, w, timeout=60, conn_id=two.conn_b) == (False, 0)
        assert "lost" in (p2p.last_error() or "")
        # A change from before the loss is still reported.
        assert two.b.wait_signal(words, 5, w, conn_id=two.conn_b) == (True, 5)

    def test_mistakes(self, two: Two) -> None:
        words = np.zeros(2, np.uint64)
        m, w = region(two.a, words), region(two.b, words)
        word = two.b.advertise(w, words)[1]
        write = two.a.write
        for signal in [(word, 1), [word, 1, "set"], (word, 1, 2), (word, "1", "set"), word]:
            with pytest.raises(TypeError):
                write(two.conn_a, m, words[1:], None, word, signal=signal)  # type: ignore
        with pytest.raises(ValueError, match="'set' or to 'add'"):
            write(two.conn_a, m, words[1:], None, word, signal=(word, 1, "xor"))
        with pytest.raises(TypeError):
            two.a.read(two.conn_a, m, words[1:], None, word, signal=(word, 1, "set"))  # type: ignore
        forged = word[:32] + b"\0" * 8 + word[40:]
        assert not write(two.conn_a, m, words[1:], None, word, signal=(forged, 1, "set"))
        assert "refused" in (p2p.last_error() or "")


class TestMetadata:
    """Parsing needs no endpoint: the bytes are made by hand, as programs do."""

    def test_by_index(self) -> None:
        v4 = socket.inet_aton("10.1.2.3") + struct.pack("!H", 28101) + struct.pack("i", 3)
        assert p2p.Endpoint.parse_metadata(v4) == ("10.1.2.3", 28101, 3)
        v6 = socket.inet_pton(socket.AF_INET6, "fd00::5") + v4[4:]
        assert p2p.Endpoint.parse_metadata(v6) == ("fd00::5", 28101, 3)

    def test_by_pci_address(self) -> None:
        tail = struct.pack("!HB", 28101, 12) + b"0000:4a:00.0"
        v4 = socket.inet_aton("10.1.2.3") + tail
        assert len(v4) == 19
        assert p2p.Endpoint.parse_metadata(v4) == ("10.1.2.3", 28101, "0000:4a:00.0")
        v6 = socket.inet_pton(socket.AF_INET6, "fd00::5") + tail
        assert len(v6) == 31
        assert p2p.Endpoint.parse_metadata(bytearray(v6)) == ("fd00::5", 28101, "0000:4a:00.0")

    @pytest.mark.parametrize(
        "bad", [b"", b"\0" * 9, b"\0" * 11, b"\1" * 19, b"\xff" * 22, b"x" * 1000]
    )
    def test_nonsense(self, bad: bytes) -> None:
        with pytest.raises(RuntimeError):
            p2p.Endpoint.parse_metadata(bad)

    def test_own(self, ep: p2p.Endpoint) -> None:
        metadata = ep.get_metadata()
        assert type(metadata) is bytes and len(metadata) == 10
        ip, port, gpu = p2p.Endpoint.parse_metadata(metadata)
        assert (socket.inet_ntoa(metadata[:4]), *struct.unpack("!H", metadata[4:6])) == (ip, port)
        assert (ip, gpu) == ("127.0.0.1", 0) and port > 0

    def test_own_ipv6(self) -> None:
        with p2p.Endpoint(local_gpu_idx=5, port=0, bind="::1") as ep:
            metadata = ep.get_metadata()
            assert len(metadata) == 22
            ip, _port, gpu = p2p.Endpoint.parse_metadata(metadata)
            assert (ip, gpu) == ("::1", 5)


class TestPlaces:
    def test_region_info(self, ep: p2p.Endpoint) -> None:
        data = np.zeros(100, np.uint8)
        mr = region(ep, data)
        info = ep.region_info(mr)
        assert (info["addr"], info["len"], info["kind"]) == (data.ctypes.data, 100, "host")
        assert info["numa_node"] is None or info["numa_node"] >= 0
        nic = info["nic"]
        assert nic is None or (nic["name"] and nic["state"] in ("up", "virtual"))
        assert ep.dereg(mr) and ep.region_info(mr) is None
        assert "unknown" in p2p.last_error()

    def test_worker_cpus(self) -> None:
        may = os.sched_getaffinity(0)
        for near in (None, True, False):
            with p2p.Endpoint(port=0, bind="127.0.0.1", numa_affinity=near) as ep:
                cpus = ep.worker_cpus()
            if near is False:
                assert cpus is None
            assert cpus is None or (cpus == sorted(cpus) and set(cpus) <= may)
        with pytest.raises(TypeError):
            p2p.Endpoint(port=0, bind="127.0.0.1", numa_affinity="near")  # type: ignore[arg-type]


class TestEndpoint:
    def test_forms(self, base_port: int) -> None:
        common: dict[str, Any] = {"bind": "127.0.0.1", "base_port": base_port}
        forms: list[tuple[tuple[int, ...], dict[str, Any]]] = [
            ((), {}),
            ((0,), {}),
            ((0, 4), {}),
            ((), {"local_gpu_idx": 0, "num_cpus": 4}),
            ((0,), {"psk": "secret", "timeout": 5, "transfer_timeout": 60.0, "transport": "tcp"}),
            (
                (0,),
                {"psk": b"secret", "tcp_streams": 2, "checksum": True, "cma": False, "spin_us": 10},
            ),
        ]
        for args, kwargs in forms:
            make: Any = p2p.Endpoint
            with make(*args, **kwargs, **common) as endpoint:
                assert repr(endpoint) == "<UCCL P2P Endpoint>"

    def test_well_known_port(self, base_port: int) -> None:
        with p2p.Endpoint(3, bind="127.0.0.1", base_port=base_port) as first:
            assert p2p.Endpoint.parse_metadata(first.get_metadata())[1] == base_port + 3
            # The port is taken, so the endpoint finds another one.
            with p2p.Endpoint(3, bind="127.0.0.1", base_port=base_port) as second:
                assert p2p.Endpoint.parse_metadata(second.get_metadata())[1] != base_port + 3

    @pytest.mark.parametrize(
        ("kwargs", "error"),
        [
            ({"gpu": 0}, TypeError),
            ({"local_gpu_idx": "zero"}, TypeError),
            ({"local_gpu_idx": -1}, OverflowError),
            ({"port": 65536}, OverflowError),
            ({"bind": "nowhere"}, ValueError),
            ({"transport": "carrier pigeon"}, ValueError),
            ({"checksum": "perhaps"}, ValueError),
            ({"timeout": -1}, ValueError),
            ({"timeout": float("nan")}, ValueError),
            ({"psk": 5}, TypeError),
        ],
    )
    def test_settings_that_make_no_sense(self, kwargs: dict[str, Any], error: type) -> None:
        with pytest.raises(error):
            p2p.Endpoint(**kwargs)

    def test_too_many_positionals(self) -> None:
        with pytest.raises(TypeError, match="at most 2"):
            p2p.Endpoint(0, 4, 5)  # type: ignore[arg-type, misc]

    def test_a_taken_port(self, ep: p2p.Endpoint) -> None:
        port = ep.parse_metadata(ep.get_metadata())[1]
        with pytest.raises(OSError):
            p2p.Endpoint(port=port, bind="127.0.0.1")

    def test_close_twice_and_use_after(self) -> None:
        ep = p2p.Endpoint(port=0)
        ep.close()
        ep.close()
        assert ep.accept(timeout=5) == (False, "", -1, 0)
        assert ep.reg(bytearray(8)) == (False, 0)
        assert ep.connect("127.0.0.1", 0, 1) == (False, 0)
        assert "closed" in p2p.last_error()

    def test_accept_times_out(self, ep: p2p.Endpoint) -> None:
        assert ep.accept(timeout=0.05) == (False, "", -1, 0)
        assert ep.accept_local(timeout=0.05) == (False, -1, 0)
        assert p2p.last_error()

    def test_rank(self, ep: p2p.Endpoint) -> None:
        assert ep.conn_id_of_rank(0) == U64
        assert ep.conn_id_of_rank(rank=3) == U64

    def test_last_error_is_the_threads_own(self, ep: p2p.Endpoint) -> None:
        seen: list[str | None] = []

        def other() -> None:
            seen.append(p2p.last_error())
            ep.dereg(77)
            seen.append(p2p.last_error())

        ep.dereg(4711)
        assert "4711" in p2p.last_error()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen[0] is None and "77" in seen[1]
        assert "4711" in p2p.last_error() == ep.last_error()

    def test_reports(self, two: Two, transport: str) -> None:
        stats = two.a.stats()
        assert stats["connections"] == 1 and stats["regions"] == 0
        info = two.a.connection(two.conn_a)
        assert info["gpu_index"] == 0 and info["same_host"] is True
        assert (info["path"] == "tcp") == (transport == "tcp") == (info["moves"] == "tcp")
        assert two.a.connection(U64) is None

    def test_path(self, two: Two, transport: str) -> None:
        def path_to(memory: Any, *expected: str) -> bytes:
            ok, meta = two.b.advertise(two.conn_b, region(two.b, memory), memory, 64)
            assert ok, p2p.last_error()
            give_up = time.monotonic() + 10
            # Shared memory is mapped in the background.
            while two.a.path(two.conn_a, meta) not in expected:
                assert time.monotonic() < give_up, two.a.path(two.conn_a, meta)
            return meta

        same_host = transport != "tcp"
        path_to(bytearray(64), *(("cma", "shm") if same_host else ("tcp",)))
        meta = path_to(two.b.alloc(64), "mapped" if same_host else "tcp")
        assert two.a.path(U64, meta) is None and str(U64) in p2p.last_error()


class TestConnect:
    @pytest.mark.parametrize(
        "names",
        ["remote_gpu_idx", "remote_gpu_bdf", "positional", "string", "bdf", "no port", "-1"],
    )
    def test_forms(self, base_port: int, names: str) -> None:
        settings: dict[str, Any] = {"bind": "127.0.0.1", "base_port": base_port}
        gpu = 0 if names in ("remote_gpu_bdf", "bdf") else 2
        with p2p.Endpoint(gpu, **settings) as server, p2p.Endpoint(5, **settings) as client:
            ip, port, _ = p2p.Endpoint.parse_metadata(server.get_metadata())
            ok, conn = {
                "remote_gpu_idx": lambda: client.connect(remote_ip_addr=ip, remote_gpu_idx=2),
                "remote_gpu_bdf": lambda: client.connect(ip, remote_gpu_bdf="0000:4a:00.0"),
                "positional": lambda: client.connect(ip, 77, port),
                "string": lambda: client.connect(ip, "2"),
                "bdf": lambda: client.connect(ip, "0000:4a:00.0", remote_port=port),
                "no port": lambda: client.connect(ip, 2, None),
                "-1": lambda: client.connect(ip, 2, -1),
            }[names]()
            assert ok, p2p.last_error()
            accepted, peer, peer_gpu, _ = server.accept(timeout=10)
            assert (accepted, peer, peer_gpu) == (True, "127.0.0.1", 5)
            assert client.connection(conn)["gpu_index"] == gpu

    def test_local(self, base_port: int) -> None:
        settings: dict[str, Any] = {"bind": "127.0.0.1", "base_port": base_port}
        with p2p.Endpoint(1, **settings) as server, p2p.Endpoint(2, **settings) as client:
            ok, conn = client.connect_local(1)
            assert ok, p2p.last_error()
            ok, gpu, _ = server.accept_local(timeout=10)
            assert (ok, gpu) == (True, 2)
            assert client.connection(conn)["same_host"] is True

    @pytest.mark.parametrize("how", ["connect", "connect_local"])
    def test_a_peer_that_starts_later(self, base_port: int, how: str) -> None:
        """Processes that start at the same time meet at well-known ports, in any order."""
        settings: dict[str, Any] = {"bind": "127.0.0.1", "base_port": base_port}
        met: list[tuple[bool, int]] = []
        with p2p.Endpoint(2, **settings) as client:
            call = (
                lambda: client.connect("127.0.0.1", 1)
                if how == "connect"
                else client.connect_local(1)
            )
            early = threading.Thread(target=lambda: met.append(call()))
            early.start()
            time.sleep(0.5)
            assert met == []
            with p2p.Endpoint(1, **settings) as server:
                assert server.accept(timeout=10)[0] is True
                early.join()
                [(ok, conn)] = met
                assert ok is True and client.connection(conn)["gpu_index"] == 1

    def test_a_peer_that_never_starts(self, base_port: int) -> None:
        with p2p.Endpoint(2, bind="127.0.0.1", base_port=base_port) as client:
            assert client.connect_local(1, timeout=0.2) == (False, 0)
            why = p2p.last_error()
            assert str(base_port + 1) in why and "200ms" in why and "refused" in why

    def test_names_resolve(self, ep: p2p.Endpoint) -> None:
        _, port, _ = ep.parse_metadata(ep.get_metadata())
        with p2p.Endpoint(port=0) as client:
            # If localhost is ::1 first, no endpoint listens there.
            ok, _ = client.connect("localhost", 0, port, timeout=5)
            assert ok, p2p.last_error()

    def test_add_remote_endpoint(self, ep: p2p.Endpoint) -> None:
        with p2p.Endpoint(port=0, bind="127.0.0.1") as other:
            assert other.start_passive_accept() is True
            metadata = other.get_metadata()
            ok, first = ep.add_remote_endpoint(metadata)
            assert ok, p2p.last_error()
            assert ep.add_remote_endpoint(metadata_bytes=bytearray(metadata)) == (True, first)
            assert ep.stats()["connections"] == 1
            assert ep.remove_remote_endpoint(first) is True
            assert ep.remove_remote_endpoint(first) is False
            assert ep.stats()["connections"] == 0
            ok, second = ep.add_remote_endpoint(metadata)
            assert ok and second != first

    def test_adding_from_many_threads_makes_one_connection(self, ep: p2p.Endpoint) -> None:
        with p2p.Endpoint(port=0, bind="127.0.0.1") as other:
            other.start_passive_accept()
            metadata, got = other.get_metadata(), []
            add = lambda: got.append(ep.add_remote_endpoint(metadata))
            threads = [threading.Thread(target=add) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(got)) == 1 and got[0][0] is True
            assert ep.stats()["connections"] == 1

    def test_add_itself(self, ep: p2p.Endpoint) -> None:
        ep.start_passive_accept()
        ok, conn = ep.add_remote_endpoint(ep.get_metadata())
        assert ok, p2p.last_error()
        src, dst = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
        mr_src, mr_dst = region(ep, src), region(ep, dst)
        ok, meta = ep.advertise(mr_dst, dst)
        assert ok and ep.write(conn, mr_src, src, None, meta), p2p.last_error()
        assert (dst == src).all()


class TestMemory:
    """Objects that are accepted in place of a pointer."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: bytearray(64),
            lambda: memoryview(bytearray(64)),
            lambda: np.zeros(16, np.float32),
            lambda: np.zeros((4, 4), np.float32),
            lambda: np.zeros(8, "datetime64[ns]"),
            lambda: Tensor(np.zeros(16, np.float32)),
            lambda: Interface(np.zeros(16, np.float32)),
        ],
        ids=["bytearray", "memoryview", "numpy", "2d", "datetime64", "tensor", "array_interface"],
    )
    def test_objects(self, two: Two, make: Any) -> None:
        source, target = make(), make()
        ok, mr_a = two.a.reg(source)
        assert ok, p2p.last_error()
        ok, mr_b = two.b.reg(target, 64)
        assert ok, p2p.last_error()
        raw(source)[:] = bytes(range(64))
        ok, meta = two.b.advertise(mr_b, target)
        assert ok, p2p.last_error()
        assert two.a.write(two.conn_a, mr_a, source, None, meta), p2p.last_error()
        assert bytes(raw(target)) == bytes(range(64))

    def test_numpy_integers_are_addresses(self, ep: p2p.Endpoint) -> None:
        array = np.zeros(64, np.uint8)
        address = np.array([array.ctypes.data], np.uint64)
        ok, mr = ep.reg(address[0], np.int64(64))
        assert ok, p2p.last_error()
        assert ep.advertise(mr, array.ctypes.data, 64)[0]
        # An array of one integer is an array, not the integer.
        ok, mr = ep.reg(address)
        assert ok
        assert ep.advertise(mr, address.ctypes.data, 8)[0]
        ok, mrs = ep.regv(address, np.array([64]))
        assert ok and len(mrs) == 1

    def test_an_address_needs_a_size(self, ep: p2p.Endpoint) -> None:
        with pytest.raises(TypeError, match="size"):
            ep.reg(4096)  # type: ignore[call-overload]

    def test_more_than_the_object_has(self, ep: p2p.Endpoint) -> None:
        assert ep.reg(bytearray(64), 65) == (False, 0)
        assert "65" in p2p.last_error()

    @pytest.mark.parametrize("nonsense", [None, "text", 1.5, object(), [1], {}])
    def test_nonsense(self, ep: p2p.Endpoint, nonsense: Any) -> None:
        with pytest.raises(TypeError):
            ep.reg(nonsense, 64)

    def test_not_contiguous(self, ep: p2p.Endpoint) -> None:
        for holey in (np.zeros(64)[::2], np.zeros((8, 8)).T):
            with pytest.raises((BufferError, ValueError)):
                ep.reg(holey)

    def test_read_only(self, two: Two) -> None:
        """Read-only memory can only be sent from."""
        source, target = bytes(range(64)), bytearray(64)
        mr_a, mr_b = region(two.a, source), region(two.b, target)
        address = np.frombuffer(source, np.uint8).ctypes.data
        ok, transfer = two.b.recv_async(two.conn_b, mr_b, target)
        assert ok and two.a.send(two.conn_a, mr_a, source), p2p.last_error()
        assert two.b.wait(transfer, 10) == (True, True)
        assert target == source
        assert two.a.advertise(mr_a, source) == (False, b"")
        with pytest.raises(TypeError, match="read-only"):
            two.a.recv(two.conn_a, mr_a, source)
        assert two.a.recv(two.conn_a, mr_a, address, 64) is False
        assert "read-only" in p2p.last_error()
        _, meta = two.b.advertise(mr_b, target)
        assert two.a.read(two.conn_a, mr_a, address, 64, meta) is False
        assert two.a.dereg(mr_a) is True

    def test_registration_keeps_the_object(self, ep: p2p.Endpoint) -> None:
        data = bytearray(64)
        mr = region(ep, data)
        with pytest.raises(BufferError):
            data.extend(b"more")
        assert ep.dereg(mr) is True
        data.extend(b"more")
        assert ep.dereg(mr) is False
        region(ep, data)
        ep.close()
        data.extend(b"more")

    def test_alloc(self, ep: p2p.Endpoint) -> None:
        buffer = ep.alloc(5000)
        assert (len(buffer), buffer.size) == (5000, 5000)
        assert buffer.ptr == buffer.data_ptr() and buffer.ptr % 4096 == 0
        assert isinstance(buffer, p2p.SharedBuffer)
        array = np.frombuffer(buffer, np.uint8)
        assert array.flags.writeable and array.ctypes.data == buffer.ptr and not array.any()
        mr = region(ep, buffer)
        del buffer
        array[:] = 7
        assert (array == 7).all()
        assert ep.dereg(mr)
        ep.close()
        array[:] = 8
        assert (array == 8).all()
        with pytest.raises(TypeError):
            p2p.SharedBuffer()


class TestTransfers:
    """All names of the calls that start transfers."""

    @pytest.fixture(autouse=True)
    def _memory(self, two: Two) -> None:
        self.two = two
        self.src = np.arange(256, dtype=np.uint8)
        self.dst = np.zeros(256, np.uint8)
        self.mr_src, self.mr_dst = region(two.a, self.src), region(two.b, self.dst)
        self.src_ptr, self.dst_ptr = self.src.ctypes.data, self.dst.ctypes.data

    def arrived(self) -> bool:
        same = bool((self.dst == self.src).all())
        self.dst[:] = 0
        return same

    def meta(self) -> bytes:
        ok, meta = self.two.b.advertise(self.mr_dst, self.dst_ptr, 256)
        assert ok and type(meta) is bytes and len(meta) == 64
        return meta

    def test_advertise_forms(self) -> None:
        b, conn, mr, ptr = self.two.b, self.two.conn_b, self.mr_dst, self.dst_ptr
        ok, expected = b.advertise(mr, ptr, 256)
        assert ok
        for args, kwargs in [
            ((conn, mr, ptr, 256), {}),
            ((mr, self.dst), {}),
            ((conn, mr, self.dst), {}),
            ((conn, mr, self.dst, None), {}),
            ((mr,), {"ptr": ptr, "size": 256}),
            ((), {"mr_id": mr, "ptr": ptr, "size": 256}),
            ((), {"conn_id": conn, "mr_id": mr, "addr": ptr, "len": 256}),
            ((conn,), {"mr_id": mr, "ptr": ptr, "size": 256}),
        ]:
            assert b.advertise(*args, **kwargs) == (True, expected), (args, kwargs)
        into: list[tuple[Any, dict[str, Any]]] = [
            ((conn, mr, ptr, 256, bytearray(64)), {}),
            ((conn, mr, ptr, 256), {"out_buf": bytearray(64)}),
            ((mr, ptr, 256, bytearray(64)), {}),
            ((mr, ptr, 256), {"out_buf": bytearray(100)}),
            ((conn, mr, ptr, 256, np.zeros(64, np.uint8)), {}),
        ]
        for args, kwargs in into:
            assert b.advertise(*args, **kwargs) is True, (args, kwargs)
            assert bytes(kwargs.get("out_buf", args[-1]))[:64] == expected
        assert b.advertise(conn, mr, ptr, 256, bytearray(63)) is False
        refused: Any
        for refused in ("x" * 64, bytes(64)):
            with pytest.raises(TypeError):
                b.advertise(conn, mr, ptr, 256, refused)

    def test_advertisev_forms(self) -> None:
        b, conn, mrs = self.two.b, self.two.conn_b, [self.mr_dst] * 2
        ptrs, sizes = [self.dst_ptr, self.dst_ptr + 100], [100, 156]
        ok, expected = b.advertisev(mrs, ptrs, sizes, 2)
        assert ok and [len(blob) for blob in expected] == [64, 64]
        assert b.advertisev(conn, mrs, ptrs, sizes, 2) == (True, expected)
        assert b.advertisev(mr_id_v=mrs, ptr_v=ptrs, size_v=sizes, num_iovs=2) == (True, expected)
        outs = [bytearray(64), bytearray(64)]
        assert b.advertisev(conn, mrs, ptrs, sizes, outs, 2) is True
        assert outs == expected
        named: dict[str, Any] = {
            "mr_id_list": mrs,
            "addr_list": ptrs,
            "len_list": sizes,
            "num_iovs": 2,
        }
        outs = [bytearray(64), bytearray(64)]
        assert b.advertisev(conn_id=conn, out_buf_list=outs, **named) is True
        assert outs == expected

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_one_sided_forms(self, kind: str) -> None:
        two = self.two
        if kind == "write":
            ep, conn, mr, ptr, array, meta = (
                two.a,
                two.conn_a,
                self.mr_src,
                self.src_ptr,
                self.src,
                self.meta(),
            )
            own = "src"
        else:
            ok, meta = two.a.advertise(self.mr_src, self.src)
            assert ok
            ep, conn, mr, ptr, array = two.b, two.conn_b, self.mr_dst, self.dst_ptr, self.dst
            own = "dst"
        call, call_async = getattr(ep, kind), getattr(ep, kind + "_async")
        for args, kwargs in [
            ((conn, mr, ptr, 256, meta), {}),
            ((conn, mr, array, None, bytearray(meta)), {}),
            ((), {"conn_id": conn, "mr_id": mr, "ptr": ptr, "size": 256, "meta": meta}),
            ((), {"conn_id": conn, "mr_id": mr, own: ptr, "size": 256, "slot_item": meta}),
        ]:
            assert call(*args, **kwargs) is True, p2p.last_error()
            assert self.arrived()
            assert ended(ep, call_async(*args, **kwargs)) == (True, True)
            assert self.arrived()

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_one_sided_vector_forms(self, kind: str) -> None:
        two = self.two
        ep, conn, mr, array = (
            (two.a, two.conn_a, self.mr_src, self.src)
            if kind == "write"
            else (two.b, two.conn_b, self.mr_dst, self.dst)
        )
        other, other_mr, other_ptr = (
            (two.b, self.mr_dst, self.dst_ptr)
            if kind == "write"
            else (two.a, self.mr_src, self.src_ptr)
        )
        ptr = array.ctypes.data
        sizes, ptrs, mrs = [200, 56], [ptr, ptr + 200], [mr, mr]
        ok, metas = other.advertisev([other_mr] * 2, [other_ptr, other_ptr + 200], sizes, 2)
        assert ok
        own = "src_list" if kind == "write" else "dst_list"
        call, call_async = getattr(ep, kind + "v"), getattr(ep, kind + "v_async")
        named = {"mr_id_v": mrs, "ptr_v": ptrs, "size_v": sizes, "meta_blob_v": metas}
        seed = {"mr_id_list": mrs, own: ptrs, "size_list": sizes, "slot_item_list": metas}
        for args, kwargs in [
            ((conn, mrs, ptrs, sizes, metas, 2), {}),
            ((conn, mrs, ptrs, sizes, metas), {}),
            ((conn, tuple(mrs), np.array(ptrs, np.uint64), sizes, metas, 2), {}),
            ((conn, mrs, [array[:200], array[200:]], None, metas, 2), {}),
            ((), {"conn_id": conn, "num_iovs": 2, **named}),
            ((), {"conn_id": conn, "num_iovs": 2, **seed}),
        ]:
            assert call(*args, **kwargs) is True, p2p.last_error()
            assert self.arrived()
            assert ended(ep, call_async(*args, **kwargs)) == (True, True)
            assert self.arrived()

    def arrays(self, ptr: int, cuts: list[int], mr: int) -> dict[str, tuple[Any, Any, Any]]:
        """Regions, pointers and sizes of consecutive pieces, in several types."""
        ptrs = [ptr + sum(cuts[:i]) for i in range(len(cuts))]
        columns = ([mr] * len(cuts), ptrs, cuts)
        # Every second row of a table: the items of a column are far from each other.
        table = np.zeros((2 * len(cuts), 3), np.uint64)
        table[::2] = np.array(columns, np.uint64).T
        ids, addresses, sizes = columns
        return {
            "uint64": tuple(np.array(c, np.uint64) for c in columns),
            "int64": tuple(np.array(c, np.int64) for c in columns),
            "array": tuple(array.array("Q", c) for c in columns),
            "signed array": tuple(array.array("q", c) for c in columns),
            "memoryview": tuple(memoryview(array.array("L", c)) for c in columns),
            "strided": (table[::2, 0], table[::2, 1], table[::2, 2]),
            "backwards": tuple(np.array(c[::-1], np.uint64)[::-1] for c in columns),
            "other byte order": tuple(np.array(c, ">u8") for c in columns),
            "objects": tuple(np.array(c, object) for c in columns),
            "tuples": tuple(tuple(c) for c in columns),
            "generators": tuple((n for n in c) for c in columns),
            "small integers": (np.array(ids, np.int16), addresses, np.array(sizes, np.uint8)),
            "NumPy's integers": (ids, [np.uint64(a) for a in addresses], list(np.array(sizes))),
        }

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_one_sided_vectors_of_arrays(self, kind: str) -> None:
        two, cuts = self.two, CUTS
        sides = [(two.a, self.mr_src, self.src_ptr), (two.b, self.mr_dst, self.dst_ptr)]
        (ep, mr, ptr), (other, other_mr, other_ptr) = sides if kind == "write" else sides[::-1]
        conn = two.conn_a if kind == "write" else two.conn_b
        there = self.arrays(other_ptr, cuts, other_mr)
        ok, metas = other.advertisev(*there["uint64"])
        assert ok
        packed = b"".join(metas)
        rows = np.frombuffer(packed, np.uint8).reshape(-1, 64)
        wide = np.zeros((len(cuts), 100), np.uint8)
        wide[:, :64] = rows
        blobs = [packed, bytearray(packed), memoryview(packed), rows, wide[:, :64], tuple(metas)]
        blobs += [rows.view(np.uint64), np.array(metas, object), iter(metas), list(rows)]
        here = self.arrays(ptr, cuts, mr)
        call, call_async = getattr(ep, kind + "v"), getattr(ep, kind + "v_async")
        for name, columns in here.items():
            assert call(conn, *columns, packed) is True, (name, p2p.last_error())
            assert self.arrived(), name
        for blob in blobs:
            assert call(conn, *here["int64"], blob, len(cuts)) is True, p2p.last_error()
            assert self.arrived(), type(blob)
        assert ended(ep, call_async(conn, *here["uint64"], packed, len(cuts))) == (True, True)
        assert self.arrived()

    def test_two_sided_vectors_of_arrays(self) -> None:
        a, b, cuts = self.two.a, self.two.b, CUTS
        here = self.arrays(self.src_ptr, cuts, self.mr_src)
        there = self.arrays(self.dst_ptr, cuts, self.mr_dst)
        for name in here:
            posted = b.recvv_async(self.two.conn_b, *there[name])
            assert a.sendv(self.two.conn_a, *here[name], len(cuts)) is True, p2p.last_error()
            assert ended(b, posted) == (True, True) and self.arrived(), name

    def test_receive_vectors_end_with_their_regions(self) -> None:
        """A size may exceed the region; the other pieces are received as if it did not."""
        a, b = self.two.a, self.two.b
        sizes = np.array([100, 1 << 40], np.uint64)
        ptrs = np.array([self.dst_ptr, self.dst_ptr + 100], np.uint64)
        posted = b.recvv_async(self.two.conn_b, [self.mr_dst] * 2, ptrs, sizes)
        pieces = [self.src[:100], self.src[100:]]
        assert a.sendv(self.two.conn_a, [self.mr_src] * 2, pieces) is True, p2p.last_error()
        assert ended(b, posted) == (True, True) and self.arrived()

    def test_pieces_of_vectors_that_are_objects(self) -> None:
        """Rows of an array are pieces; each has its own size unless another is given."""
        a, conn, n = self.two.a, self.two.conn_a, 8
        ok, metas = self.two.b.advertisev([self.mr_dst] * n, list(self.dst.reshape(n, 32)))
        assert ok, p2p.last_error()
        mixed = [self.src[:32], *(self.src_ptr + 32 * i for i in range(1, n))]
        for ptrs, sizes in [
            (self.src.reshape(n, 32), None),
            (list(self.src.reshape(n, 32)), [None] * n),
            (mixed, [None, *[32] * (n - 1)]),
            (mixed, np.full(n, 32, np.uint32)),
        ]:
            assert a.writev(conn, [self.mr_src] * n, ptrs, sizes, metas) is True, p2p.last_error()
            assert self.arrived()
        for sizes in (None, [None] * n):
            with pytest.raises(TypeError, match="a size is needed"):
                a.writev(conn, [self.mr_src] * n, mixed, sizes, metas)

    def test_advertisev_into_one_buffer(self) -> None:
        b, conn, n = self.two.b, self.two.conn_b, len(CUTS)
        columns = self.arrays(self.dst_ptr, CUTS, self.mr_dst)["uint64"]
        ok, expected = b.advertisev(*columns)
        assert ok
        packed, rows = bytearray(64 * n), np.zeros((n, 64), np.uint8)
        wide = np.zeros((n, 100), np.uint8)
        assert b.advertisev(conn, *columns, packed, n) is True and packed == b"".join(expected)
        assert b.advertisev(*columns, out_buf_list=rows) is True and rows.tobytes() == packed
        assert b.advertisev(conn, *columns, wide[:, :64]) is True
        assert wide[:, :64].tobytes() == packed and not wide[:, 64:].any()
        for length in (0, 64, 64 * n - 1, 64 * n + 1, 64 * n + 64):
            out = bytearray(length)
            with pytest.raises(RuntimeError, match=f"{n} pieces of 64 bytes"):
                b.advertisev(conn, *columns, out)
            assert not any(out)
        with pytest.raises(TypeError, match="may only be read"):
            b.advertisev(conn, *columns, bytes(64 * n))
        refused = bytearray(64 * n)
        assert b.advertisev(conn, [1 << 40] * n, *columns[1:], refused) is False
        assert not any(refused)

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_numbers_of_vectors_that_are_none(self, at: int) -> None:
        a, conn, n = self.two.a, self.two.conn_a, len(CUTS)
        columns = self.arrays(self.src_ptr, CUTS, self.mr_src)["int64"]
        metas = self.meta() * n
        name = ("mr_id_v", "ptr_v", "size_v")[at]

        def spoilt(column: Any) -> list[Any]:
            return [*columns[:at], column, *columns[at + 1 :], metas]

        for dtype, format in ((np.float64, "d"), (np.float32, "f"), (np.complex128, "Zd")):
            with pytest.raises(TypeError, match=f"writev.*'{name}'.*64-bit.*\"{format}\""):
                a.writev(conn, *spoilt(columns[at].astype(dtype)))
        for column in (columns[at][:-1], np.append(columns[at], columns[at][:1])):
            with pytest.raises(RuntimeError, match="writev.*items"):
                a.writev(conn, *spoilt(column))
        with pytest.raises(OverflowError):
            a.writev(conn, *spoilt(np.negative(columns[at])))
        for number in (-1, 1 << 64):
            with pytest.raises(OverflowError):
                a.writev(conn, *spoilt([*columns[at][1:].tolist(), number]))
        for column in (5, 5.0):
            with pytest.raises(TypeError, match=f"writev.*'{name}'"):
                a.writev(conn, *spoilt(column))
        with pytest.raises(TypeError, match=f"writev.*'{name}'"):
            a.writev(conn, *spoilt(["1"] * n))
        assert not self.dst.any()

    def test_packed_metas_of_another_length(self) -> None:
        a, conn, n = self.two.a, self.two.conn_a, len(CUTS)
        columns = self.arrays(self.src_ptr, CUTS, self.mr_src)["uint64"]
        meta = self.meta()
        for length in (0, 64, 64 * n - 1, 64 * n + 1, 64 * (n + 1)):
            metas = (meta * (n + 1))[:length]
            with pytest.raises(RuntimeError, match=f"{n} pieces of 64 bytes.* {length} bytes"):
                a.writev(conn, *columns, metas)
        assert a.writev(conn, *columns, bytes(64 * n)) is False
        assert "not an advert" in p2p.last_error()
        assert not self.dst.any()

    def test_lists_that_change_while_they_are_read(self) -> None:
        a, conn, n = self.two.a, self.two.conn_a, 4
        sizes: list[Any] = [64] * n

        class Number:
            def __index__(self) -> int:
                sizes.clear()
                return 64

        sizes[1] = Number()
        ptrs = [self.src_ptr] * n
        with pytest.raises(IndexError):
            a.writev(conn, [self.mr_src] * n, ptrs, sizes, self.meta() * n)
        assert not self.dst.any()

    def test_read_only_regions_in_vectors(self) -> None:
        b, conn, n = self.two.b, self.two.conn_b, len(CUTS)
        fixed = bytes(256)
        ok, mr = b.reg(fixed)
        assert ok
        ok, metas = self.two.a.advertisev(*self.arrays(self.src_ptr, CUTS, self.mr_src)["int64"])
        assert ok
        ids, ptrs, sizes = self.arrays(self.dst_ptr, CUTS, self.mr_dst)["uint64"]
        ids[3] = mr
        assert b.readv(conn, ids, ptrs, sizes, metas) is False
        assert "read-only" in p2p.last_error()
        assert b.advertisev(ids, ptrs, sizes) == (False, [])
        assert "read-only" in p2p.last_error()
        with pytest.raises(TypeError, match="read-only"):
            b.readv(conn, ids, [fixed] * n, sizes, metas)

    def test_two_sided_forms(self) -> None:
        a, b = self.two.a, self.two.b
        send = {"conn_id": self.two.conn_a, "mr_id": self.mr_src, "ptr": self.src_ptr, "size": 256}
        recv = {"conn_id": self.two.conn_b, "mr_id": self.mr_dst, "ptr": self.dst_ptr, "size": 256}
        sends = [tuple(send.values()), (self.two.conn_a, self.mr_src, self.src)]
        recvs = [tuple(recv.values()), (self.two.conn_b, self.mr_dst, self.dst)]
        for s, r in zip(sends, recvs):
            posted = b.recv_async(*r)
            assert a.send(*s) is True, p2p.last_error()
            assert ended(b, posted) == (True, True) and self.arrived()
            posted = a.send_async(*s)
            assert b.recv(*r) is True, p2p.last_error()
            assert ended(a, posted) == (True, True) and self.arrived()
        posted = b.recv_async(**recv)
        assert a.send(**send) is True
        assert ended(b, posted) == (True, True) and self.arrived()

    def test_two_sided_vector_forms(self) -> None:
        a, b = self.two.a, self.two.b
        cuts = [100, 156]
        s = ([self.mr_src] * 2, [self.src_ptr, self.src_ptr + 100], cuts)
        r = ([self.mr_dst] * 2, [self.dst_ptr, self.dst_ptr + 100], cuts)
        today, seed = ("mr_id_v", "data_ptr_v", "size_v"), ("mr_id_list", "ptr_list", "size_list")
        for names in (today, seed):
            received: dict[str, Any] = dict(zip(names, r))
            sent: dict[str, Any] = dict(zip(names, s))
            posted = b.recvv_async(self.two.conn_b, **received, num_iovs=2)
            assert a.sendv(self.two.conn_a, **sent, num_iovs=2) is True
            assert ended(b, posted) == (True, True) and self.arrived()
        posted = a.sendv_async(self.two.conn_a, *s, 2)
        assert b.recvv(self.two.conn_b, *r, 2) is True
        assert ended(a, posted) == (True, True) and self.arrived()

    def test_descriptors(self) -> None:
        a, b = self.two.a, self.two.b
        [mine] = a.register_memory([Tensor(self.src)])
        theirs = b.register_memory([self.dst, Tensor(self.dst)])
        assert (mine.addr, mine.size) == (self.src_ptr, 256)
        assert len(mine.lkeys) == len(mine.rkeys) == 4
        blob = b.get_serialized_descs(theirs)
        assert type(blob) is bytes
        remote = a.deserialize_descs(blob)
        assert [(d.addr, d.size, d.rkeys) for d in remote] == [
            (d.addr, d.size, d.rkeys) for d in theirs
        ]
        assert a.get_serialized_descs(remote) == blob
        assert ended(a, a.transfer(self.two.conn_a, "write", [mine], remote[:1])) == (True, True)
        assert self.arrived()
        assert ended(
            b,
            b.transfer(
                conn_id=self.two.conn_b,
                op_name="read",
                local_desc_list=theirs[1:],
                remote_desc_list=b.deserialize_descs(a.get_serialized_descs([mine])),
            ),
        ) == (True, True)
        assert self.arrived()
        # Transfers of parts of the described memory.
        mine.size = 10
        remote[0].addr, remote[0].size = remote[0].addr + 100, 10
        ok, transfer = a.transfer(self.two.conn_a, "WRITE", [mine, mine], [remote[0], remote[1]])
        assert ok and a.wait(transfer, 10) == (True, True), p2p.last_error()
        assert self.dst[100:110].tolist() == self.dst[:10].tolist() == list(range(10))
        b.deregister_memory(theirs)
        assert ended(a, a.transfer(self.two.conn_a, "write", [mine], remote[1:])) == (False, True)

    def test_a_handle_tells_whether_its_transfer_has_ended(self) -> None:
        a, b, conn = self.two.a, self.two.b, self.two.conn_a
        [mine], theirs = a.register_memory([self.src]), b.register_memory([self.dst])
        remote = a.deserialize_descs(b.get_serialized_descs(theirs))
        handle = a.transfer(conn, "WRITE", [mine], remote)
        while not a.check_xfer_state(handle):
            time.sleep(0.001)
        assert self.arrived()
        assert a.check_xfer_state(handle[1])
        assert a.check_xfer_state(p2p.XferHandle(conn, "WRITE", handle[1]))
        b.deregister_memory(theirs)
        refused = a.transfer(conn, "WRITE", [mine], remote)
        assert ended(a, refused) == (False, True)
        with pytest.raises(RuntimeError, match="refused"):
            a.check_xfer_state(refused)
        with pytest.raises(TypeError):
            a.check_xfer_state("1")  # type: ignore[arg-type]

    def test_tensors_within_one_another_share_a_region(self) -> None:
        a, b = self.two.a, self.two.b
        [mine] = a.register_memory([self.src])
        before = b.stats()["regions"]
        whole, again, part, other = b.register_memory(
            [self.dst, Tensor(self.dst), self.dst[100:200], np.zeros(256, np.uint8)]
        )
        assert b.stats()["regions"] == before + 2
        keys = lambda desc: (desc.lkeys, desc.rkeys)
        assert keys(whole) == keys(again) == keys(part)
        assert len({desc.mr_id for desc in (whole, again, part, other)}) == 4
        assert (part.addr, part.size) == (self.dst_ptr + 100, 100)
        assert all(x != y for x, y in zip(keys(other), keys(whole)))
        assert all(other.lkeys) and all(whole.lkeys)
        # Memory beyond the end of a region is no part of it, and neither is read-only memory.
        [beyond, frozen] = b.register_memory([np.zeros(300, np.uint8), bytes(self.dst)])
        assert beyond.rkeys != whole.rkeys and frozen.rkeys == []
        b.deregister_memory([beyond, frozen, other])

        # The region ends with its last sharer.
        remote = b.get_serialized_descs([part])
        mine.size = 100
        write = lambda: ended(
            a, a.transfer(self.two.conn_a, "write", [mine], a.deserialize_descs(remote))
        )
        for desc in (whole, part):
            b.deregister_memory([desc])
            self.dst[:] = 0
            assert write() == (True, True) and self.dst[100:200].tolist() == list(range(100))
        b.deregister_memory([again])
        assert write() == (False, True) and b.stats()["regions"] == before
        # An additional deregistration fails, and a new region has other keys.
        b.deregister_memory([again])
        assert "unknown" in p2p.last_error()
        [anew] = b.register_memory([self.dst])
        assert anew.rkeys != whole.rkeys and anew.lkeys != whole.lkeys
        # Each registration can be ended once by its id.
        [more] = b.register_memory([self.dst])
        assert b.dereg(anew.mr_id) is True and b.dereg(anew.mr_id) is False
        assert b.stats()["regions"] == before + 1
        assert b.region_info(more.mr_id) is not None
        assert b.advertise(more.mr_id, self.dst)[0] is True
        ok, advert = a.advertise(mine.mr_id, self.src)
        assert b.write(self.two.conn_b, more.mr_id, self.dst, None, advert) is True
        assert b.dereg(more.mr_id) is True and b.stats()["regions"] == before
        assert b.dereg(more.mr_id) is False and b.region_info(more.mr_id) is None

    def test_threads_that_register_the_same_share_a_region(self) -> None:
        b = self.two.b
        before, got = b.stats()["regions"], []
        threads = [
            threading.Thread(target=lambda: got.extend(b.register_memory([self.dst] * 50)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (
            len({desc.mr_id for desc in got}) == 400
            and len({tuple(desc.rkeys) for desc in got}) == 1
        )
        assert b.stats()["regions"] == before + 1
        b.deregister_memory(got)
        assert b.stats()["regions"] == before

    def test_a_shared_region_that_is_in_use_stays(self) -> None:
        a, b = self.two.a, self.two.b
        [first] = b.register_memory([self.dst])
        ok, receive = b.recv_async(self.two.conn_b, first.mr_id, self.dst)
        assert ok, p2p.last_error()
        b.deregister_memory([first])
        assert "unfinished" in p2p.last_error()
        [second] = b.register_memory([self.dst])
        assert second.rkeys == first.rkeys and second.mr_id != first.mr_id
        assert a.send(self.two.conn_a, self.mr_src, self.src) is True
        assert b.wait(receive, 20) == (True, True)
        before = b.stats()["regions"]
        b.deregister_memory([first, second])
        assert b.stats()["regions"] == before - 1

    def test_descriptor_errors(self) -> None:
        a, conn = self.two.a, self.two.conn_a
        [mine] = a.register_memory([self.src])
        [theirs] = a.deserialize_descs(
            self.two.b.get_serialized_descs(self.two.b.register_memory([self.dst]))
        )
        with pytest.raises(RuntimeError):
            a.transfer(conn, "write", [mine], [])
        with pytest.raises(RuntimeError, match="op_name"):
            a.transfer(conn, "push", [mine], [theirs])  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="conn_id"):
            a.transfer(U64, "write", [mine], [theirs])
        with pytest.raises(RuntimeError):
            a.transfer(conn, "write", [theirs], [mine])
        with pytest.raises(TypeError):
            a.transfer(conn, "write", [{"addr": 1}], [theirs])  # type: ignore[list-item]
        theirs.rkeys = [1, 2, 3]
        assert a.transfer(conn, "write", [mine], [theirs]) == (False, 0)
        for nonsense in (1, object(), "text"):
            with pytest.raises(RuntimeError, match="index 1"):
                a.register_memory([self.src, nonsense])  # type: ignore[list-item]
        assert a.deserialize_descs(b"") == []
        for bad in (b"\1", b"\xff" * 64, struct.pack("<Q", 1 << 40) + bytes(100)):
            with pytest.raises(RuntimeError):
                a.deserialize_descs(bad)
        before = a.stats()["regions"]
        a.deregister_memory([mine])
        assert a.stats()["regions"] == before - 1

    def test_ipc(self) -> None:
        """The calls for one host, with unregistered memory."""
        a, b, ca, cb = self.two.a, self.two.b, self.two.conn_a, self.two.conn_b
        src, dst = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
        s, d = src.ctypes.data, dst.ctypes.data
        self.src, self.dst = src, dst
        regions = a.stats()["regions"], b.stats()["regions"]
        ok, info = b.advertise_ipc(cb, d, 256)
        assert ok and type(info) is bytes and len(info) == 104
        assert struct.unpack_from("<QQ", info, 64) == (0, 256)
        assert a.write_ipc(ca, s, 256, info) is True and self.arrived()
        assert a.write_ipc(conn_id=ca, ptr=src, size=None, info=info) is True and self.arrived()
        assert ended(a, a.write_ipc_async(ca, s, 256, info)) == (True, True) and self.arrived()
        ok, info = a.advertise_ipc(ca, src)
        assert ok
        assert b.read_ipc(cb, d, 256, info) is True and self.arrived()
        assert ended(b, b.read_ipc_async(cb, d, 256, info)) == (True, True) and self.arrived()
        ok, infos = b.advertisev_ipc(cb, [d, d + 100], [100, 156])
        assert ok and len(infos) == 2
        assert a.writev_ipc(ca, [s, s + 100], [100, 156], infos) is True and self.arrived()
        assert ended(a, a.writev_ipc_async(ca, [s, s + 100], [100, 156], infos)) == (True, True)
        assert self.arrived()
        ok, infos = a.advertisev_ipc(conn_id=ca, ptr_v=[s, s + 100], size_v=[100, 156])
        assert b.readv_ipc(cb, [d, d + 100], [100, 156], infos) is True and self.arrived()
        ptrs, sizes = np.array([d, d + 100]), np.array([100, 156], np.uint64)
        assert b.readv_ipc(cb, ptrs, sizes, b"".join(infos)) is True and self.arrived()
        assert b.advertisev_ipc(cb, ptrs, sizes)[0] is True
        with pytest.raises(RuntimeError, match="2 pieces of 104 bytes"):
            b.readv_ipc(cb, ptrs, sizes, b"".join(infos)[1:])
        assert ended(b, b.readv_ipc_async(cb, [d, d + 100], [100, 156], infos)) == (True, True)
        assert self.arrived()
        posted = b.recv_ipc_async(cb, d, 256)
        assert a.send_ipc(ca, s, 256) is True
        assert ended(b, posted) == (True, True) and self.arrived()
        posted = a.send_ipc_async(ca, s, 256)
        assert b.recv_ipc(cb, dst) is True
        assert ended(a, posted) == (True, True) and self.arrived()
        # Only advertised memory stays registered, until the connection ends.
        assert (a.stats()["regions"] - regions[0], b.stats()["regions"] - regions[1]) == (3, 3)
        assert a.remove_remote_endpoint(ca) and b.remove_remote_endpoint(cb) in (True, False)
        assert (a.stats()["regions"], b.stats()["regions"]) == regions

    def test_ipc_keeps_objects_until_the_transfer_has_ended(self) -> None:
        a, b, ca, cb = self.two.a, self.two.b, self.two.conn_a, self.two.conn_b
        dst = np.zeros(256, np.uint8)
        is_there = weakref.ref(dst)
        posted = b.recv_ipc_async(cb, dst)
        del dst
        gc.collect()
        assert is_there() is not None
        assert a.send_ipc(ca, self.src) is True and ended(b, posted) == (True, True)
        gc.collect()
        assert is_there() is None
        # An object with memory that may move is locked meanwhile.
        moves = bytearray(256)
        posted = b.recv_ipc_async(cb, moves)
        with pytest.raises(BufferError):
            moves.extend(b"x")
        assert b.cancel(posted[1])
        moves.extend(b"x")
        # A failed call releases its object, too.
        info = b"\0" * 104
        src = np.zeros(8, np.uint8)
        is_there = weakref.ref(src)
        assert (
            a.write_ipc_async(ca, src, 8, info) == (False, 0)
            and a.write_ipc(ca, src, 8, info) is False
        )
        del src
        gc.collect()
        assert is_there() is None

    def test_ipc_refuses_sizes_that_objects_do_not_have(self) -> None:
        a, ca = self.two.a, self.two.conn_a
        ok, info = self.two.b.advertise_ipc(self.two.conn_b, self.dst)
        assert ok
        small, regions = np.full(8, 7, np.uint8), a.stats()["regions"]
        calls: list[tuple[str, list[Any], Any]] = [
            ("read_ipc", [small, 256, info], False),
            ("write_ipc", [small, 256, info], False),
            ("read_ipc_async", [small, 256, info], (False, 0)),
            ("write_ipc_async", [bytes(8), 256, info], (False, 0)),
            ("send_ipc", [small, 256], False),
            ("recv_ipc", [memoryview(small), 256], False),
            ("send_ipc_async", [Tensor(small), 256], (False, 0)),
            ("recv_ipc_async", [bytearray(8), 256], (False, 0)),
            ("readv_ipc", [[small], [256], [info]], False),
            ("writev_ipc", [[small], np.array([256]), [info]], False),
            ("readv_ipc_async", [[small], [256], [info]], (False, 0)),
            ("writev_ipc_async", [[small], [256], [info]], (False, 0)),
            ("advertise_ipc", [small, 256], (False, b"")),
            ("advertisev_ipc", [[small], [256]], (False, [])),
        ]
        for name, args, refused in calls:
            assert getattr(a, name)(ca, *args) == refused, name
            assert "256 bytes" in p2p.last_error() and "which has 8" in p2p.last_error(), name
        assert a.stats()["regions"] == regions and small.tolist() == [7] * 8
        assert self.dst.tolist() == [0] * 256
        # A part of an object lies within the object.
        assert a.write_ipc(
            ca, self.src, 100, self.two.b.advertise_ipc(self.two.conn_b, self.dst, 100)[1]
        )

    def test_an_advert_goes_with_its_object(self) -> None:
        a, b, ca, cb = self.two.a, self.two.b, self.two.conn_a, self.two.conn_b
        before = b.stats()["regions"]
        dst = np.zeros(256, np.uint8)
        first, again = b.advertise_ipc(cb, dst), b.advertise_ipc(cb, dst)
        assert first == again and first[0] and b.stats()["regions"] == before + 1
        # A view is dropped, and its base stays alive.
        ok, part = b.advertise_ipc(cb, dst[100:110])
        assert ok and b.stats()["regions"] == before + 2
        gc.collect()
        assert a.write_ipc(ca, self.src[:10], None, part) and dst[100:110].tolist() == list(
            range(10)
        )
        assert a.write_ipc(ca, self.src, None, first[1])
        view = memoryview(dst)
        del dst
        assert a.write_ipc(ca, self.src, None, first[1]) and view[255] == 255
        del view
        gc.collect()
        assert b.stats()["regions"] == before
        for length, info in ((10, part), (256, first[1])):
            assert a.write_ipc(ca, self.src[:length], None, info) is False
            assert "no region has this key" in p2p.last_error()
        # The next object may lie at the address of the last one.
        other = np.zeros(256, np.uint8)
        ok, info = b.advertise_ipc(cb, other)
        assert (
            ok and info != first[1] and a.write_ipc(ca, self.src, None, info) and other[255] == 255
        )
        # The end of these cannot be observed: they are kept until the connection ends.
        kept, address = bytearray(256), np.zeros(256, np.uint8)
        assert all(b.advertise_ipc(cb, kept) for _ in range(3))
        with pytest.raises(BufferError):
            kept.extend(b"x")
        assert b.advertise_ipc(cb, address.ctypes.data, 256)[0]
        # An address is kept also if an object was advertised there before.
        assert b.advertise_ipc(cb, other.ctypes.data, 256)[1] == info
        del other
        assert b.stats()["regions"] == before + 3
        b.remove_remote_endpoint(cb)
        assert b.stats()["regions"] == before
        kept.extend(b"x")

    def test_an_advertised_object_may_outlive_its_endpoint(self) -> None:
        with p2p.Endpoint(port=0, bind="127.0.0.1") as c:
            ip, port, gpu = self.two.a.parse_metadata(self.two.a.get_metadata())
            ok, conn = c.connect(ip, gpu, port)
            assert ok
            closed, dropped = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
            assert c.advertise_ipc(conn, closed)[0] and c.advertise_ipc(conn, dropped)[0]
        del closed
        is_there = weakref.ref(c)
        del c
        gc.collect()
        assert is_there() is None
        del dropped

    def test_notifications(self) -> None:
        a, b = self.two.a, self.two.b
        assert b.get_notifs() == []
        assert b.wait_notifs(0.05) == [] == b.wait_notifs(timeout=0)
        assert a.send_notif(self.two.conn_a, b"one") is True
        assert ended(a, a.send_notif_async(self.two.conn_a, bytearray(b"two"))) == (True, True)
        assert a.write(self.two.conn_a, self.mr_src, self.src, None, self.meta(), notif=b"three")
        got: list[tuple[int, bytes]] = []
        while len(got) < 3:
            got += b.wait_notifs(10)
        assert got == [(self.two.conn_b, body) for body in (b"one", b"two", b"three")]
        with pytest.raises(TypeError):
            a.send_notif(self.two.conn_a, "text")  # type: ignore[arg-type]

    def test_a_wait_for_notifications_ends_with_the_connection_that_it_names(self) -> None:
        a, b, conn = self.two.a, self.two.b, self.two.conn_b
        assert b.wait_notifs(0, conn_id=conn) == []
        assert "in time" in (p2p.last_error() or "")
        assert a.send_notif(self.two.conn_a, b"the last") is True
        assert a.remove_remote_endpoint(self.two.conn_a)
        # Messages from before the loss are still taken.
        assert b.wait_notifs(60, conn_id=conn) == [(conn, b"the last")]
        assert b.wait_notifs(conn_id=conn) == []
        assert "lost" in (p2p.last_error() or "")
        assert b.wait_notifs(0, conn_id=1 << 40) == []
        assert "in time" not in (p2p.last_error() or "")

    def test_long_notifications_share_bytes_and_let_go_of_them(self) -> None:
        a, b = self.two.a, self.two.b
        payload = os.urandom(1 << 20)
        held = sys.getrefcount(payload)
        assert a.send_notif(self.two.conn_a, payload) is True
        assert b.wait_notifs(10) == [(self.two.conn_b, payload)]
        until = time.monotonic() + 10
        while sys.getrefcount(payload) > held:
            assert time.monotonic() < until, "it is held for ever"
            a.get_notifs()
        # A mutable payload is copied.
        changing = bytearray(payload)
        posted = a.send_notif_async(self.two.conn_a, changing)
        changing[:] = bytes(len(changing))
        assert ended(a, posted) == (True, True)
        assert b.wait_notifs(10) == [(self.two.conn_b, payload)]

    def test_wait_and_cancel(self) -> None:
        b = self.two.b
        ok, transfer = b.recv_async(self.two.conn_b, self.mr_dst, self.dst)
        assert ok
        assert b.poll_async(transfer) == (True, False)
        assert b.wait(transfer, timeout=0.05) == (True, False)
        assert b.wait(transfer, 0) == (True, False)
        assert b.transfer_error(transfer) is None and b.transfer_bytes(transfer) is None
        assert b.cancel(transfer) is True
        assert b.poll_async(transfer) == b.poll_async(transfer) == (False, True)
        assert "cancel" in b.transfer_error(transfer) == p2p.last_error()

    def test_a_timeout_beyond_the_clock_never_passes(self) -> None:
        a, b, never = self.two.a, self.two.b, 1e19
        ok, transfer = b.recv_async(self.two.conn_b, self.mr_dst, self.dst, timeout=never)
        assert ok
        assert a.send(self.two.conn_a, self.mr_src, self.src, timeout=never), p2p.last_error()
        assert b.wait(transfer, never) == (True, True)
        assert a.send_notif(self.two.conn_a, b"there")
        assert b.wait_notifs(never) == [(self.two.conn_b, b"there")]


class TestArguments:
    """Names and counts of arguments are checked as for any Python function."""

    def test_unknown_name(self, ep: p2p.Endpoint) -> None:
        with pytest.raises(TypeError, match=r"send\(\) got an unexpected keyword argument 'sise'"):
            ep.send(1, 2, 3, sise=4)  # type: ignore[call-arg]

    def test_twice(self, ep: p2p.Endpoint) -> None:
        with pytest.raises(TypeError, match="multiple values for argument 'ptr'"):
            ep.send(1, 2, 3, 4, src=5)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="multiple values"):
            ep.write(1, 2, ptr=3, src=3, size=4, meta=bytes(64))  # type: ignore[call-arg]

    def test_missing(self, ep: p2p.Endpoint) -> None:
        with pytest.raises(TypeError, match="missing required argument 'meta'"):
            ep.read(1, 2, 3, 4)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="remote_gpu_idx"):
            ep.connect("127.0.0.1")

    def test_too_many(self, ep: p2p.Endpoint) -> None:
        with pytest.raises(TypeError, match="at most 4"):
            ep.send(1, 2, 3, 4, 5)  # type: ignore[arg-type, misc]

    @pytest.mark.parametrize("bad", ["1", 1.0, None, [1]])
    def test_types(self, ep: p2p.Endpoint, bad: Any) -> None:
        with pytest.raises(TypeError):
            ep.send(bad, 2, 3, 4)
        with pytest.raises(TypeError):
            ep.poll_async(bad)

    def test_numbers_out_of_range(self, ep: p2p.Endpoint) -> None:
        for number in (-1, 1 << 64):
            with pytest.raises(OverflowError):
                ep.send(number, 2, 3, 4)


def raw(memory: Any) -> memoryview:
    if isinstance(memory, (Tensor, Interface)):
        memory = memory.array
    if isinstance(memory, np.ndarray):
        memory = memory.view(np.uint8).reshape(-1)
    return memoryview(memory).cast("B")


class Tensor:
    """The methods of PyTorch's tensors that the module calls."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags["C_CONTIGUOUS"]


class Interface:
    """NumPy's array interface alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__
