"""The buffer below: :class:`uccl.ep.Buffer` of ranks that meet when the caller says."""

from __future__ import annotations

from typing import Any, Callable

import torch
from uccl import _core, ep

#: A function by which ranks exchange bytes: it returns those of all ranks, by rank.
Exchange = Callable[[bytes], "list[bytes | None]"]


class Engine(ep.Buffer):
    """One rank's end of a group of up to ``num_ranks``, alone until it meets others."""

    def __init__(
        self, rank: int, num_ranks: int, sizes: tuple[int, int], mode: dict[str, Any]
    ) -> None:
        """``sizes`` are bytes for normal mode and for both modes; ``mode`` are further arguments of
        :class:`uccl.ep.Buffer`."""
        super().__init__(
            None,
            *sizes,
            # Ranks meet by an exchange of the caller's. Nothing is read from this store.
            store=torch.distributed.HashStore(),
            rank=rank,
            num_ranks=num_ranks,
            device=wanted_device(),
            **mode,
        )

    def meet(self, exchange: Exchange) -> None:
        """Joins the group anew, with the ranks that exchange bytes now."""
        self._there().regroup(exchange)

    def masks(self) -> list[bool]:
        """By rank, whether it is masked or gone, behind the work on the current stream."""
        return self._there().masks()

    def synchronize(self) -> None:
        """Makes the host wait for the calls on the current stream."""
        self._there().synchronize()

    def barrier(self) -> None:
        """Waits for all ranks that take part; on a GPU the current stream does."""
        self._there().barrier()


def wanted_device() -> str | None:
    """The device of buffers: the current GPU where there is one, else the CPU; None if the
    environment names another."""
    if _core.ep_settings().device is not None:
        return None
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuses_nvlink(ucx_tls: str | None) -> bool:
    """Whether UCX's list of transports leaves out those between GPUs of a host, as NIXL EP sets it
    for ``disable_ll_nvlink``."""
    listed = (ucx_tls or "").strip()
    return listed.startswith("^") and "cuda_ipc" in listed[1:].split(",")
