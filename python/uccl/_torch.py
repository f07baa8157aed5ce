"""The common parts of the modules that take torch's tensors and groups."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist


def call_options(
    tensor: Optional[torch.Tensor], timeout: Optional[float] = None
) -> tuple[Optional[float], Any]:
    """The options of a call on a tensor: its time in seconds, and the stream that it follows."""
    if tensor is None or not tensor.is_cuda:
        return timeout, None
    return timeout, torch.cuda.current_stream(tensor.device)


def gather_bytes(own: bytes, gpu: int) -> list[bytes]:
    """The bytes of all ranks, by rank; those of each rank are as many. Any backend carries them that gathers
    bytes on some device."""
    device = "cpu" if "gloo" in dist.get_backend() or "cpu" in _devices() else f"cuda:{gpu}"
    mine = torch.tensor(list(own), dtype=torch.uint8, device=device)
    all_ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return [bytes(one.cpu().tolist()) for one in all_ranks]


def _devices() -> list[str]:
    """The devices whose tensors the default group takes."""
    capability = dist.Backend.backend_capability.get(dist.get_backend(), [])
    return list(capability)
