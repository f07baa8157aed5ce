"""Transfers of GPU memory: between GPUs, and between GPUs and the host, in two processes and in
one.

Every destination is poisoned before, and compared byte by byte, with its surroundings.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from conftest import Pair, lacking
from peer import pattern, pattern_crc
from test_faults import ROUNDS, no_growth, settled

# Only one test at a time uses the GPUs and their memory.
pytestmark = pytest.mark.xdist_group("gpu")

GUARD = 64
POISON = 0xA5
KIB, MIB = 1 << 10, 1 << 20
Connect = Callable[..., Pair]


def gpus() -> tuple[int, str]:
    """The number of GPUs, and the reason if none is usable."""
    try:
        import torch
    except ImportError:
        return 0, "lacks torch"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, f"lacks GPUs: torch sees {count}"


COUNT, WHY_NOT = gpus()
one_gpu = pytest.mark.skipif(COUNT < 1, reason=WHY_NOT)
two_gpus = pytest.mark.skipif(COUNT < 2, reason=WHY_NOT)
SECOND = "cuda:1" if COUNT > 1 else "cuda:0"
# A stream that waits holds up this process's own work in the same hardware queue. So with few of
# these, the work comes before the wait.
FEW_QUEUES = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 8

# Pairs of memory: the initiator's, and the owner's.
ROUTES = [
    ("cuda:0", SECOND),
    ("cuda:0", "cuda:0"),
    ("cuda:0", "alloc"),
    ("cuda:0", "pinned"),
    ("cuda:0", "pageable"),
    ("pinned", SECOND),
    ("pageable", SECOND),
    ("alloc", SECOND),
]
# The ways of bytes: straight between the GPUs, or through host memory on both sides, over streams
# or over devices that take no GPU memory.
LINKS: dict[str, dict[str, Any]] = {
    "ipc": {"transport": "local"},
    "rings": {"transport": "local", "ipc": False},
    "tcp": {"transport": "tcp"},
    "tcp-checked": {"transport": "tcp", "checksum": True, "tcp_streams": 3},
    "rails": {"transport": "libfabric:tcp;ofi_rxm"},
}
SIZES = [1, 3, 4 * KIB, 65_537, MIB, 16 * MIB + 5]


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> dict[str, Any]:
    if lack := lacking(LINKS[request.param]["transport"]):
        pytest.skip(f"lacks {lack}")
    return LINKS[request.param]


@one_gpu
class TestTwoProcesses:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", ["write", "read"])
    @pytest.mark.parametrize("route", ROUTES, ids="-".join)
    def test_one_sided(
        self, connect: Connect, link: dict[str, Any], route: tuple[str, str], kind: str, size: int
    ) -> None:
        pair = connect(**link)
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        wheres = dict(zip((pair.a, pair.b), route))
        run(source, "tensor", "m", size, wheres[source], seed=size)
        run(target, "tensor", "m", size, wheres[target])
        advert = run(pair.b, "advert", "m")
        for offset in (0, 1):
            answer = run(pair.a, "move", kind, pair.conn_a, "m", advert, offset, size - offset)
            assert answer == (True, None)
            assert run(target, "crc", "m", offset) == pattern_crc(size, size, offset), offset
            assert run(target, "surroundings", "m")

    @pytest.mark.parametrize("size", [1, 100, 40 * KIB, 5 * MIB + 3])
    @pytest.mark.parametrize(
        "route",
        [
            ("cuda:0", SECOND),
            ("pageable", SECOND),
            ("pinned", SECOND),
            ("cuda:0", "alloc"),
            ("cuda:0", "pinned"),
        ],
        ids="-".join,
    )
    def test_send(
        self, connect: Connect, link: dict[str, Any], route: tuple[str, str], size: int
    ) -> None:
        pair = connect(**link)
        run(pair.a, "tensor", "m", size, route[0], seed=7)
        run(pair.b, "tensor", "m", size, route[1])
        pair.b.begin("run", "test_gpu", "move", "recv", pair.conn_b, "m", None, 0, size)
        assert run(pair.a, "move", "send", pair.conn_a, "m", None, 0, size) == (True, None)
        assert pair.b.result() == (True, None)
        assert run(pair.b, "crc", "m") == pattern_crc(size, 7)
        assert run(pair.b, "surroundings", "m")

    @pytest.mark.parametrize("count", [2, 100, 257, 10_000])
    @pytest.mark.parametrize("kind", ["writev", "readv"])
    @pytest.mark.parametrize("step", [1, 16])
    def test_vectors(
        self, connect: Connect, link: dict[str, Any], kind: str, count: int, step: int
    ) -> None:
        """Pieces of all lengths and alignments, each with a gap behind it."""
        pair = connect(**link)
        lens = [(i * 37 * step) % 700 + (step if i % 3 else 0) for i in range(count)]
        size = sum(lens) + count * step
        source, target = (pair.a, pair.b) if kind == "writev" else (pair.b, pair.a)
        run(source, "tensor", "m", size, "cuda:0", seed=3)
        run(target, "tensor", "m", size, SECOND)
        advert = run(pair.b, "adverts", "m", lens, step)
        answer = run(pair.a, "move_pieces", kind, pair.conn_a, "m", advert, lens, step)
        assert answer == (True, None)
        assert run(target, "crc", "m") == crc_of_pieces(size, 3, lens, step)
        assert run(target, "surroundings", "m")

    def test_notification_follows_the_data(self, connect: Connect, link: dict[str, Any]) -> None:
        pair = connect(**link)
        size = 64 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, SECOND)
        advert = run(pair.b, "advert", "m")
        transfer = run(pair.a, "post", "write", pair.conn_a, "m", advert, notif=b"there")
        assert pair.b.call("notifs", 1) == [(pair.conn_b, b"there")]
        assert run(pair.b, "crc", "m") == pattern_crc(size, 1)
        assert pair.a.call("wait", transfer, 20) == ((True, True), None)

    def test_many_regions(self, connect: Connect, link: dict[str, Any]) -> None:
        """A vector with more regions than there are hazard words."""
        pair = connect(**link)
        count, size = 300, 1000
        for i in range(count):
            run(pair.a, "tensor", f"m{i}", size, "cuda:0", seed=i)
            run(pair.b, "tensor", f"m{i}", size, SECOND)
        names = [f"m{i}" for i in range(count)]
        adverts = run(pair.b, "adverts_of", names)
        assert run(pair.a, "move_all", pair.conn_a, names, adverts) == (True, None)
        for i in range(count):
            assert run(pair.b, "crc", f"m{i}") == pattern_crc(size, i)

    def test_refusals(self, connect: Connect, link: dict[str, Any]) -> None:
        """A forged key, a range outside and a region that has ended are refused; nothing is
        written."""
        pair = connect(**link)
        run(pair.a, "tensor", "m", 4096, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", 4096, SECOND)
        advert = run(pair.b, "advert", "m")
        forged = advert[:32] + bytes([advert[32] ^ 1]) + advert[33:]
        outside = (int.from_bytes(advert[:8], "little") + 8).to_bytes(8, "little") + advert[8:]
        for wrong in (forged, outside):
            ok, why = run(pair.a, "move", "write", pair.conn_a, "m", wrong, 0, 4096)
            assert ok is False and why
        assert run(pair.b, "forget", "m")
        ok, why = run(pair.a, "move", "write", pair.conn_a, "m", advert, 0, 4096)
        assert ok is False and why
        assert run(pair.b, "crc", "m") == zlib.crc32(bytes([POISON]) * 4096)

    def test_killed_in_the_middle(self, connect: Connect, link: dict[str, Any]) -> None:
        """Copies in flight end, the next transfer fails, and the GPU still works."""
        pair = connect(**link)
        size = 256 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, SECOND)
        advert = run(pair.b, "advert", "m")
        posted = [run(pair.a, "post", "write", pair.conn_a, "m", advert) for _ in range(16)]
        pair.b.kill()
        pair.b.process.wait()
        for transfer in posted:
            (_ok, done), _why = pair.a.call("wait", transfer, 30)
            assert done
        ok, why = run(pair.a, "move", "send", pair.conn_a, "m", None, 0, 8)
        assert ok is False and why
        assert run(pair.a, "crc", "m") == pattern_crc(size, 1)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_all_kinds_in_one_vector(
        self, connect: Connect, link: dict[str, Any], kind: str
    ) -> None:
        pair = connect(**link)
        wheres = ["cuda:0", SECOND, "pinned", "pageable", "alloc"]
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        names: list[str] = []
        size = 100_003
        for ours in wheres:
            for theirs in wheres:
                # With one GPU, several pairs are alike.
                names.append(f"{len(names)}: {ours} {theirs}")
                for peer, where in ((pair.a, ours), (pair.b, theirs)):
                    seed = len(names) if peer is source else None
                    run(peer, "tensor", names[-1], size, where, seed=seed)
        adverts = run(pair.b, "adverts_of", names)
        assert run(pair.a, "move_all", pair.conn_a, names, adverts, kind + "v") == (True, None)
        for seed, name in enumerate(names, 1):
            assert run(target, "crc", name) == pattern_crc(size, seed), name
            assert run(target, "surroundings", name), name

    def test_a_transfer_follows_its_stream(self, connect: Connect, link: dict[str, Any]) -> None:
        pair = connect(**link)
        size = 3 * MIB + 5
        run(pair.a, "tensor", "m", size, "cuda:0")
        run(pair.b, "tensor", "m", size, SECOND)
        advert = run(pair.b, "advert", "m")
        assert run(pair.a, "write_behind_work", pair.conn_a, "m", advert, 77) == (True, None)
        assert run(pair.b, "is_all", "m", 77)
        assert run(pair.b, "surroundings", "m")

    @pytest.mark.parametrize("count", [1, 100])
    def test_a_stream_follows_a_transfer(
        self, connect: Connect, link: dict[str, Any], count: int
    ) -> None:
        """A stream follows a connection's first transfer too: its setup does not wait for the
        stream."""
        pair = connect(**link)
        size = 100 * 40_000
        run(pair.a, "tensor", "m", size, "cuda:0")
        run(pair.b, "tensor", "m", size, SECOND, seed=9)
        adverts = run(pair.b, "adverts", "m", [size // count] * count, 0)
        answer = run(pair.a, "work_behind_read", pair.conn_a, "m", adverts, size // count)
        assert answer == pattern_crc(size, 9)

    def test_a_transfer_that_waits_for_a_stream_can_end_early(
        self, connect: Connect, link: dict[str, Any]
    ) -> None:
        pair = connect(**link)
        run(pair.a, "tensor", "m", 4096, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", 4096, SECOND)
        advert = run(pair.b, "advert", "m")
        cancelled, expired = run(pair.a, "give_up_behind_work", pair.conn_a, "m", advert)
        assert "cancelled" in cancelled and "deadline" in expired
        assert run(pair.b, "crc", "m") == zlib.crc32(bytes([POISON]) * 4096)
        # The connection stays usable.
        assert run(pair.a, "move", "write", pair.conn_a, "m", advert, 0, 4096) == (True, None)

    def test_sends_keep_their_order(self, connect: Connect, link: dict[str, Any]) -> None:
        """A send that waits for its stream is not overtaken by one without a stream."""
        pair = connect(**link)
        for peer, where in ((pair.a, "cuda:0"), (pair.b, SECOND)):
            for i in (1, 2):
                run(peer, "tensor", f"m{i}", 1000, where, seed=i if peer is pair.a else None)
        pair.b.begin("run", "test_gpu", "receive_both", pair.conn_b)
        assert run(pair.a, "send_both", pair.conn_a) == [(True, True), (True, True)]
        assert pair.b.result() == [True, True]
        for i in (1, 2):
            assert run(pair.b, "crc", f"m{i}") == pattern_crc(1000, i)

    def test_path(self, connect: Connect) -> None:
        pair = connect(transport="local")
        run(pair.b, "tensor", "m", 4096, SECOND)
        advert = run(pair.b, "advert", "m")
        assert pair.a.call("method", "path", pair.conn_a, advert)[0] == "cuda_ipc"

    def test_path_to_locked_memory(self, connect: Connect) -> None:
        pair = connect(transport="local")
        run(pair.a, "tensor", "m", 4096, "cuda:0")
        run(pair.b, "tensor", "m", 4096, "pinned")
        advert = run(pair.b, "advert", "m")
        assert run(pair.a, "path_from", pair.conn_a, advert, "m") == ["cma", "owner"]


@one_gpu
class TestLockedMemory:
    """Pinned host memory that the owner alone maps: the owner makes the copies of a peer with GPU
    memory."""

    @pytest.mark.parametrize("size", [4 * KIB, MIB, 16 * MIB + 5])
    @pytest.mark.parametrize("kind", ["write", "read"])
    @pytest.mark.parametrize("gpu", sorted({"cuda:0", SECOND}))
    def test_the_owner_copies(
        self, connect: Connect, link: dict[str, Any], gpu: str, kind: str, size: int
    ) -> None:
        pair = connect(**link)
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        wheres = {pair.a: gpu, pair.b: "pinned"}
        run(source, "tensor", "m", size, wheres[source], seed=size)
        run(target, "tensor", "m", size, wheres[target])
        advert = run(pair.b, "advert", "m")
        for offset in (0, 1):
            answer = run(pair.a, "move", kind, pair.conn_a, "m", advert, offset, size - offset)
            assert answer == (True, None)
            assert run(target, "crc", "m", offset) == pattern_crc(size, size, offset), offset
            assert run(target, "surroundings", "m")
        asked = link == LINKS["ipc"] and size >= 64 * KIB
        assert copied_for_peers(pair) == (2 if asked else 0)

    @pytest.mark.parametrize("kind", ["writev", "readv"])
    @pytest.mark.parametrize("count", [100, 20_000])
    def test_vectors(self, connect: Connect, kind: str, count: int) -> None:
        pair = connect(transport="local")
        lens = [(i * 37) % 3000 + 1 for i in range(count)]
        size = sum(lens) + count * 5
        source, target = (pair.a, pair.b) if kind == "writev" else (pair.b, pair.a)
        wheres = {pair.a: "cuda:0", pair.b: "pinned"}
        run(source, "tensor", "m", size, wheres[source], seed=3)
        run(target, "tensor", "m", size, wheres[target])
        adverts = run(pair.b, "adverts", "m", lens, 5)
        answer = run(pair.a, "move_pieces", kind, pair.conn_a, "m", adverts, lens, 5)
        assert answer == (True, None)
        assert run(target, "crc", "m") == crc_of_pieces(size, 3, lens, 5)
        assert run(target, "surroundings", "m")
        assert copied_for_peers(pair) == -(-count // 8192)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_refusals(self, connect: Connect, kind: str) -> None:
        """The errors are those of every other path, and no byte moves."""
        pair, size = connect(transport="local"), MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, "pinned", seed=2)
        advert = run(pair.b, "advert", "m")
        forged = advert[:32] + bytes([advert[32] ^ 1]) + advert[33:]
        outside = (int.from_bytes(advert[:8], "little") + 8).to_bytes(8, "little") + advert[8:]
        for wrong, words in ((forged, "forged"), (outside, "not inside the region")):
            ok, why = run(pair.a, "move", kind, pair.conn_a, "m", wrong, 0, size)
            assert ok is False and words in why
        assert run(pair.b, "forget", "m")
        ok, why = run(pair.a, "move", kind, pair.conn_a, "m", advert, 0, size)
        assert ok is False and "deregistration" in why
        for peer, seed in ((pair.a, 1), (pair.b, 2)):
            assert run(peer, "crc", "m") == pattern_crc(size, seed)
        assert copied_for_peers(pair) == 0

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_killed_in_the_middle(self, connect: Connect, kind: str) -> None:
        pair, size = connect(transport="local"), 256 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, "pinned", seed=1)
        advert = run(pair.b, "advert", "m")
        posted = [run(pair.a, "post", kind, pair.conn_a, "m", advert) for _ in range(16)]
        pair.b.kill()
        pair.b.process.wait()
        for transfer in posted:
            (_ok, done), _why = pair.a.call("wait", transfer, 30)
            assert done
        ok, why = run(pair.a, "move", kind, pair.conn_a, "m", advert, 0, size)
        assert ok is False and why
        assert run(pair.a, "crc", "m") == pattern_crc(size, 1)
        assert run(pair.a, "forget", "m")

    def test_the_asker_is_killed_in_the_middle(self, connect: Connect) -> None:
        """The owner's GPU is unchanged, and its memory can be deregistered."""
        pair, size = connect(transport="local"), 256 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, "pinned", seed=1)
        advert = run(pair.b, "advert", "m")
        for i in range(16):
            run(pair.a, "post", ("write", "read")[i % 2], pair.conn_a, "m", advert)
        pair.a.kill()
        pair.a.process.wait()
        assert run(pair.b, "forget", "m")
        assert run(pair.b, "crc", "m") == pattern_crc(size, 1)
        run(pair.b, "tensor", "other", MIB, "cuda:0", seed=5)
        assert run(pair.b, "crc", "other") == pattern_crc(MIB, 5)

    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_nothing_lands_after_a_cancel(self, connect: Connect, kind: str) -> None:
        pair, size = connect(transport="local"), 256 * MIB
        target = pair.b if kind == "write" else pair.a
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, "pinned", seed=2)
        advert = run(pair.b, "advert", "m")
        posted = [run(pair.a, "post", kind, pair.conn_a, "m", advert) for _ in range(4)]
        for transfer in posted:
            pair.a.call("method", "cancel", transfer)
        run(target, "fill", "m", 77)
        assert run(target, "is_all", "m", 77)
        assert run(target, "surroundings", "m")
        # The connection stays usable.
        assert run(pair.a, "move", kind, pair.conn_a, "m", advert, 0, size) == (True, None)

    def test_nothing_lands_after_a_deregistration(self, connect: Connect) -> None:
        pair, size = connect(transport="local"), 256 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", size, "pinned")
        advert = run(pair.b, "advert", "m")
        posted = [run(pair.a, "post", "write", pair.conn_a, "m", advert) for _ in range(8)]
        assert run(pair.b, "forget", "m")
        run(pair.b, "fill", "m", 77)
        for transfer in posted:
            (ok, done), why = pair.a.call("wait", transfer, 30)
            assert done and (ok or "deregistration" in why)
        assert run(pair.b, "is_all", "m", 77)

    @two_gpus
    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_an_owner_that_does_not_see_the_gpu(self, spawn: Callable[..., Any], kind: str) -> None:
        """The owner declines, and the bytes take the usual path."""
        sees_second = spawn(env={"CUDA_VISIBLE_DEVICES": "1"})
        pair, size = Pair(spawn(), sees_second, bind="127.0.0.1", transport="local"), MIB
        source, target = (pair.a, pair.b) if kind == "write" else (pair.b, pair.a)
        wheres = {pair.a: "cuda:0", pair.b: "pinned"}
        run(source, "tensor", "m", size, wheres[source], seed=4)
        run(target, "tensor", "m", size, wheres[target])
        advert = run(pair.b, "advert", "m")
        for _ in range(10):
            assert run(pair.a, "move", kind, pair.conn_a, "m", advert, 0, size) == (True, None)
        assert run(target, "crc", "m") == pattern_crc(size, 4)
        assert copied_for_peers(pair) == 0


