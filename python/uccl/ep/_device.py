"""Chooses a buffer's device: the CPU, or a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from uccl import _core
from uccl.ep._ranks import DEVICE, Ranks


class DeviceChoice(NamedTuple):
    """A buffer's device."""

    gpu: torch.device | None
    """None for the CPU."""
    may_move: bool = False
    """Whether no rank has named a device: if the first tensor is on a GPU, the buffer moves there.
    """


#: A rank's device, as the others get it. An open one follows the others; a rank without a device
#: gives the reason.
ON_CPU, ON_GPU, OPEN, NOWHERE = b"the CPU", b"a GPU", b"open", b"nowhere: "


def choose_device(ranks: Ranks, device: Any, prefers_gpu: bool) -> DeviceChoice:
    """Chooses the devices of all ranks' buffers. Collective, where ranks have a group.

    The caller's ``device`` decides, or else the environment. Otherwise it is the current GPU, if
    there is one and the caller ``prefers_gpu``, or the group has NCCL, or the process has begun to
    use CUDA. If none of these holds, the first tensor decides.
    """
    try:
        asked = device if device is not None else _core.ep_settings().device
        # A rank with only a store is alone here, and ranks that come later are on the CPU.
        is_open = asked is None and ranks.has_peers() and torch.cuda.is_available()
        if is_open and (prefers_gpu or has_nccl(ranks.group) or torch.cuda.is_initialized()):
            asked, is_open = "cuda", False
        mine = None if asked is None else device_of(asked)
    except (RuntimeError, ValueError) as why:
        ranks.exchange(NOWHERE + str(why).encode())
        raise
    answer = OPEN if is_open else ON_CPU if mine is None else ON_GPU
    answers = {rank: one for rank, one in enumerate(ranks.exchange(answer)) if one is not None}
    check_all_alike(answers)
    if not is_open:
        return DeviceChoice(mine)
    if ON_GPU in answers.values():
        return DeviceChoice(device_of("cuda"))
    return DeviceChoice(None, may_move=ON_CPU not in answers.values())


def check_all_alike(answers: dict[int, bytes]) -> None:
    """Raises, on all ranks, if some are on GPUs and others are not."""
    for rank, one in answers.items():
        if one.startswith(NOWHERE):
            raise RuntimeError(f"rank {rank} made no buffer: {one[len(NOWHERE) :].decode()}")
    on_cpu, on_gpu = (
        [rank for rank, one in answers.items() if one == where] for where in (ON_CPU, ON_GPU)
    )
    if on_cpu and on_gpu:
        raise ValueError(
            f"buffers of ranks {on_gpu} are on GPUs, and those of ranks {on_cpu} on the CPU: give "
            f"all of them a device= of the same kind, or set {DEVICE} to cuda or cpu on all ranks"
        )


def device_of(asked: Any) -> torch.device | None:
    """The GPU that is asked for, or None for the CPU."""
    found = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ValueError(f"a buffer's device is a GPU of CUDA or the CPU, not {found}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"the buffer's device is {found}, and torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def has_nccl(group: Any) -> bool:
    """Whether a torch group reaches GPUs by NCCL, perhaps beside another backend for the CPU. The
    test also works for groups that torch's world does not know (vLLM's stateless ones); gloo, which
    takes tensors of GPUs, does not count."""
    if not torch.distributed.is_available() or not isinstance(
        group, torch.distributed.ProcessGroup
    ):
        return False
    try:
        return str(group._get_backend(torch.device("cuda")).name()) == "nccl"
    except (AttributeError, NotImplementedError, RuntimeError):
        # The group has no backend for GPUs, or an older torch has no such method.
        return False
