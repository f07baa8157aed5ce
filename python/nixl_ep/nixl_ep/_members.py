"""The ranks that one rank knows: connected, active, and those that it has met."""

from __future__ import annotations

import json
from typing import Iterable, NamedTuple


class Introduction(NamedTuple):
    """The facts that a rank tells the others of a meeting."""

    num_ranks: int
    num_experts_per_rank: int
    activates: bool
    """Whether new ranks take part at once."""
    is_new: bool
    """Whether this rank has met no other before."""
    by_host: bool
    """Whether its buffer is reached through the host's memory."""

    def encoded(self) -> bytes:
        """The bytes that the others get."""
        return json.dumps(self).encode()

    @staticmethod
    def decoded(given: bytes) -> Introduction:
        """The introduction in these bytes."""
        return Introduction(*json.loads(given))


class Members:
    """The ranks of a buffer, as this rank's host knows them. Masks that a call has set because a
    rank was late are the engine's alone."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        #: Ranks that were connected and not disconnected, besides this one.
        self.connected: frozenset[int] = frozenset()
        #: Ranks that take part, as far as calls of this rank have said, with this one.
        self.active = frozenset({rank})
        #: Ranks of the engine's group, with this one.
        self.met = frozenset({rank})
        #: Ranks that are in the engine's group after a meeting that is not carried out yet.
        self.staged: frozenset[int] = frozenset()

    @property
    def bound(self) -> int:
        """One more than the largest rank that takes part."""
        return max(self.active) + 1

    @property
    def must_meet(self) -> bool:
        """Whether ranks take part that the engine's group lacks."""
        return bool((self.staged - self.met) & self.active)

    def checked(self, ranks: Iterable[int]) -> frozenset[int]:
        """These ranks. Raises if there are none, or if the buffer has no room for one."""
        given = frozenset(ranks)
        if not given:
            raise ValueError("the list of ranks is empty")
        strangers = sorted(rank for rank in given if not 0 <= rank < self.num_ranks)
        if strangers:
            raise ValueError(
                f"no rank {strangers[0]}: update_memory_buffers made room for {self.num_ranks}"
            )
        return given

    def connect(self, ranks: frozenset[int], activate: bool) -> None:
        """Notes that ranks are connected, and perhaps take part."""
        self.connected |= ranks - {self.rank}
        if activate:
            self.active |= ranks

    def disconnect(self, ranks: frozenset[int]) -> None:
        """Notes that ranks have left."""
        self.connected -= ranks
        self.active -= ranks


def check_alike(introductions: dict[int, Introduction]) -> None:
    """Raises, on all ranks, if their buffers differ."""
    for field in ("num_ranks", "num_experts_per_rank"):
        values = {rank: getattr(one, field) for rank, one in sorted(introductions.items())}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            raise ValueError(f"{field} of update_memory_buffers differs: {listed}")
