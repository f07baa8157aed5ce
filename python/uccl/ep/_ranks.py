"""Ranks that find each other through the caller's group, and the settings of the environment."""

from __future__ import annotations

from typing import Any

import torch

from uccl import _core

#: The device of tensors, for callers that cannot pass ``device``: "cpu", "cuda" or "cuda:1".
DEVICE = "UCCL_EP_DEVICE"
#: Tokens of each rank that normal mode's hint has room for, in each of two calls; more go in
#: rounds.
TOKENS = "UCCL_EP_TOKENS_AT_ONCE"


def timeout_of(seconds: float | None) -> float:
    """The caller's seconds, or the environment's, or a hundred."""
    if seconds is None:
        seconds = _core.ep_settings().timeout
    if seconds <= 0:
        raise ValueError(f"a timeout is more than 0 seconds, not {seconds}")
    return seconds


def node_of_environment() -> int | None:
    """The environment's node number, if there is one."""
    return _core.ep_settings().node


class Ranks:
    """A torch process group (gloo or NCCL), or an MPI communicator; or a single rank, which meets
    others by a store."""

    def __init__(
        self,
        group: Any,
        comm: Any = None,
        store: Any = None,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        self.group, self._comm, self.store = group, comm, store
        self.rank: int
        self.size: int
        if group is not None:
            self.rank, self.size = group.rank(), group.size()
        elif comm is not None:
            self.rank, self.size = comm.Get_rank(), comm.Get_size()
        elif store is None or rank is None or num_ranks is None:
            raise ValueError(
                "a buffer needs the ranks' group (or comm, an MPI communicator; or store, rank and "
                "num_ranks)"
            )
        elif not 0 <= rank < num_ranks:
            raise ValueError(f"rank is 0 to num_ranks - 1, not {rank} of {num_ranks} ranks")
        else:
            self.rank, self.size = rank, num_ranks

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """The bytes of all ranks, in order of rank. A rank that has only a store is alone until it
        is connected."""
        everyone: list[Any] = [None] * self.size
        if self.group is not None:
            torch.distributed.all_gather_object(everyone, mine, group=self.group)
        elif self._comm is not None:
            everyone = list(self._comm.allgather(mine))
        else:
            everyone[self.rank] = mine
        return everyone

    def has_peers(self) -> bool:
        """Whether there is a group or a communicator, besides a store."""
        return self.group is not None or self._comm is not None

    def is_whole(self, ranks: list[int]) -> bool:
        """Whether these are all ranks of the group or communicator."""
        return self.has_peers() and ranks == list(range(self.size))
