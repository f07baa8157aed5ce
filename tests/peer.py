"""Helper processes: each holds an endpoint and runs the calls of a test.

A test holds a :class:`Peer` for each process. ``peer.call("name", ...)`` runs a method of the
:class:`Side` in that process and returns its result; ``peer.begin(...)`` returns before there is a
result. Processes are identified by pid and end with the test.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GUARD = 4096
GUARD_BYTE = 0xA5
U64 = 2**64 - 1
MUCH, STEP = 1 << 28, 1 << 15
MAP_POPULATE = 0x8000
"""``mmap.MAP_POPULATE``, which Python 3.9 does not define."""


class PeerError(AssertionError):
    """An exception in a helper process, with its traceback."""


class PeerGone(AssertionError):
    """A helper process ended, or did not answer in time."""


def names_of_threads() -> Iterator[str]:
    """Names of this process's threads, without threads that end meanwhile."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            yield (task / "comm").read_text().strip()


class Peer:
    """A handle of a helper process."""

    def __init__(
        self,
        *,
        netns: str | None = None,
        env: dict[str, str] | None = None,
        script: Path = HERE / "peer.py",
    ) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", str(script), str(theirs.fileno())]
        if netns is not None:
            command = ["ip", "netns", "exec", netns, *command]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        theirs.close()
        self.pipe = Connection(ours.detach())
        self.pending = 0
        self.stands_still = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Starts a call; ``result`` waits for it."""
        assert self.pending == 0, "one call at a time"
        self.pipe.send((method, args, kwargs))
        self.pending += 1

    def result(self, within: float = 60) -> Any:
        """Waits for the call that was begun and returns its result."""
        assert self.pending == 1
        try:
            if not self.pipe.poll(within):
                # The answer stays pending, so no other test gets this process.
                raise PeerGone(f"no answer from process {self.pid} in {within} s")
            self.pending = 0
            ok, value = self.pipe.recv()
        except (EOFError, OSError) as e:
            raise PeerGone(f"process {self.pid} ended: {self.process.wait(10)}") from e
        if not ok:
            raise PeerError(value)
        return value

    def call(self, method: str, *args: Any, within: float = 60, **kwargs: Any) -> Any:
        """Runs a method of the process's Side."""
        self.begin(method, *args, **kwargs)
        return self.result(within)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Sends a signal to the process. After SIGSTOP, all threads have stopped when this
        returns."""
        self.process.send_signal(sig)
        if sig == signal.SIGSTOP:
            # Threads continue until the first of them takes the signal.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self.stands_still = sig == signal.SIGSTOP or self.stands_still and sig != signal.SIGCONT

    def reset(self) -> bool:
        """Drops the process's state, so that another test can use it. False if the process is not
        fit for that."""
        if self.pending or self.stands_still or self.process.poll() is not None:
            return False
        try:
            return self.call("reset", within=10)
        except AssertionError:
            return False

    def close(self) -> None:
        """Ends the process in any state."""
        self.pipe.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        # libfabric's `shm` leaves these files when a process is killed.
        for left in Path("/dev/shm").glob(f"{self.pid}:{os.getuid()}:*"):
            left.unlink(missing_ok=True)


class Side:
    """The methods that a helper process offers. State is kept by name."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.ep: Any = None
        self.arrays: dict[str, Any] = {}
        self.mrs: dict[str, int] = {}

    def attend(self, pipe: Connection) -> None:
        """Runs background work until the test sends a command; the base class has none."""

    def reset(self) -> bool:
        """Drops all state. Returns whether no thread remains."""
        if self.ep is not None:
            self.ep.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()
        return threading.active_count() == 1

    # The endpoint and its connections.

    def open(self, transport: str | None = None, **kwargs: Any) -> bytes:
        """Makes the endpoint; returns its metadata. A transport may name libfabric's provider after
        a colon."""
        from uccl import p2p

        if transport is not None:
            kwargs["transport"], _, provider = transport.partition(":")
            if provider:
                os.environ["UCCL_LIBFABRIC_PROVIDER"] = provider
        self.ep = p2p.Endpoint(**kwargs)
        return self.ep.get_metadata()

    def close(self) -> None:
        self.ep.close()

    def connect(self, metadata: bytes, **kwargs: Any) -> int:
        ip, port, gpu = self.ep.parse_metadata(metadata)
        ok, conn = self.ep.connect(ip, gpu, port, **kwargs)
        assert ok, self.ep.last_error()
        return conn

    def try_connect(self, metadata: bytes, **kwargs: Any) -> tuple[bool, str | None]:
        ip, port, gpu = self.ep.parse_metadata(metadata)
        ok, _ = self.ep.connect(ip, gpu, port, **kwargs)
        return ok, None if ok else self.ep.last_error()

    def accept(self, **kwargs: Any) -> int:
        ok, _ip, _gpu, conn = self.ep.accept(**kwargs)
        assert ok, self.ep.last_error()
        return conn

    def method(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        """Calls any method of the endpoint; returns its result and the last error."""
        return getattr(self.ep, name)(*args, **kwargs), self.ep.last_error()

    # Memory: arrays with guard bytes on both sides, registered without them.

    def buf(self, name: str, size: int, fill: int | None = 0, seed: int | None = None) -> int:
        """Makes and registers memory; returns its address."""
        whole = array(size + 2 * GUARD)
        whole[:GUARD] = whole[GUARD + size :] = GUARD_BYTE
        data = whole[GUARD : GUARD + size]
        put(data, seed, fill)
        self.arrays[name] = whole
        ok, mr = self.ep.reg(data.ctypes.data, size)
        assert ok, self.ep.last_error()
        self.mrs[name] = mr
        return data.ctypes.data

    def shared(self, name: str, size: int, seed: int | None = None) -> int:
        """Like buf, in memory from alloc."""
        import numpy as np

        memory = self.ep.alloc(size + 2 * GUARD)
        whole = np.frombuffer(memory, np.uint8)
        whole[:] = GUARD_BYTE
        data = whole[GUARD : GUARD + size]
        put(data, seed, 0)
        self.arrays[name] = whole
        ok, mr = self.ep.reg(memory.ptr + GUARD, size)
        assert ok, self.ep.last_error()
        self.mrs[name] = mr
        return memory.ptr + GUARD

    def data(self, name: str) -> Any:
        return self.arrays[name][GUARD:-GUARD]

    def mr(self, name: str) -> int:
        return self.mrs[name]

    def fill(self, name: str, value: int) -> None:
        self.data(name)[:] = value

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.data(name)[start:end].tobytes()

    def crc(self, name: str, start: int = 0, end: int | None = None) -> int:
        return zlib.crc32(self.data(name)[start:end])

    def guards(self, name: str) -> bool:
        """Whether the bytes around the region are unchanged."""
        whole = self.arrays[name]
        return bool((whole[:GUARD] == GUARD_BYTE).all() and (whole[-GUARD:] == GUARD_BYTE).all())

    def advert(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        data = self.data(name)
        size = len(data) - start if size is None else size
        ok, blob = self.ep.advertise(self.mrs[name], data.ctypes.data + start, size)
        assert ok, self.ep.last_error()
        return blob

    # Transfers. Each returns the endpoint's result, with the reason of a failure.

    def op(
        self,
        kind: str,
        conn: int,
        name: str,
        start: int = 0,
        size: int | None = None,
        advert: bytes | None = None,
        **kwargs: Any,
    ) -> tuple[Any, str | None]:
        """A scalar call, blocking or, with a kind such as ``write_async``, not."""
        data = self.data(name)
        size = len(data) - start if size is None else size
        args = [conn, self.mrs[name], data.ctypes.data + start, size]
        if advert is not None:
            args.append(advert)
        answer = getattr(self.ep, kind)(*args, **kwargs)
        failed = answer is False or (isinstance(answer, tuple) and not answer[0])
        return answer, self.ep.last_error() if failed else None

    def wait(
        self, transfer: int, timeout: float | None = None
    ) -> tuple[tuple[bool, bool], str | None]:
        return self.ep.wait(transfer, timeout), self.ep.transfer_error(transfer)

    def poll_to_end(
        self, transfer: int, seconds: float = 30
    ) -> tuple[tuple[bool, bool], str | None]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ok, done = self.ep.poll_async(transfer)
            if done:
                return (ok, done), self.ep.transfer_error(transfer)
            time.sleep(0.0005)
        raise TimeoutError("the transfer did not end")

    def notifs(self, count: int, seconds: float = 30) -> list[tuple[int, bytes]]:
        """Waits for ``count`` notifications."""
        got: list[tuple[int, bytes]] = []
        end = time.monotonic() + seconds
        while len(got) < count and time.monotonic() < end:
            got += self.ep.wait_notifs(0.2)
        return got

    # Code that one test alone needs.

    def exec(self, code: str, want: Sequence[str] = (), **given: Any) -> list[Any]:
        """Runs code as a program would; returns the values of the names in ``want``."""
        self.names.update(given)
        exec(compile(code, "<example>", "exec"), self.names)
        return [self.names[name] for name in want]

    def run(self, module: str, function: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of a test module, with this Side as its first argument."""
        sys.path.insert(0, str(HERE))
        return getattr(__import__(module), function)(self, *args, **kwargs)

    def begin_thread(self, key: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Runs a method of this Side in a thread; ``join`` returns its result."""

        def body() -> None:
            try:
                self.names[key] = (True, getattr(self, method)(*args, **kwargs))
            except BaseException:
                self.names[key] = (False, traceback.format_exc())

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self.names["thread " + key] = thread

    def join(self, key: str, seconds: float = 60) -> Any:
        self.names["thread " + key].join(seconds)
        ok, value = self.names.pop(key)
        if not ok:
            raise RuntimeError(value)
        return value

    def hold_interpreter(self, seconds: float) -> None:
        """Keeps all other threads from running Python code, like a long C call that does not
        release the GIL."""
        time.sleep(0.1)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def usage(self) -> dict[str, int]:
        """Open files, threads and resident memory (bytes) of this process.

        An endpoint has its first worker from the start, and starts others on demand. The others are
        not counted, unless there are more of them than endpoints.
        """
        status = Path("/proc/self/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        names = Counter(names_of_threads())
        endpoints = names["uccl-worker-0"]
        later = [
            count
            for name, count in names.items()
            if name.startswith("uccl-worker-") and name != "uccl-worker-0"
        ]
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": sum(names.values()) - sum(min(count, endpoints) for count in later),
            "rss": int(rss.split()[1]) * 1024,
        }

    def cpu(self) -> float:
        """The CPU seconds that this process has used."""
        times = os.times()
        return times.user + times.system


def array(size: int) -> Any:
    """An uninitialised array. Large memory is populated at once: populated page by page, it takes
    minutes in a user-mode guest, and may have more pieces than the host lets a process map."""
    import numpy as np

    if size < MUCH:
        return np.empty(size, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_POPULATE
    return np.frombuffer(mmap.mmap(-1, size, flags), np.uint8)


def put(data: Any, seed: int | None, fill: int | None) -> None:
    """Fills an array with the seed's pattern, or with one value."""
    if seed is None:
        data[:] = fill
        return
    # Fills in steps: the pattern's temporary arrays take twice the memory of its result.
    for start in range(0, len(data), STEP):
        step = data[start : start + STEP]
        step[:] = pattern(len(step), seed, start)


def pattern(size: int, seed: int, start: int = 0) -> Any:
    """A pattern of bytes that differs from all shifted or repeated copies of itself. It depends on
    the seed alone, and starts at a byte ``start``, a multiple of 8."""
    import numpy as np

    words = np.arange(start // 8, (start + size + 7) // 8, dtype=np.uint64)
    words += np.uint64((seed * 0x9E3779B97F4A7C15 + 1) & U64)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[:size]


def pattern_crc(size: int, seed: int, start: int = 0, end: int | None = None) -> int:
    return zlib.crc32(pattern(size, seed)[start:end])


def can_make_namespaces() -> str | None:
    """None if this process may make network namespaces, or the name of the missing part."""
    if os.geteuid() != 0:
        return "root, to make network namespaces"
    if shutil.which("ip") is None:
        return "the ip command, to make network namespaces"
    name = f"uccl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"the right to make network namespaces ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def serve(pipe: Connection, side: Side) -> None:
    """The main loop of a helper process: runs methods of its Side until the test closes the
    pipe."""
    while True:
        try:
            side.attend(pipe)
            method, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, getattr(side, method)(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


def main(side: Side) -> None:
    """Serves the test that started this process, and exits."""
    # A shell that runs the tests in the background has them and their children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # When a test dies, the pipe ends, and so do its helpers.
    serve(Connection(int(sys.argv[1])), side)
    # Threads that a test has made must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main(Side())