@one_gpu
class TestFaults:
    def test_freed_and_taken_again(self, connect: Connect, link: dict[str, Any]) -> None:
        """New memory at the address of freed memory is not taken for the freed memory."""
        pair = connect(**link)
        size = 32 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=4)
        old = b""
        for _ in range(3):
            run(pair.b, "tensor", "m", size, SECOND)
            advert = run(pair.b, "advert", "m")
            assert run(pair.a, "move", "write", pair.conn_a, "m", advert, 0, size) == (True, None)
            assert run(pair.b, "crc", "m") == pattern_crc(size, 4)
            assert run(pair.b, "free", "m", True)
            if old:
                ok, why = run(pair.a, "move", "write", pair.conn_a, "m", old, 0, size)
                assert ok is False and why
            old = advert

    def test_freed_while_it_is_registered(self, connect: Connect, link: dict[str, Any]) -> None:
        """This breaks the rules. The transfer ends, with any result, and both GPUs still work."""
        pair = connect(**link)
        size = 32 * MIB
        run(pair.a, "tensor", "m", size, "cuda:0", seed=4)
        run(pair.b, "tensor", "m", size, SECOND)
        run(pair.b, "tensor", "n", size, SECOND)
        gone, there = run(pair.b, "advert", "m"), run(pair.b, "advert", "n")
        assert run(pair.a, "move", "write", pair.conn_a, "m", gone, 0, size) == (True, None)
        assert run(pair.b, "free", "m", False)
        run(pair.a, "move", "write", pair.conn_a, "m", gone, 0, size)
        assert run(pair.a, "move", "write", pair.conn_a, "m", there, 0, size) == (True, None)
        assert run(pair.b, "crc", "n") == pattern_crc(size, 4)

    def test_a_gpu_that_is_not_there(self, connect: Connect) -> None:
        pair = connect(transport="local", local_gpu_idx=99)
        run(pair.a, "tensor", "m", 4096, "cuda:0", seed=1)
        run(pair.b, "tensor", "m", 4096, SECOND)
        advert = run(pair.b, "advert", "m")
        # An endpoint's index is a name; for a stream's handle it is the stream's GPU.
        assert run(pair.a, "move", "write", pair.conn_a, "m", advert, 0, 4096) == (True, None)
        why = run(pair.a, "refusal_of_stream", pair.conn_a, "m", advert)
        assert "99" in why, why

    def test_nothing_grows(self, spawn: Callable[..., Any], link: dict[str, Any]) -> None:
        settings = {"bind": "127.0.0.1", "port": 0, **link}
        a, b = spawn(), spawn()
        before: dict[str, int] = {}
        for i in range(ROUNDS + 5):
            if i == 5:
                before = settled(a, {})
                free = run(a, "free_memory")
            a.call("open", **settings)
            metadata = b.call("open", **settings)
            b.begin("accept", timeout=20)
            conn = a.call("connect", metadata)
            b.result()
            run(a, "tensor", "m", MIB, "cuda:0", seed=i)
            run(b, "tensor", "m", MIB, SECOND)
            advert = run(b, "advert", "m")
            assert run(a, "move", "write", conn, "m", advert, 0, MIB) == (True, None)
            assert run(b, "crc", "m") == pattern_crc(MIB, i)
            for side in (a, b):
                run(side, "free", "m", True)
                side.call("close")
        no_growth(before, settled(a, before))
        # Other processes may be using the GPUs: their memory is freed in time, leaked memory is
        # not.
        for _ in range(50):
            after = run(a, "free_memory")
            if all(now > then - 4 * MIB for now, then in zip(after, free)):
                break
            time.sleep(0.2)
        else:
            pytest.fail(f"GPU memory: {free} bytes free at first, {after} at last")


