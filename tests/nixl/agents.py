"""NIXL agents in helper processes, and handles for tests.

A test holds an :class:`Agent` for each agent, in any process. ``agent.call("name", ...)`` runs a
method of :class:`AgentSide` for it, ``agent.nixl("name", ...)`` a method of the ``nixl_agent``
itself. ``begin`` and ``result`` split the former into two steps, like those of :class:`peer.Peer`,
and ``kill`` ends the agent's process.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Union

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from peer import GUARD, GUARD_BYTE, Peer, Side, main, pattern

#: The backend under test. UCX runs the same tests, which shows that they rely only on promises of
#: NIXL.
BACKEND = os.environ.get("UCCL_TEST_NIXL_BACKEND", "UCCL")
LINKS = ["local", "tcp"]
#: Variables that make a backend take a link.
LINK_ENV = {
    ("UCX", "local"): {"UCX_TLS": "tcp,posix,cma"},
    ("UCX", "tcp"): {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    ("UCCL", "local"): {"UCCL_P2P_TRANSPORT": "auto"},
    ("UCCL", "tcp"): {"UCCL_P2P_TRANSPORT": "tcp"},
}

#: Address, length and device of one piece of memory, as NIXL takes them.
Desc = tuple[int, int, int]


def release() -> tuple[int, ...]:
    """NIXL's version; empty if it is not installed."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("nixl").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


def gpus() -> int:
    """The number of GPUs that PyTorch sees; 0 without PyTorch."""
    try:
        import torch
    except ImportError:
        return 0
    cuda = getattr(torch, "cuda", None)
    return cuda.device_count() if cuda is not None and cuda.is_available() else 0


def environment(backend: str, link: str, plugin_dir: str | None) -> dict[str, str]:
    """Environment variables for a process with agents of this backend and this link."""
    env = {"NIXL_LOG_LEVEL": "ERROR", "UCX_WARN_UNUSED_ENV_VARS": "n", **LINK_ENV[backend, link]}
    if plugin_dir is not None:
        env["NIXL_PLUGIN_DIR"] = plugin_dir
    if release() < (1, 1) and importlib.util.find_spec("torch") is None:
        env["PYTHONPATH"] = str(HERE / "without_torch")
    return env


def start(backend: str, link: str, plugin_dir: str | None, **env: str) -> Peer:
    """Starts a helper process for agents."""
    settings = {**environment(backend, link, plugin_dir), **env}
    return Peer(env=settings, script=HERE / "agents.py")


