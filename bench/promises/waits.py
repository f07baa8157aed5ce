"""The round trip of a short message, for each way in which both sides can wait for it.

Two processes send 64 bytes back and forth over TCP: as notifications, as sends, and as writes that the other side looks for in its
memory. Each side waits in one of these ways:

- call: in a blocking call, which spins for a while and then sleeps;
- poll: it asks again and again, and never sleeps;
- sleep: in a blocking call that does not spin (UCCL_P2P_SPIN_US=0), its workers neither.

With --pauses the leading side rests before some rounds, for a time drawn anew: so the lane changes
hands between callers and workers all the time. Raw TCP, spinning and blocking, is measured in the
same run. The wheel must be installed:

    python -m bench.promises.waits [--ops notif,send,write] [--pauses]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, Callable, Literal

import numpy as np

LINK: Literal["tcp"] = "tcp"
SIZE = 64
PATIENCE_S = 30
WAITS = ("call", "poll", "sleep")
#: Pauses in seconds: none, shorter than a caller's spin, about as long, and longer than any spin.
PAUSES_S = (0, 0, 20e-6, 60e-6, 200e-6, 1e-3)
#: A mode of milliseconds: a larger share than `MANY` of the round trips takes longer than
#: `LONG_US`.
LONG_US, MANY = 700, 0.01


def percentiles(took_us: np.ndarray) -> dict[str, Any]:
    edges = 2.0 ** np.arange(2, 18)
    counts, _ = np.histogram(np.clip(took_us, edges[0], edges[-1]), edges)
    named = {f"{int(edge)}": int(count) for edge, count in zip(edges, counts) if count}
    return {
        "p50_us": round(float(np.median(took_us)), 1),
        "p99_us": round(float(np.percentile(took_us, 99)), 1),
        "from_us": named,
        "long": round(float((took_us > LONG_US).mean()), 5),
    }


class Raw:
    """TCP and nothing else."""

    def __init__(self, sock: socket.socket, spins: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(not spins)
        self.sock = sock

    def send(self) -> None:
        self.sock.send(bytes(SIZE))

    def receive(self) -> None:
        until = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < until:
            try:
                if self.sock.recv(SIZE):
                    return
                break
            except BlockingIOError:
                continue
        raise RuntimeError("the other side is gone")


class Ours:
    """A connection, 64 bytes to send from and 64 to receive in."""

    def __init__(self, ep: Any, conn: int, op: str, wait: str, pipe: Connection) -> None:
        self.ep, self.conn, self.op, self.wait, self.number = ep, conn, op, wait, 0
        #: Whether this side answers: it receives a number, and then sends the same one.
        self.answers = False
        self.out, self.come = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        (_, self.out_mr), (_, self.in_mr) = (
            ep.reg(b.ctypes.data, SIZE) for b in (self.out, self.come)
        )
        _, advert = ep.advertise(self.in_mr, self.come.ctypes.data, SIZE)
        pipe.send(advert)
        self.advert = pipe.recv()

    def check(self, ok: bool) -> None:
        if not ok:
            raise RuntimeError(self.ep.last_error())

    def until(self, is_there: Callable[[], bool]) -> None:
        until = time.perf_counter() + PATIENCE_S
        while not is_there():
            if time.perf_counter() > until:
                raise RuntimeError("nothing comes")

    def send(self) -> None:
        self.number = self.number % 255 + 1
        self.out[:] = self.number
        address = self.out.ctypes.data
        if self.op == "notif":
            self.check(self.ep.send_notif(self.conn, b"x" * SIZE))
        elif self.op == "send":
            self.check(self.ep.send(self.conn, self.out_mr, address, SIZE))
        else:
            self.check(self.ep.write(self.conn, self.out_mr, address, SIZE, self.advert))

    def receive(self) -> None:
        if self.op == "notif":
            if self.wait == "poll":
                self.until(lambda: bool(self.ep.get_notifs()))
            else:
                self.until(lambda: bool(self.ep.wait_notifs(timeout=PATIENCE_S)))
        elif self.op == "send":
            address = self.come.ctypes.data
            if self.wait == "poll":
                ok, transfer = self.ep.recv_async(self.conn, self.in_mr, address, SIZE)
                self.check(ok)
                self.until(lambda: self.ended(transfer))
            else:
                self.check(self.ep.recv(self.conn, self.in_mr, address, SIZE))
        else:
            # No call receives a write: workers place the bytes.
            last = self.number % 255 + 1 if self.answers else self.number
            rest = 0 if self.wait == "poll" else 5e-6
            self.until(lambda: self.come[SIZE - 1] == last or slept(rest))

    def ended(self, transfer: int) -> bool:
        ok, done = self.ep.poll_async(transfer)
        self.check(ok)
        return bool(done)


def back_and_forth(side: Any, leads: bool, count: int, pauses: bool, seed: int) -> np.ndarray:
    rng = random.Random(seed)
    took = np.empty(count)
    for at in range(count):
        if leads and pauses and (pause := rng.choice(PAUSES_S)):
            time.sleep(pause)
        began = time.perf_counter()
        if leads:
            side.send()
            side.receive()
        else:
            side.receive()
            side.send()
        took[at] = time.perf_counter() - began
    return took[count // 10 :] * 1e6


def serve(pipe: Connection, op: str, wait: str, count: int, pauses: bool) -> None:
    """The side that answers."""
    if op == "raw":
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            side: Any = Raw(server.accept()[0], wait == "poll")
    else:
        ep = endpoint(wait)
        pipe.send(ep.get_metadata())
        ok, _, _, conn = ep.accept(timeout=PATIENCE_S)
        if not ok:
            raise RuntimeError(ep.last_error())
        side = Ours(ep, conn, op, wait, pipe)
        side.answers = True
    pipe.send("ready")
    back_and_forth(side, False, count, pauses, 2)
    pipe.recv()


def slept(seconds: float) -> bool:
    """Sleeps, and is false."""
    time.sleep(seconds)
    return False


def endpoint(wait: str) -> Any:
    if wait == "sleep":
        os.environ["UCCL_P2P_SPIN_US"] = "0"
    from uccl import p2p

    return p2p.Endpoint(transport=LINK, bind="127.0.0.1", port=0)


def lead(
    pipe: Connection, results: Connection, op: str, wait: str, count: int, pauses: bool
) -> None:
    if op == "raw":
        side: Any = Raw(socket.create_connection(("127.0.0.1", pipe.recv())), wait == "poll")
    else:
        ep = endpoint(wait)
        ip, port, gpu = ep.parse_metadata(pipe.recv())
        ok, conn = ep.connect(ip, gpu, port)
        if not ok:
            raise RuntimeError(ep.last_error())
        side = Ours(ep, conn, op, wait, pipe)
    pipe.recv()
    results.send(percentiles(back_and_forth(side, True, count, pauses, 1)))
    pipe.send("done")


def measure(op: str, waits: tuple[str, str], count: int, pauses: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results, result = context.Pipe()
    processes = [
        context.Process(target=lead, args=(here, result, op, waits[0], count, pauses), daemon=True),
        context.Process(target=serve, args=(there, op, waits[1], count, pauses), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        if not results.poll(PATIENCE_S * 2):
            raise RuntimeError(f"{op} between {waits} does not end")
        return {"op": op, "waits": "-".join(waits), "pauses": pauses, **results.recv()}
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ops", default="notif,send,write", help="operations, with commas between them"
    )
    parser.add_argument("--count", type=int, default=4000, help="round trips of each")
    parser.add_argument("--pauses", action="store_true", help="rest before some of them")
    args = parser.parse_args()
    spinning = measure("raw", ("poll", "poll"), args.count, args.pauses)
    sleeping = measure("raw", ("sleep", "sleep"), args.count, args.pauses)
    print(json.dumps(spinning), json.dumps(sleeping), sep="\n", flush=True)
    bad = []
    for op, waits in itertools.product(args.ops.split(","), itertools.product(WAITS, WAITS)):
        found = measure(op, waits, args.count, args.pauses)
        found["of_raw_spinning"] = round(found["p50_us"] / spinning["p50_us"], 2)
        found["of_raw_sleeping"] = round(found["p50_us"] / sleeping["p50_us"], 2)
        print(json.dumps(found), flush=True)
        # Where raw TCP has such round trips too, they are the machine's.
        if found["long"] > max(MANY, 2 * sleeping["long"]):
            bad.append(f"{op} {found['waits']}")
    print(json.dumps({"modes_of_milliseconds": bad}))


if __name__ == "__main__":
    main()