@one_gpu
def test_memory_that_cannot_be_opened(connect: Connect) -> None:
    """Pool memory, which the driver does not export, passes through host memory."""
    pair = connect(transport="local")
    size = 3 * MIB + 1
    run(pair.a, "pooled", "m", size, "cuda:0", seed=1)
    run(pair.b, "pooled", "m", size, SECOND)
    advert = run(pair.b, "advert", "m")
    assert run(pair.a, "move", "write", pair.conn_a, "m", advert, 0, size) == (True, None)
    assert run(pair.b, "crc", "m") == pattern_crc(size, 1)


@two_gpus
@pytest.mark.parametrize("link", ["ipc", "tcp"], indirect=True)
def test_four_gibibytes(connect: Connect, link: dict[str, Any]) -> None:
    """A transfer with a length of more than 32 bits."""
    pair = connect(**link)
    size = (4 << 30) + 4097
    for peer, where, byte in ((pair.a, "cuda:0", 1), (pair.b, SECOND, 2)):
        run(peer, "huge", "m", size, where, byte)
    adverts = run(pair.b, "adverts", "m", [2 << 30, (2 << 30) + 4097], 0)
    lens = [2 << 30, (2 << 30) + 4097]
    answer = run(pair.a, "move_pieces", "writev", pair.conn_a, "m", adverts, lens, 0)
    assert answer == (True, None)
    assert run(pair.b, "is_huge", "m", 1)


