"""Checks of the arguments of calls."""

from __future__ import annotations

from typing import Any, Callable

import torch

from uccl.ep._ranks import DEVICE

CPU = torch.device("cpu")
#: A function that ends a call which has only sent so far.
Hook = Callable[[], None]


class NotHere(NotImplementedError, AttributeError):
    """For a name of DeepEP that does not exist here. It is an AttributeError, so that ``hasattr``
    is False, and its text says why."""


def refuse_unknown(where: str, keywords: dict[str, Any]) -> None:
    """Accepts keywords of other libraries if they are None or False, and raises for others."""
    if not keywords:
        return
    asked = sorted(
        name for name, value in keywords.items() if value is not None and value is not False
    )
    if asked:
        raise NotImplementedError(f"{where} does not have {', '.join(asked)}")


def check_count(name: str, count: int, least: int = 0) -> None:
    """Raises for a count below the least. The engine takes no negative ones."""
    if count < least:
        raise ValueError(f"{name} is at least {least}, not {count}")


def on_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises for a tensor on another device than the buffer's tensors."""
    if tensor.device == device:
        return
    why = f"{name} is on {tensor.device}, and the buffer's calls take tensors on {device}"
    if tensor.device.type == device.type:
        raise ValueError(
            f"{why}: a buffer is on the GPU that was the current one when it was made, unless "
            f"device= or {DEVICE} says another"
        )
    raise ValueError(
        f"{why}: make it with device={tensor.device.type!r}, or set "
        f"{DEVICE}={tensor.device.type} on all ranks"
    )


def fits(have: torch.Size, shape: tuple[int | None, ...]) -> bool:
    """Whether a shape equals this one (None: any length)."""
    if len(have) != len(shape):
        return False
    for length, want in zip(have, shape):
        if want is not None and length != want:
            return False
    return True


def check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Returns the tensor, if it is contiguous, on the device, and of this shape (None: any length)
    and one of these dtypes."""
    on_device(name, tensor, device)
    have = tensor.shape
    if have != shape and not fits(have, shape):
        want = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and should have ({want})")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is of {tensor.dtype}, and should be of {' or '.join(map(str, dtypes))}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    return tensor
