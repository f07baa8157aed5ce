"""Where a buffer is: on the CPU, or on a GPU."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from uccl.ep._group import DEVICE, Ranks


class Place(NamedTuple):
    """Where a buffer is made."""

    gpu: torch.device | None
    """None for the CPU."""
    may_move: bool = False
    """Whether nobody has said so: the first tensor may be on a GPU, and then the buffer is too."""


#: What a rank tells the others of its place. One that leaves it open goes where the others are; one that has none says why.
ON_CPU, ON_GPU, OPEN, NOWHERE = b"the CPU", b"a GPU", b"open", b"nowhere: "


def place_of(ranks: Ranks, device: Any, prefers_gpu: bool) -> Place:
    """Where all ranks make their buffers. Collective, where ranks have a group.

    It is what the caller says, or else the environment. Otherwise it is the current GPU where there is one and the caller ``prefers_gpu``,
    or the group has NCCL, or the process has begun to use CUDA. Where nothing says so, the first tensor does.
    """
    asked = device if device is not None else os.environ.get(DEVICE) or None
    # Who has only a store is alone here, and ranks that come later are on the CPU.
    is_open = asked is None and ranks.has_peers() and torch.cuda.is_available()
    if is_open and (prefers_gpu or has_nccl(ranks.group) or torch.cuda.is_initialized()):
        asked, is_open = "cuda", False
    try:
        mine = None if asked is None else found_on(asked)
    except (RuntimeError, ValueError) as why:
        ranks.exchange(NOWHERE + str(why).encode())
        raise
    told = OPEN if is_open else ON_CPU if mine is None else ON_GPU
    everyone = {rank: one for rank, one in enumerate(ranks.exchange(told)) if one is not None}
    check_alike(everyone)
    if not is_open:
        return Place(mine)
    if ON_GPU in everyone.values():
        return Place(found_on("cuda"))
    return Place(None, may_move=ON_CPU not in everyone.values())


def check_alike(told: dict[int, bytes]) -> None:
    """Raises, on all ranks, where some are on GPUs and others are not."""
    for rank, one in told.items():
        if one.startswith(NOWHERE):
            raise RuntimeError(f"rank {rank} made no buffer: {one[len(NOWHERE):].decode()}")
    on_cpu, on_gpu = ([rank for rank, one in told.items() if one == where] for where in (ON_CPU, ON_GPU))
    if on_cpu and on_gpu:
        raise ValueError(
            f"buffers of ranks {on_gpu} are on GPUs, and those of ranks {on_cpu} on the CPU: give all of them a device= of the same kind, or set "
            f"{DEVICE} to cuda or cpu on all ranks"
        )


def found_on(asked: Any) -> torch.device | None:
    """The GPU that somebody asks for, or None for the CPU."""
    found = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ValueError(f"a buffer's device is a GPU of CUDA or the CPU, not {found}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"the buffer's device is {found}, and torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def has_nccl(group: Any) -> bool:
    """Whether a torch group reaches GPUs by NCCL, perhaps beside another backend for the CPU. Groups that torch's world does not know
    (vLLM's stateless ones) are asked too, and gloo, which takes tensors of GPUs, does not count."""
    if not isinstance(group, getattr(torch.distributed, "ProcessGroup", ())):
        return False
    try:
        return str(group._get_backend(torch.device("cuda")).name()) == "nccl"
    except (AttributeError, NotImplementedError, RuntimeError):
        # It has no backend for GPUs, or an older torch does not tell.
        return False