@contextlib.contextmanager
def two_endpoints(
    link: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, int]]:
    """Makes two endpoints of one process; also yields the connection of the first to the second."""
    with joined(link, monkeypatch) as (a, b, conn, _):
        yield a, b, conn


@contextlib.contextmanager
def joined(
    link: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, int, int]]:
    """Makes two endpoints of one process; also yields the number that each has for their connection."""
    from uccl import p2p

    transport, _, provider = link["transport"].partition(":")
    if provider:
        monkeypatch.setenv("UCCL_LIBFABRIC_PROVIDER", provider)
    settings: dict[str, Any] = {"port": 0, "bind": "127.0.0.1", **link, "transport": transport}
    with p2p.Endpoint(**settings) as a, p2p.Endpoint(**settings) as b:
        ip, port, gpu = a.parse_metadata(b.get_metadata())
        ok, conn = a.connect(ip, gpu, port)
        accepted, _, _, back = b.accept(timeout=10)
        assert ok and accepted
        yield a, b, conn, back


@one_gpu
@pytest.mark.parametrize("home", [SECOND, "pinned"])
def test_signals(home: str, link: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A word on a GPU, or in pinned memory, changes once, after a write's bytes have arrived, and
    streams wait for it."""
    import torch
    from uccl import p2p

    with two_endpoints(link, monkeypatch) as (a, b, conn):
        here = torch.zeros(100_000, dtype=torch.uint8, device="cuda:0")
        there = torch.zeros(100_000, dtype=torch.uint8, device=SECOND)
        at: dict[str, Any] = {"pin_memory": True} if home == "pinned" else {"device": home}
        words = torch.zeros(4, dtype=torch.int64, **at)
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize(SECOND)
        (_, mr), (_, remote), (_, of_words) = a.reg(here), b.reg(there), b.reg(words)
        advert = b.advertise(remote, there)[1]
        word = b.advertise(of_words, words[2:3])[1]
        stream = torch.cuda.Stream(SECOND)
        seen = torch.zeros(100_000, dtype=torch.uint8).pin_memory()
        value = 0
        for step in range(1, 31):
            here.fill_(step)
            torch.cuda.synchronize("cuda:0")
            change = "set" if step % 10 == 0 else "add"
            value = 1000 * step if change == "set" else value + step
            signal = (word, value if change == "set" else step, change)

            def write() -> None:
                strong = step % 3 == 0
                assert a.write(conn, mr, here, None, advert, signal=signal, strong=strong), (
                    p2p.last_error()
                )

            if FEW_QUEUES:
                write()
            # The stream copies the written bytes as soon as the word has the value.
            with torch.cuda.stream(stream):
                assert b.stream_wait_signal(stream, words[2:3], value, of_words), p2p.last_error()
                seen.copy_(there, non_blocking=True)
            if not FEW_QUEUES:
                write()
            stream.synchronize()
            assert (seen == step).all() and words.tolist() == [0, 0, value, 0], step
        forged = word[:32] + b"\0" * 8 + word[40:]
        assert not a.write(conn, mr, here, None, advert, signal=(forged, 1, "set"))
        assert words.tolist() == [0, 0, value, 0]


@one_gpu
@pytest.mark.parametrize("home", ["cuda:0", "pinned"])
def test_a_stream_that_waits_for_a_lost_peers_signal(
    home: str, link: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on; and while the peer is there, it goes on with the word."""
    import torch
    from uccl import p2p

    with joined(link, monkeypatch) as (a, b, conn, back):
        at: dict[str, Any] = {"pin_memory": True} if home == "pinned" else {"device": home}
        words = torch.zeros(4, dtype=torch.int64, **at)
        torch.cuda.synchronize("cuda:0")
        _, mr = a.reg(words)
        _, word = a.advertise(mr, words[2:3])
        stream = torch.cuda.Stream("cuda:0")
        for value in range(1, 101):
            signal = (word, value, "set")
            if FEW_QUEUES:
                assert b.writev(back, [], [], [], [], signal=signal), p2p.last_error()
            assert a.stream_wait_signal(stream, words[2:3], value, mr, conn_id=conn), (
                p2p.last_error()
            )
            if not FEW_QUEUES:
                assert b.writev(back, [], [], [], [], signal=signal), p2p.last_error()
            stream.synchronize()
            assert words[2].item() == value
        assert a.stream_wait_signal(stream, words[2:3], 200, mr, conn_id=conn), p2p.last_error()
        assert not stream.query()
        b.close()
        stream.synchronize()
        assert words[2].item() == 100
        assert not a.stream_wait_signal(stream, words[2:3], 200, mr, conn_id=conn)
        assert stream.query() and a.dereg(mr)


@one_gpu
@pytest.mark.parametrize("kind", ["write", "read"])
def test_one_process(kind: str, link: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endpoints of one process reach each other's memory directly."""
    import torch
    from uccl import p2p

    with two_endpoints(link, monkeypatch) as (a, b, conn):
        here = torch.arange(100_000, dtype=torch.uint8, device="cuda:0")
        there = torch.zeros(100_000, dtype=torch.uint8, device=SECOND)
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize(SECOND)
        (_, mr), (_, remote) = a.reg(here), b.reg(there)
        ok, advert = b.advertise(remote, there, there.numel())
        assert ok
        assert getattr(a, kind)(conn, mr, here, here.numel(), advert), p2p.last_error()
        wanted = here if kind == "write" else torch.zeros_like(here)
        assert torch.equal(there.cpu(), wanted.cpu()) and torch.equal(here.cpu(), wanted.cpu())


def run(peer: Any, function: str, *args: Any, **kwargs: Any) -> Any:
    return peer.call("run", "test_gpu", function, *args, **kwargs)


def copied_for_peers(pair: Pair) -> int:
    """The number of copies that the owner has made for peers."""
    return pair.b.call("method", "stats")[0]["copied_for_peers"]


def crc_of_pieces(size: int, seed: int, lens: list[int], gap: int) -> int:
    """The checksum of poisoned memory with pieces of the pattern."""
    import numpy as np

    wanted, source, at = np.full(size, POISON, np.uint8), pattern(size, seed), 0
    for length in lens:
        wanted[at : at + length] = source[at : at + length]
        at += length + gap
    return zlib.crc32(wanted)


# Functions of the helper processes.


def tensor(side: Any, name: str, size: int, where: str, seed: int | None = None) -> None:
    """Memory with guards around it: the pattern of a seed, or poison."""
    import numpy as np
    import torch

    content = np.full(size + 2 * GUARD, POISON, np.uint8)
    if seed is not None:
        content[GUARD : GUARD + size] = pattern(size, seed)
    if where == "alloc":
        memory = side.ep.alloc(content.size)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        whole.copy_(torch.from_numpy(content))
    elif where == "pageable":
        whole = torch.from_numpy(content)
    elif where == "pinned":
        whole = torch.from_numpy(content).pin_memory()
    else:
        whole = torch.from_numpy(content).to(where)
        torch.cuda.synchronize(where)
    side.names[name] = whole
    ok, mr = side.ep.reg(whole.data_ptr() + GUARD, size)
    assert ok, side.ep.last_error()
    side.mrs[name] = mr


def pooled(side: Any, name: str, size: int, where: str, seed: int | None = None) -> None:
    """Like ``tensor``, in memory of the GPU's default pool."""
    import ctypes

    import torch

    tensor(side, name + " template", size, where, seed)
    template = side.names[name + " template"]
    runtime = ctypes.CDLL("libcudart.so.13")
    pointer = ctypes.c_void_p()
    with torch.cuda.device(where):
        assert (
            runtime.cudaMallocAsync(ctypes.byref(pointer), ctypes.c_size_t(template.numel()), None)
            == 0
        )
        assert runtime.cudaStreamSynchronize(None) == 0
    whole = torch.as_tensor(Place(pointer.value, template.numel()), device=where)
    whole.copy_(template)
    torch.cuda.synchronize(where)
    side.names[name] = whole
    ok, side.mrs[name] = side.ep.reg(whole.data_ptr() + GUARD, size)
    assert ok, side.ep.last_error()


@one_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "program", ["prefill_decode", "trainer_to_inference", "embedding_on_demand"]
)
def test_examples(program: str) -> None:
    """The programs in examples/python check their transfers; here their tensors are on a GPU."""
    path = Path(__file__).parent.parent / "examples/python" / f"{program}.py"
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "on cuda with torch" in ran.stdout, ran.stdout


class Place:
    """GPU memory at an address, in a form that torch takes."""

    def __init__(self, address: int | None, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def huge(side: Any, name: str, size: int, where: str, byte: int) -> None:
    import torch

    side.names[name] = torch.full((size + 2 * GUARD,), byte, dtype=torch.uint8, device=where)
    torch.cuda.synchronize(where)
    ok, side.mrs[name] = side.ep.reg(side.names[name].data_ptr() + GUARD, size)
    assert ok, side.ep.last_error()


def is_huge(side: Any, name: str, byte: int) -> bool:
    memory = side.names[name]
    return bool((memory[GUARD:-GUARD] == byte).all() and (memory[:GUARD] != byte).all())


def bytes_of(side: Any, name: str) -> Any:
    return side.names[name].cpu().numpy()


def crc(side: Any, name: str, start: int = 0) -> int:
    return zlib.crc32(bytes_of(side, name)[GUARD + start : -GUARD].copy())


def surroundings(side: Any, name: str) -> bool:
    whole = bytes_of(side, name)
    return bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())


def place(side: Any, name: str) -> tuple[int, int]:
    whole = side.names[name]
    return whole.data_ptr() + GUARD, whole.numel() - 2 * GUARD


def advert(side: Any, name: str) -> bytes:
    ok, blob = side.ep.advertise(side.mrs[name], *place(side, name))
    assert ok, side.ep.last_error()
    return blob


def adverts_of(side: Any, names: list[str]) -> list[bytes]:
    return [advert(side, name) for name in names]


def path_from(side: Any, conn: int, advert: bytes, name: str) -> list[str | None]:
    return [side.ep.path(conn, advert), side.ep.path(conn, advert, mr_id=side.mrs[name])]


def free(side: Any, name: str, deregister: bool) -> bool:
    """Frees memory; torch returns it to the driver."""
    import torch

    ok = side.ep.dereg(side.mrs.pop(name)) if deregister else True
    del side.names[name]
    torch.cuda.empty_cache()
    return ok


def free_memory(side: Any) -> list[int]:
    import torch

    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]


