"""The common part of the workers: a target process, a line of JSON each way, and the clock.

A worker is run by the Python of the benchmark's virtual environment. The initiator reads its orders as one
JSON object from stdin (`cases`, `seconds`), starts the target, and prints one JSON list of results.
"""

import ctypes
import json
import signal
import statistics
import subprocess
import sys
import threading
import time


class Target:
    """The other process: this same script, with the argument `target`."""

    def __init__(self, orders: dict):
        self._child = subprocess.Popen(
            [sys.executable, sys.argv[0], "target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
        )
        self.say(orders)

    def say(self, message: object) -> None:
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def hear(self) -> dict:
        # The peers' libraries log to stdout; an answer is a line that starts with our mark.
        for line in self._child.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("the target ended early")

    def end(self) -> None:
        self._child.stdin.close()
        try:
            self._child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def answer(message: object) -> None:
    """Prints a message that the other side reads with `hear` (or the adapter, from the end of the output)."""
    print("\n@" + json.dumps(message), flush=True)


def orders() -> dict:
    """The line that this process was given on stdin."""
    return json.loads(sys.stdin.readline())


def until_told_to_end() -> threading.Event:
    """An event that is set once stdin closes; watched by a sleeping thread, so that the caller may spin."""
    closed = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    return closed


def measure(transfer, case: dict, seconds: float, exactly: int | None = None) -> dict:
    """Calls `transfer` one at a time for about `seconds`, at least three times after one warm-up.

    With `exactly` it is called this often after the warm-up, however long that takes.

    Throughput is all bytes over all time; latency is the median of single calls.
    """
    transfer()
    clock = time.perf_counter
    took: list[float] = []
    start = now = clock()
    while len(took) < exactly if exactly else now - start < seconds or len(took) < 3:
        transfer()
        after = clock()
        took.append(after - now)
        now = after
    total_bytes = case["size"] * case["iovs"] * len(took)
    return {
        "gb_s": total_bytes / (now - start) / 1e9,
        "us": statistics.median(took) * 1e6,
        "transfers": len(took),
    }
