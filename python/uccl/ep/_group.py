"""Ranks that find each other through the caller's group."""

from __future__ import annotations

import ctypes
from typing import Any, Callable

import torch

from uccl import _core

#: The device of tensors, for callers that cannot pass ``device``: "cpu", "cuda" or "cuda:1".
DEVICE = "UCCL_EP_DEVICE"
#: Tokens of each rank that normal mode's hint has room for, in each of two calls; more go in
#: rounds, except on GPUs.
TOKENS = "UCCL_EP_TOKENS_AT_ONCE"
CPU = torch.device("cpu")


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
        if group is not None:
            self.rank, self.size = group.rank(), group.size()
        elif comm is not None:
            self.rank, self.size = comm.Get_rank(), comm.Get_size()
        elif store is None or rank is None or num_ranks is None:
            raise ValueError(
                "a buffer needs the ranks' group (or comm, an MPI communicator; or store, rank and num_ranks)"
            )
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

    def join(self, pool: int, timeout: float | None, masks_late: bool) -> Any:
        """Joins the group; returns the engine's object of this rank."""
        return _core.EpGroup(
            rank=self.rank,
            ranks=self.size,
            pool=max(pool, 1),
            timeout=timeout_of(timeout),
            masks_late=masks_late,
            node=node_of_environment(),
            exchange=self.exchange,
        )


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


class PoolMemory:
    """A range of a GPU's memory that torch makes a tensor of. The pool lives as long as this
    object."""

    def __init__(self, native: Any, offset: int, size: int) -> None:
        self._native = native
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (native.pool + offset, False),
            "version": 3,
        }


def pool_tensor(
    native: Any, dtype: torch.dtype, offset: int, count: int | None, device: torch.device
) -> torch.Tensor:
    """Elements of a rank's own pool on a device, starting ``offset`` bytes into it."""
    size = torch.empty(0, dtype=dtype).element_size()
    most = (native.pool_len - offset) // size
    count = most if count is None else count
    if offset < 0 or count < 0 or count > most:
        raise ValueError(f"{count} elements at byte {offset} of a pool of {native.pool_len} bytes")
    if device != CPU:
        if count == 0:
            return torch.empty(0, dtype=dtype, device=device)
        return torch.as_tensor(PoolMemory(native, offset, count * size), device=device).view(dtype)
    memory = (ctypes.c_ubyte * (count * size)).from_address(native.pool + offset)
    # The pool lives as long as the tensor.
    memory.uccl_group = native  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def on_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises for a tensor on another device than the buffer's tensors."""
    if tensor.device == device:
        return
    why = f"{name} is on {tensor.device}, and the buffer's calls take tensors on {device}"
    if tensor.device.type == device.type:
        raise ValueError(
            f"{why}: a buffer is on the GPU that was the current one when it was made, unless device= or {DEVICE} says another"
        )
    raise ValueError(
        f"{why}: make it with device={tensor.device.type!r}, or set {DEVICE}={tensor.device.type} on all ranks"
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


def address(tensor: torch.Tensor | None) -> int:
    """A tensor's address; 0 for None, and for one without elements."""
    return 0 if tensor is None else tensor.data_ptr()


def weights_address(weights: torch.Tensor | None) -> int:
    """The address of weights. It is 1 for weights of no token: all ranks give weights or none does,
    so these differ from None."""
    return 0 if weights is None else address(weights) or 1


def scales_in(
    scales: torch.Tensor | None, tokens: int, device: torch.device = CPU
) -> tuple[int, int, int, int] | None:
    """Scales of four bytes each, of any strides: address, words of a token, strides by token and by
    word."""
    if scales is None:
        return None
    on_device("scales", scales, device)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.element_size() != 4 or scales.dim() != 2 or scales.shape[0] != tokens:
        raise ValueError(
            f"scales are of {scales.dtype} and {tuple(scales.shape)}, and should be of 4 bytes and ({tokens}, any)"
        )
    return address(scales), scales.shape[1], scales.stride(0), scales.stride(1)


def scales_for(scales: torch.Tensor | None, rows: int, is_col_major: bool) -> torch.Tensor | None:
    """A tensor for the scales of so many rows."""
    if scales is None:
        return None
    words = scales.shape[1] if scales.dim() == 2 else 1
    if not is_col_major:
        return scales.new_empty((rows, words))
    return scales.new_empty((words, align(rows, 4)))[:, :rows].t()


def biases(bias: Any, out: torch.Tensor) -> tuple[int, int]:
    """Addresses of up to two biases, of the shape and dtype of ``out``."""
    given = bias if isinstance(bias, tuple) else (bias, None)
    if len(given) > 2:
        raise ValueError(f"there are up to two biases, not {len(given)}")
    first, second = (*given, None)[:2]
    for tensor in (first, second):
        if tensor is not None:
            check("bias", tensor, tuple(out.shape), torch.bfloat16, device=out.device)
    return address(first), address(second)


def routing_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Any:
    """The routing of tokens, from their choices."""
    check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32)
    tokens, top_k = topk_idx.shape
    return _core.EpRouting.by_choices(
        experts=address(topk_idx),
        is_64=topk_idx.dtype == torch.int64,
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        ranks=ranks,
    )


def align(count: int, to: int) -> int:
    """The count rounded up to a multiple."""
    return -(-count // to) * to


def align_all(counts: list[int], to: int) -> list[int]:
    """Each count rounded up to a multiple."""
    return counts if to == 1 else [align(count, to) for count in counts]


Hook = Callable[[], None]
