"""Meetings of ranks: by a store, or by a group that has all of them."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Callable, Protocol

from uccl.ep._meeting import Meeting as StoreMeeting
from uccl.ep._ranks import Ranks

from nixl_ep._members import Introduction, Members, check_alike

#: Seconds that a rank waits for the others of a meeting: they may be loading a model.
CONNECT_SECS = 300.0
#: Seconds that a new rank waits until the others let it take part.
STAGED_SECS = 3600.0
#: Seconds between two looks whether they do.
NAP = 0.02


class Way(Protocol):
    """The way in which ranks exchange bytes."""

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """The bytes of all ranks, by rank; None for ranks that do not meet."""

    def has_begun(self, ranks: frozenset[int]) -> bool:
        """Whether these ranks have written their bytes for the next exchange."""

    def clear(self) -> None:
        """Removes its traces, once all ranks have met again or are gone."""


class ByStore(StoreMeeting):
    """Ranks that meet by a store."""

    def has_begun(self, ranks: frozenset[int]) -> bool:
        """Whether these ranks have written their bytes for the next exchange."""
        return bool(self._store.check([self._key(self._turn + 1, rank) for rank in sorted(ranks)]))

    def clear(self) -> None:
        """Removes the remaining keys. A store that is gone by now has none."""
        try:
            super().clear()
        except RuntimeError:
            return


class ByGroup:
    """All ranks of a torch group, or of an MPI communicator."""

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._absent = ranks, [None] * (size - ranks.size)

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """The bytes of all ranks, by rank; None for ranks that do not meet."""
        return [*self._ranks.exchange(mine), *self._absent]

    def has_begun(self, ranks: frozenset[int]) -> bool:
        """Raises: a group's calls are all of the caller's."""
        raise ValueError(
            "connect_ranks(activate=False) needs a store: Buffer(tcp_store_group=) or "
            "set_tcp_store_group"
        )

    def clear(self) -> None:
        """Does nothing: a group keeps nothing."""


def way_of(members: Members, ranks: frozenset[int], store: Any, group: Any, comm: Any) -> Way:
    """How these ranks exchange bytes: by the store, or else by the group or the communicator."""
    listed = sorted(ranks)
    if store is not None:
        return ByStore(store, members.rank, listed, members.num_ranks, CONNECT_SECS)
    if group is None and comm is None:
        raise ValueError(
            "ranks meet by a store: Buffer(tcp_store_group=) or set_tcp_store_group, or else group= "
            "or comm= with all of them. There is no way by etcd"
        )
    whole = Ranks(group, comm)
    if listed != list(range(whole.size)) or whole.rank != members.rank:
        raise ValueError(
            f"rank {members.rank} meets ranks {listed}, and is rank {whole.rank} of a group of "
            f"{whole.size}: others than those of the group meet by a store (tcp_store_group=)"
        )
    return ByGroup(whole, members.num_ranks)


class Meeting:
    """Ranks that have introduced themselves."""

    def __init__(self, ranks: frozenset[int], way: Way, mine: Introduction) -> None:
        """Exchanges introductions. Raises, on all ranks, if their buffers differ."""
        self.ranks, self._way = ranks, way
        given = way.exchange(mine.encoded())
        introductions = {rank: Introduction.decoded(given[rank] or b"") for rank in ranks}
        check_alike(introductions)
        #: The ranks that begin a meeting which is carried out later. The others answer.
        self.beginners = frozenset(rank for rank, one in introductions.items() if not one.activates)
        #: Whether all are new, and may make their buffers again.
        self.may_go_by_host = all(one.is_new and not one.by_host for one in introductions.values())
        if self.beginners:
            # All ranks raise if this way does not do.
            way.has_begun(frozenset())

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """The bytes of all ranks, by rank; None for ranks that do not meet."""
        return self._way.exchange(mine)

    def together(self) -> None:
        """Waits until all ranks have come to this point."""
        self._way.exchange(b"here")

    def have_begun(self) -> bool:
        """Whether those that begin a staged meeting are together."""
        return self._way.has_begun(self.beginners)

    def clear(self) -> None:
        """Removes its traces."""
        self._way.clear()


class Answer:
    """A thread of a new rank, which carries a staged meeting out when the others begin it: they let
    this rank take part while it makes no calls of its own."""

    def __init__(self, meeting: Meeting, carry_out: Callable[[threading.Event], None]) -> None:
        """``carry_out`` is a method, of an object that may be dropped meanwhile."""
        self._meeting, self._carry_out = meeting, weakref.WeakMethod(carry_out)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nixl-ep-meeting", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the meeting is over. Raises its failure."""
        self._thread.join(STAGED_SECS + CONNECT_SECS)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(
                f"ranks {sorted(self._meeting.ranks)} have begun to meet, and do not end"
            )

    def end(self) -> None:
        """Gives the meeting up, unless it has begun."""
        self._stop.set()
        self._thread.join(CONNECT_SECS)

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + STAGED_SECS
            while not self._meeting.have_begun():
                if self._stop.wait(NAP) or self._carry_out() is None:
                    return
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"ranks {sorted(self._meeting.beginners)} did not let this rank take part in "
                        f"{STAGED_SECS:.0f} s: update_mask_buffer does"
                    )
            carry_out = self._carry_out()
            if carry_out is not None:
                carry_out(self._stop)
        except BaseException as failure:
            self._failure = failure
