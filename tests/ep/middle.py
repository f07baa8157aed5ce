"""A relay for the TCP streams between ranks of several nodes: it splits and delays data, and shuts
streams."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

#: Streams of a connection. The first carries its messages, and the connection ends with it.
STREAMS = 3
#: Layout of a card: its magic, the offset of its endpoint's port (0: none), and the ranges of its
#: node and kernel, and of its endpoint's address.
MAGIC, PORT_AT, NODE, ADDRESS = 0x55434502, 20, slice(48, 92), slice(96, 112)


class Flow:
    """One direction of a stream."""

    def __init__(
        self, source: socket.socket, target: socket.socket, draw: random.Random, left: float
    ) -> None:
        self.source, self.target, self.draw, self.left = source, target, draw, left
        self.most = draw.choice([700, 8000, 1 << 16])
        self.slowest = draw.choice([0.0, 0.0001, 0.001])
        self.held, self.due, self.is_over = b"", 0.0, False

    def read(self) -> None:
        """Reads some of the available bytes."""
        self.held = self.source.recv(self.draw.randint(1, self.most))
        self.left -= len(self.held)
        if not self.held or self.left < 0:
            self.end()
        self.due = time.monotonic() + self.draw.uniform(0, self.slowest)

    def write(self) -> None:
        """Writes as many of the held bytes as the target takes."""
        with contextlib.suppress(BlockingIOError):
            self.held = self.held[self.target.send(self.held) :]

    def end(self) -> None:
        """Shuts the stream."""
        self.is_over, self.held = True, b""
        for end in (self.source, self.target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Middle:
    """A relay between a rank's process and the peers that it connects to; one thread serves all
    streams."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.selector = selectors.DefaultSelector()
        self.flows: list[Flow] = []
        self.sockets: list[socket.socket] = []
        self.cut, self.is_closed = 0, False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def close(self) -> None:
        """Ends the thread and all streams."""
        self.is_closed = True
        self.thread.join()
        for each in self.sockets:
            each.close()
        self.selector.close()

    def before(self, target: tuple[str, int]) -> int:
        """Opens a port of this host; its streams lead to ``target``."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        with self.lock:
            self.sockets.append(listener)
            which = [self.draw.randrange(1, STREAMS), 0]
            self.selector.register(listener, selectors.EVENT_READ, (target, which))
        return listener.getsockname()[1]

    def _accept(self, listener: Any, target: tuple[str, int], which: list[int]) -> None:
        near, far = listener.accept()[0], socket.create_connection(target)
        is_cut, which[1] = which[1] == which[0], which[1] + 1
        for source, to in ((near, far), (far, near)):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = self.draw.randrange(40_000) if is_cut else float("inf")
            flow = Flow(source, to, self.draw, left)
            self.flows.append(flow)
            self.sockets.append(source)
            self.selector.register(source, selectors.EVENT_READ, flow)

    def _run(self) -> None:
        while not self.is_closed:
            # The lock keeps other threads from registering sockets while the selector waits, which
            # is short.
            with self.lock:
                ready = self.selector.select(0.001)
                for key, _ in ready:
                    if not isinstance(key.data, Flow):
                        self._accept(key.fileobj, *key.data)
                    elif not key.data.held:
                        self._step(key.data, key.data.read)
                now = time.monotonic()
                for flow in self.flows:
                    if flow.held and now >= flow.due:
                        self._step(flow, flow.write)
                for flow in [flow for flow in self.flows if flow.is_over]:
                    self.cut += flow.left < 0
                    self.flows.remove(flow)
                    self.selector.unregister(flow.source)
            time.sleep(0.0001)

    def _step(self, flow: Flow, step: Any) -> None:
        try:
            step()
        except BlockingIOError:
            pass
        except OSError:
            flow.end()


def through(middle: Middle, rank: int, cards: list[bytes]) -> list[bytes]:
    """The gathered values of all ranks. If these are cards, this rank's copies lead through the
    relay to the far ranks of higher numbers."""
    mine = cards[rank]
    if len(mine) < ADDRESS.stop or struct.unpack_from("<I", mine)[0] != MAGIC:
        return cards
    changed = list(cards)
    for peer in range(rank + 1, len(cards)):
        card = bytearray(cards[peer])
        (port,) = struct.unpack_from("<H", card, PORT_AT)
        if not port or card[NODE] == mine[NODE]:
            continue
        host = socket.inet_ntop(socket.AF_INET6, bytes(card[ADDRESS])).removeprefix("::ffff:")
        struct.pack_into("<H", card, PORT_AT, middle.before((host, port)))
        card[ADDRESS] = socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
        changed[peer] = bytes(card)
    return changed


@contextlib.contextmanager
def in_the_middle(seed: int) -> Iterator[None]:
    """Has the ranks of this process that join a group meanwhile reach far ranks through a relay."""
    from uccl.ep._ranks import Ranks

    middle, exchange = Middle(seed), Ranks.exchange

    def relayed(ranks: Ranks, mine: bytes) -> Any:
        return through(middle, ranks.rank, exchange(ranks, mine))

    try:
        with mock.patch.object(Ranks, "exchange", relayed):
            yield
    finally:
        middle.close()