def refusal_of_stream(side: Any, conn: int, name: str, advert: bytes) -> str:
    start, size = place(side, name)
    ok, _ = side.ep.write_async(conn, side.mrs[name], start, size, advert, stream=0)
    assert not ok
    return side.ep.last_error()


def forget(side: Any, name: str) -> bool:
    return side.ep.dereg(side.mrs[name])


def offsets(lens: list[int], gap: int) -> list[int]:
    starts, at = [], 0
    for length in lens:
        starts.append(at)
        at += length + gap
    return starts


def adverts(side: Any, name: str, lens: list[int], gap: int) -> list[bytes]:
    base, mr = place(side, name)[0], side.mrs[name]
    pointers = [base + start for start in offsets(lens, gap)]
    ok, blobs = side.ep.advertisev([mr] * len(lens), pointers, lens)
    assert ok, side.ep.last_error()
    return blobs


def move(
    side: Any, kind: str, conn: int, name: str, advert: bytes | None, start: int, size: int
) -> tuple[Any, str | None]:
    if advert and start:
        address = int.from_bytes(advert[:8], "little") + start
        advert = address.to_bytes(8, "little") + size.to_bytes(4, "little") + advert[12:]
    args = [conn, side.mrs[name], place(side, name)[0] + start, size]
    answer = getattr(side.ep, kind)(*args, *([advert] if advert else []))
    return answer, None if answer else side.ep.last_error()


