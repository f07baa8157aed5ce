"""Ranks that meet by a store, because no process group has all of them: some have gone, or come
later."""

from __future__ import annotations

import secrets
import time
from typing import Any

#: Seconds between two reads of the store, doubled each time. A wait of the store's own could not be
#: interrupted, and torch logs each one that ends without a key.
FIRST_NAP, LAST_NAP = 0.001, 0.05
#: A value that no rank writes to the store.
ABSENT = b"-"


class Meeting:
    """Ranks that exchange bytes over a ``torch.distributed.Store``, turn by turn.

    All of them have the same list of ranks. Each *asks* with a fresh random number, and the first
    rank answers each of them with the name of this meeting. So keys left by earlier meetings, or by
    a process that has died, are never taken for an answer.
    """

    def __init__(self, store: Any, me: int, ranks: list[int], size: int, timeout: float) -> None:
        self._store, self._me, self._ranks, self._size = store, me, ranks, size
        self._timeout = timeout
        self._prefix = f"uccl.ep/{'.'.join(map(str, ranks))}"
        self._name, self._turn = "", 0

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """The bytes of all ranks, in order of rank; None for ranks that do not meet."""
        deadline = time.monotonic() + self._timeout
        if not self._name:
            self._name = self._begin(deadline)
        self._turn += 1
        self._store.set(self._key(self._turn, self._me), mine)
        values = self._wait({rank: self._key(self._turn, rank) for rank in self._ranks}, deadline)
        everyone: list[bytes | None] = [None] * self._size
        for rank in self._ranks:
            everyone[rank] = values[rank]
        # A rank that writes in this turn has read all bytes of the turn before.
        if self._turn > 1:
            self._store.delete_key(self._key(self._turn - 1, self._me))
        return everyone

    def clear(self) -> None:
        """Removes the remaining keys, once all ranks have begun another meeting or are gone."""
        for rank in self._ranks:
            self._store.delete_key(self._key(self._turn, rank))

    def _look(self, key: str) -> bytes:
        """The value at a key, or :data:`ABSENT`, since a rank that gave up has removed its own. Of
        the store's calls only this one reads without a wait. It changes nothing, because no rank
        writes the expected value."""
        return bytes(self._store.compare_set(key, ABSENT.decode(), ABSENT.decode()))

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._prefix}/{self._name}/{turn}/{rank}"

    def _begin(self, deadline: float) -> str:
        """Agrees on the meeting's name."""
        ours = secrets.token_hex(8)
        asked = {rank: f"{self._prefix}/asked/{rank}" for rank in self._ranks}
        self._store.set(asked[self._me], ours)
        try:
            if self._me == self._ranks[0]:
                for rank, theirs in self._wait(asked, deadline).items():
                    self._store.delete_key(asked[rank])
                    self._store.set(f"{self._prefix}/named/{theirs.decode()}", ours)
            named = f"{self._prefix}/named/{ours}"
            name = self._wait({self._ranks[0]: named}, deadline, asked)[self._ranks[0]].decode()
            self._store.delete_key(named)
            return name
        except BaseException:
            self._store.delete_key(asked[self._me])
            raise

    def _wait(
        self, keys: dict[int, str], deadline: float, asked: dict[int, str] | None = None
    ) -> dict[int, bytes]:
        """The values at the ranks' keys, once all are there. A timeout names the ranks that have
        not written theirs, or have not ``asked``."""
        nap = FIRST_NAP
        while True:
            if self._store.check(list(keys.values())):
                values = {rank: self._look(key) for rank, key in keys.items()}
                if ABSENT not in values.values():
                    return values
            time.sleep(nap)
            nap = min(2 * nap, LAST_NAP)
            if time.monotonic() >= deadline:
                others = [(rank, key) for rank, key in (asked or keys).items() if rank != self._me]
                absent = [rank for rank, key in others if not self._store.check([key])] or list(
                    keys
                )
                named = ", ".join(map(str, absent))
                raise TimeoutError(
                    f"join on rank {self._me} is not over after {self._timeout} s: of ranks "
                    f"{self._ranks}, {named} {'is' if len(absent) == 1 else 'are'} missing"
                )