class Agent:
    """A handle of an agent in a helper process; it is usable once ``opened`` has returned."""

    def __init__(
        self,
        peer: Peer,
        name: str,
        backend: str = BACKEND,
        *,
        progress_thread: bool = True,
        **params: str,
    ) -> None:
        self.peer, self.name, self.backend = peer, name, backend
        self._made = 0
        peer.begin("open", name, backend, progress_thread, params)

    def opened(self) -> Agent:
        """Waits until the agent is usable: several agents may open at a time, each in its
        process."""
        self.peer.result()
        return self

    def call(self, method: str, *args: Any, within: float = 60, **kwargs: Any) -> Any:
        """Runs a method of the process's AgentSide for this agent."""
        return self.peer.call(method, self.name, *args, within=within, **kwargs)

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Starts a call; ``result`` waits for it."""
        self.peer.begin(method, self.name, *args, **kwargs)

    def result(self, within: float = 60) -> Any:
        return self.peer.result(within)

    def nixl(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the ``nixl_agent``; arguments and answer must be plain values."""
        return self.call("nixl", method, *args, **kwargs)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Sends a signal to the agent's process."""
        self.peer.kill(sig)

    def buf(self, size: int, *, seed: int | None = None, fill: int = 0) -> Buffer:
        """Registers host memory with guard bytes around it: the pattern of a seed, or one repeated
        byte."""
        self._made += 1
        name = f"{self.name} {self._made}"
        return Buffer(self, name, self.call("buf", name, size, fill, seed), size)

    def meet(self, other: Agent) -> str:
        """Loads the other agent's present metadata, without later registrations; returns its
        name."""
        return self.nixl("add_remote_agent", other.nixl("get_agent_metadata"))

    def transfer(
        self,
        op: str,
        local: Memory,
        remote: Buffer | Pieces,
        *,
        notif: bytes = b"",
        seconds: float = 30,
    ) -> str:
        """Runs one transfer to its end: DONE, ERR, or PROC if it has not ended after
        ``seconds``."""
        key = self.prepare(op, local, remote, notif=notif)
        try:
            return self.run(key, seconds=seconds)
        finally:
            self.call("release", key)

    def write(self, local: Memory, remote: Buffer | Pieces, **options: Any) -> str:
        return self.transfer("WRITE", local, remote, **options)

    def read(self, local: Memory, remote: Buffer | Pieces, **options: Any) -> str:
        return self.transfer("READ", local, remote, **options)

    def prepare(
        self, op: str, local: Memory, remote: Buffer | Pieces, *, notif: bytes = b""
    ) -> int:
        """Makes a transfer without starting it; returns a number for it."""
        owner = remote.owner.name
        return self.call("prepare", op, local.descs, remote.descs, owner, notif)

    def prepare_prepped(
        self, op: str, local: Memory, remote: Buffer | Pieces, *, notif: bytes = b""
    ) -> int:
        """Like ``prepare``, with prepared descriptor lists."""
        owner = remote.owner.name
        return self.call("prepare_prepped", op, local.descs, remote.descs, owner, notif)

    def post(self, key: int) -> str:
        """Starts a transfer; returns NIXL's first state."""
        return self.call("post", key)

    def state(self, key: int) -> str:
        return self.call("state", key)

    def finish(self, key: int, *, seconds: float = 30) -> str:
        """Waits for a transfer that was started."""
        return self.call("finish", key, seconds, within=seconds + 30)

    def run(self, key: int, *, seconds: float = 30) -> str:
        """Starts a transfer and waits for it."""
        return self.call("run_transfer", key, seconds, within=seconds + 30)

    def release(self, key: int) -> None:
        self.call("release", key)

    def notify(self, other: Agent, message: bytes) -> None:
        """Sends a notification that belongs to no transfer."""
        self.nixl("send_notif", other.name, message)

    def notifs(self, count: int = 1, *, seconds: float = 30) -> dict[str, list[bytes]]:
        """Waits for ``count`` notifications. Returns those that have come, by sender, in order."""
        return self.call("notifs", count, seconds, within=seconds + 30)


@dataclass
class Buffer:
    """Registered memory of an agent."""

    owner: Agent
    name: str
    address: int
    size: int

    @property
    def descs(self) -> list[Desc]:
        return [(self.address, self.size, 0)]

    def piece(self, start: int, size: int) -> Pieces:
        return Pieces(self.owner, [(self.address + start, size, 0)])

    def pieces(self, count: int, size: int, *, stride: int | None = None) -> Pieces:
        """``count`` pieces of a size, with 64 bytes between them unless a stride is given."""
        stride = size + 64 if stride is None else stride
        assert (count - 1) * stride + size <= self.size, "the buffer is too short"
        return Pieces(self.owner, [(self.address + i * stride, size, 0) for i in range(count)])

    def get(self, start: int = 0, end: int | None = None) -> bytes:
        return self.owner.peer.call("get", self.name, start, end)

    def fill(self, byte: int) -> None:
        self.owner.peer.call("fill", self.name, byte)

    def guarded(self) -> bool:
        """Whether the bytes around the buffer are unchanged."""
        return self.owner.peer.call("guards", self.name)

    def deregister(self) -> None:
        self.owner.call("deregister", self.name)