def post(side: Any, kind: str, conn: int, name: str, advert: bytes, **kwargs: Any) -> int:
    start, size = place(side, name)
    asynchronous = getattr(side.ep, kind + "_async")
    ok, transfer = asynchronous(conn, side.mrs[name], start, size, advert, **kwargs)
    assert ok, side.ep.last_error()
    return transfer


def busy_stream(device: Any) -> Any:
    """A stream with about a second of work on it."""
    import torch

    stream = torch.cuda.Stream(device=device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_500_000_000)
    return stream


def write_behind_work(
    side: Any, conn: int, name: str, advert: bytes, value: int
) -> tuple[Any, str | None]:
    import torch

    memory = side.names[name]
    # The first use of a kernel waits for the GPU.
    memory[:GUARD].fill_(POISON)
    stream = busy_stream(memory.device)
    with torch.cuda.stream(stream):
        memory[GUARD:-GUARD].fill_(value)
    start, size = place(side, name)
    begun = time.monotonic()
    ok, transfer = side.ep.write_async(conn, side.mrs[name], start, size, advert, stream=stream)
    took = time.monotonic() - begun
    assert ok and not stream.query(), f"{side.ep.last_error()}, after {took:.3f} s"
    assert side.ep.poll_async(transfer) == (True, False)
    answer = side.ep.wait(transfer, 30)
    return answer == (True, True), side.ep.transfer_error(transfer)


