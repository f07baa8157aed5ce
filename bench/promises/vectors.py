"""The cost of calls from Python: one short piece, and vectors of many, as lists and as arrays.

Two endpoints of this process, memory of `alloc`, so that the copies themselves cost next to nothing. A
call over a connection that does not exist is refused by the engine once Python's arguments have been
taken apart: its cost is the binding's alone.

    python3 -m bench.promises.vectors [--iovs 4096] [--size 64] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from uccl import p2p

ROUNDS = 5


def microseconds(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Microseconds of one call: the median and the best of a few rounds."""
    loops = 1
    while True:
        took = timed(call, loops)
        if took >= seconds / ROUNDS / 2:
            break
        loops *= 2
    rounds = sorted(timed(call, loops) / loops * 1e6 for _ in range(ROUNDS))
    return rounds[ROUNDS // 2], rounds[0]


def timed(call: Callable[[], Any], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return time.perf_counter() - start


class Calls:
    """Two connected endpoints, and everything that a vector call takes."""

    def __init__(self, stack: ExitStack, iovs: int, size: int) -> None:
        settings: dict[str, Any] = {"port": 0, "bind": "127.0.0.1"}
        here = stack.enter_context(p2p.Endpoint(**settings))
        there = stack.enter_context(p2p.Endpoint(**settings))
        ok, conn = here.add_remote_endpoint(there.get_metadata())
        assert ok, p2p.last_error()
        # Twice as long as needed: pieces that touch each other would be merged.
        stride = 2 * size
        self.source, self.target = here.alloc(iovs * stride), there.alloc(iovs * stride)
        (_, mr), (_, target_mr) = here.reg(self.source), there.reg(self.target)
        self.here, self.there, self.conn = here, there, conn
        self.mr, self.target_mr, self.iovs, self.size = mr, target_mr, iovs, size
        self.ptrs = [self.source.ptr + i * stride for i in range(iovs)]
        self.target_ptrs = [self.target.ptr + i * stride for i in range(iovs)]
        self.mrs, self.sizes = [mr] * iovs, [size] * iovs
        ok, self.metas = there.advertisev([target_mr] * iovs, self.target_ptrs, self.sizes)
        assert ok, p2p.last_error()

    def fill(self, byte: int) -> None:
        memoryview(self.source).cast("B")[:] = bytes([byte]) * self.source.size

    def arrived(self, byte: int, pieces: int) -> bool:
        stride = 2 * self.size
        target = memoryview(self.target).cast("B")
        filled = bytes([byte]) * self.size
        return all(target[i * stride :][: self.size] == filled for i in range(pieces))

    def one(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        here, conn, mr, size = self.here, self.conn, self.mr, self.size
        ptr, meta, nobody = self.ptrs[0], self.metas[0], 1 << 40
        yield "write", lambda: here.write(conn, mr, ptr, size, meta)
        yield "read", lambda: here.read(conn, mr, ptr, size, meta)
        yield "write, arguments only", lambda: here.write(nobody, mr, ptr, size, meta)

    def many(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        targets: list[Any] = [[self.target_mr] * self.iovs, self.target_ptrs, self.sizes]
        advertise: Any = self.there.advertisev
        yield "advertisev, lists", lambda: advertise(*targets)[0]
        yield from self.vector("lists", self.mrs, self.ptrs, self.sizes, self.metas)
        try:
            import numpy as np
        except ImportError:
            print("no NumPy: arrays are left out")
            return
        ids, ptrs, sizes = (np.array(v, np.uint64) for v in (self.mrs, self.ptrs, self.sizes))
        metas = np.frombuffer(b"".join(self.metas), np.uint8).reshape(-1, 64)
        columns: list[Any] = [np.array(column, np.uint64) for column in targets]
        out = np.empty((self.iovs, 64), np.uint8)
        yield "advertisev, arrays", lambda: advertise(*columns, out_buf_list=out)
        yield from self.vector("arrays", ids, ptrs, sizes, metas)

    def vector(
        self, kind: str, mrs: Any, ptrs: Any, sizes: Any, metas: Any
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        here, conn, n, nobody = self.here, self.conn, self.iovs, 1 << 40
        yield f"writev, {kind}", lambda: here.writev(conn, mrs, ptrs, sizes, metas, n)
        yield f"readv, {kind}", lambda: here.readv(conn, mrs, ptrs, sizes, metas, n)
        yield (
            f"writev, {kind}, arguments only",
            lambda: here.writev(nobody, mrs, ptrs, sizes, metas, n),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iovs", type=int, default=4096)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case")
    options = parser.parse_args()
    with ExitStack() as stack:
        calls = Calls(stack, options.iovs, options.size)
        print(f"{'':34} {'us a call':>10} {'at best':>9} {'ns an iov':>10}")
        for cases, pieces in ((calls.one(), 1), (calls.many(), options.iovs)):
            for byte, (name, call) in enumerate(cases, 1):
                calls.fill(byte)
                answer = call()
                expected = "only" not in name
                assert answer is expected, p2p.last_error()
                assert not name.startswith("write") or not expected or calls.arrived(byte, pieces)
                median, best = microseconds(call, options.seconds)
                an_iov = f"{best * 1e3 / pieces:10.1f}" if pieces > 1 else ""
                print(f"{name:34} {median:10.2f} {best:9.2f} {an_iov}")


if __name__ == "__main__":
    main()