@dataclass
class Pieces:
    """Parts of an agent's memory, in the order of the transfer."""

    owner: Agent
    descs: list[Desc]


Memory = Union[Buffer, Pieces]


class Pair:
    """Two agents, in two processes or in one: ``a`` starts transfers, ``b`` owns the remote
    memory."""

    def __init__(self, a: Agent, b: Agent) -> None:
        self.a, self.b = a, b

    def bufs(
        self, size: int, *, seed_a: int | None = None, seed_b: int | None = None
    ) -> tuple[Buffer, Buffer]:
        """Registers memory of a size on both sides and exchanges metadata."""
        mine, theirs = self.a.buf(size, seed=seed_a), self.b.buf(size, seed=seed_b)
        self.meet()
        return mine, theirs

    def meet(self) -> None:
        """Each agent loads the other's present metadata."""
        self.a.meet(self.b)
        self.b.meet(self.a)


class AgentSide(Side):
    """The methods that a helper process offers. Most are for one of its agents, the first
    argument."""

    def __init__(self) -> None:
        super().__init__()
        self.agents: dict[str, Any] = {}
        self.transfers: dict[int, Any] = {}
        self.lists: dict[int, list[Any]] = {}
        self.registered: dict[str, Any] = {}
        self.begun = 0
        #: Agents without a progress thread: they progress only in calls.
        self.passive: list[Any] = []

    def attend(self, pipe: Connection) -> None:
        while self.passive and not pipe.poll(0.0002):
            self.progress()

    def progress(self) -> None:
        """Lets all agents without a progress thread progress."""
        for agent in self.passive:
            agent.update_notifs()

    # Agents.

    def open(self, name: str, backend: str, progress_thread: bool, params: dict[str, str]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=[]))
        agent.create_backend(backend, params)
        self.agents[name] = agent
        if not progress_thread:
            self.passive.append(agent)

    def close_agent(self, name: str) -> None:
        """Drops an agent, its transfers and its memory."""
        agent = self.agents.pop(name)
        self.passive = [other for other in self.passive if other is not agent]
        for key in [key for key, (owner, _) in self.transfers.items() if owner is agent]:
            self.release(name, key)
        self.registered = {
            b: found for b, found in self.registered.items() if found[0] is not agent
        }
        del agent
        gc.collect()

    def backends(self, name: str) -> list[str]:
        """The backends of the agent."""
        return list(self.agents[name].backends)

    def nixl(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.agents[name], method)(*args, **kwargs)

    # Memory; ``get``, ``fill`` and ``guards`` are inherited from Side.

    def buf(self, name: str, buffer: str, size: int, fill: int = 0, seed: int | None = None) -> int:
        """Makes and registers memory; returns its address."""
        import numpy as np

        whole = np.full(size + 2 * GUARD, GUARD_BYTE, np.uint8)
        data = whole[GUARD : GUARD + size]
        data[:] = fill if seed is None else pattern(size, seed)
        self.arrays[buffer] = whole
        agent = self.agents[name]
        descs = agent.register_memory([(data.ctypes.data, size, 0, "")], "DRAM")
        self.registered[buffer] = (agent, descs)
        return data.ctypes.data

    def register_again(self, name: str, buffer: str, size: int, times: int = 1) -> str:
        """Registers the first bytes of present or earlier memory, ``times`` times in one call.
        Returns a name for ``deregister``."""
        agent, again = self.agents[name], f"{buffer}, again {size}"
        address = self.arrays[buffer].ctypes.data + GUARD
        descs = [(address, size, 0, "")] * times
        self.registered[again] = (agent, agent.register_memory(descs, "DRAM"))
        return again

    def forget(self, name: str, other: str) -> None:
        """Removes another agent and its memory's metadata."""
        self.agents[name].remove_remote_agent(other)

    def deregister(self, name: str, buffer: str) -> None:
        agent, descs = self.registered.pop(buffer)
        agent.deregister_memory(descs)

    # Transfers, by number.

    def prepare(
        self, name: str, op: str, local: list[Desc], remote: list[Desc], owner: str, notif: bytes
    ) -> int:
        agent = self.agents[name]
        mine, theirs = (agent.get_xfer_descs(descs, "DRAM") for descs in (local, remote))
        return self._keep(agent, agent.initialize_xfer(op, mine, theirs, owner, notif))

    def prepare_prepped(
        self, name: str, op: str, local: list[Desc], remote: list[Desc], owner: str, notif: bytes
    ) -> int:
        agent = self.agents[name]
        lists = [agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")]
        lists.append(agent.prep_xfer_dlist(owner, remote, "DRAM"))
        every = list(range(len(local)))
        handle = agent.make_prepped_xfer(op, lists[0], every, lists[1], every, notif)
        key = self._keep(agent, handle)
        self.lists[key] = lists
        return key

    def _keep(self, agent: Any, handle: Any) -> int:
        self.begun += 1
        self.transfers[self.begun] = (agent, handle)
        return self.begun

    def post(self, name: str, key: int, message: bytes = b"") -> str:
        agent, handle = self.transfers[key]
        return agent.transfer(handle, message)

    def state(self, name: str, key: int) -> str:
        agent, handle = self.transfers[key]
        return agent.check_xfer_state(handle)

    def finish(self, name: str, key: int, seconds: float) -> str:
        end = time.monotonic() + seconds
        while (state := self.state(name, key)) == "PROC" and time.monotonic() < end:
            self.progress()
        return state

    def run_transfer(self, name: str, key: int, seconds: float, message: bytes = b"") -> str:
        state = self.post(name, key, message)
        return self.finish(name, key, seconds) if state == "PROC" else state

    def release(self, name: str, key: int) -> None:
        agent, handle = self.transfers.pop(key)
        agent.release_xfer_handle(handle)
        for prepared in self.lists.pop(key, ()):
            agent.release_dlist_handle(prepared)

    def write_from_threads(
        self, name: str, here: int, there: int, owner: str, count: int, size: int
    ) -> list[str]:
        """``count`` threads write one part each, at the same time. Returns their states."""

        def write(i: int) -> str:
            mine, theirs = ([(base + i * size, size, 0)] for base in (here, there))
            key = self.prepare(name, "WRITE", mine, theirs, owner, b"")
            return self.run_transfer(name, key, 30)

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(write, range(count)))

    def refuse(
        self, name: str, local: list[Desc], remote: list[Desc], owner: str, count: int
    ) -> int:
        """Prepares an invalid transfer ``count`` times; returns the number of refusals."""
        refused = 0
        for _ in range(count):
            try:
                self.prepare(name, "WRITE", local, remote, owner, b"")
            except Exception:
                refused += 1
        return refused

    def estimate(self, name: str, key: int) -> tuple[int, int]:
        """NIXL's estimate of a transfer's duration and of its error, in microseconds."""
        agent, handle = self.transfers[key]
        duration, error, _ = agent.estimate_xfer_cost(handle)
        return duration, error

    def telemetry(self, name: str, key: int) -> tuple[int, int]:
        """Bytes and descriptors of a transfer that has ended."""
        agent, handle = self.transfers[key]
        seen = agent.get_xfer_telemetry(handle)
        return seen.totalBytes, seen.descCount

    # Notifications.

    def notifs(self, name: str, count: int, seconds: float) -> dict[str, list[bytes]]:
        agent = self.agents[name]
        end = time.monotonic() + seconds
        while True:
            self.progress()
            got = {sender: list(notes) for sender, notes in agent.update_notifs().items() if notes}
            if sum(map(len, got.values())) >= count or time.monotonic() > end:
                agent.notifs = {}
                return got
            time.sleep(0.0002)


if __name__ == "__main__":
    # The process ends without unloading NIXL: libraries in its wheel crash at their unload.
    main(AgentSide())