def work_behind_read(side: Any, conn: int, name: str, adverts: list[bytes], size: int) -> int:
    import torch

    memory = side.names[name]
    base, mr, n = place(side, name)[0], side.mrs[name], len(adverts)
    before, after = busy_stream(memory.device), torch.cuda.Stream(device=memory.device)
    pointers = [base + i * size for i in range(n)]
    ok, transfer = side.ep.readv_async(
        conn, [mr] * n, pointers, [size] * n, adverts, n, stream=before
    )
    assert ok and side.ep.stream_wait(transfer, after), side.ep.last_error()
    with torch.cuda.stream(after):
        copied = memory[GUARD:-GUARD].to("cpu", non_blocking=True)
    assert not after.query(), "the stream did not wait"
    after.synchronize()
    assert side.ep.wait(transfer, 30) == (True, True), side.ep.transfer_error(transfer)
    return zlib.crc32(copied.numpy().copy())


def give_up_behind_work(side: Any, conn: int, name: str, advert: bytes) -> list[str | None]:
    start, size = place(side, name)
    stream = busy_stream(side.names[name].device)
    args = [conn, side.mrs[name], start, size, advert]
    (_, first), (_, second) = (
        side.ep.write_async(*args, stream=stream, timeout=timeout) for timeout in (20, 0.2)
    )
    assert side.ep.cancel(first)
    assert side.ep.wait(second, 10) == (False, True)
    reasons = [side.ep.transfer_error(transfer) for transfer in (first, second)]
    stream.synchronize()
    return reasons


def send_both(side: Any, conn: int) -> list[tuple[bool, bool]]:
    stream = busy_stream(side.names["m1"].device)
    transfers = []
    for name, extra in (("m1", {"stream": stream}), ("m2", {})):
        ok, transfer = side.ep.send_async(conn, side.mrs[name], *place(side, name), **extra)
        assert ok, side.ep.last_error()
        transfers.append(transfer)
    return [side.ep.wait(transfer, 30) for transfer in transfers]


def receive_both(side: Any, conn: int) -> list[bool]:
    return [side.ep.recv(conn, side.mrs[name], *place(side, name)) for name in ("m1", "m2")]


def fill(side: Any, name: str, value: int) -> None:
    import torch

    memory = side.names[name]
    memory[GUARD:-GUARD].fill_(value)
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def is_all(side: Any, name: str, value: int) -> bool:
    return bool((bytes_of(side, name)[GUARD:-GUARD] == value).all())


def move_pieces(
    side: Any, kind: str, conn: int, name: str, adverts: list[bytes], lens: list[int], gap: int
) -> tuple[Any, str | None]:
    base, mr, n = place(side, name)[0], side.mrs[name], len(lens)
    pointers = [base + start for start in offsets(lens, gap)]
    answer = getattr(side.ep, kind)(conn, [mr] * n, pointers, lens, adverts, n)
    return answer, None if answer else side.ep.last_error()


def move_all(
    side: Any, conn: int, names: list[str], adverts: list[bytes], kind: str = "writev"
) -> tuple[Any, str | None]:
    places = [place(side, name) for name in names]
    pointers, sizes = [start for start, _ in places], [size for _, size in places]
    mrs = [side.mrs[name] for name in names]
    answer = getattr(side.ep, kind)(conn, mrs, pointers, sizes, adverts, len(names))
    return answer, None if answer else side.ep.last_error()
