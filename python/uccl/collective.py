"""Messages between the ranks of ``torch.distributed``, under the names of UCCL's ``uccl.collective``.

The calls are those of UCCL's wheel 0.1.1, and take the older form's keywords too. ``torch.distributed`` only carries
the addresses of the ranks, over any backend that gathers bytes; the tensors go over :mod:`uccl.p2p`, in host or GPU
memory, on one host or between hosts.

>>> dist.init_process_group("gloo")
>>> collective.init_collective(local_gpu_idx)
>>> collective.register_tensor(tensor)          # needed for ranks of other hosts
>>> if rank == 0:
...     collective.send(tensor, dst=1)
... else:
...     collective.recv(tensor, src=0)

Messages of a pair of ranks meet in the order of their calls, and both sides' tensors have one length. Work on GPUs
that fills or uses a tensor is waited for: a call follows the current stream, and a wait returns when all bytes are
there. See docs/collectives.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from uccl import _core, p2p
from uccl._torch import call_options, gather_bytes

__all__ = [
    "CollectiveContext",
    "P2POp",
    "allgather",
    "batch_isend_irecv",
    "deregister_tensor",
    "finalize_collective",
    "get_collective",
    "iallgather",
    "init_collective",
    "irecv",
    "isend",
    "recv",
    "register_tensor",
    "send",
    "test",
    "wait",
    "wait_all",
]

#: A call under way: a number of this module's, or torch's own object, which the waits take too.
Handle = Union[int, dist.Work]
#: The handle of a message to the own rank, which is no message.
_NOTHING = -1


@dataclass
class _Operation:
    """A message for :func:`batch_isend_irecv`."""

    op: str
    tensor: torch.Tensor
    peer: int


#: An operation, or its parts.
Operation = Union[_Operation, tuple[str, torch.Tensor, int]]


class CollectiveContext:
    """One rank's connections to all others.

    ``CollectiveContext(local_gpu_idx, use_copy_engine_for_intra)``, as the wheel has it; the copy engine is used
    wherever it is the fastest way, so the second argument changes nothing. ``CollectiveContext(num_cpus,
    local_gpu_idx)`` is the older form: two integers, ``num_cpus=``, or one integer that is no GPU here.
    """

    def __init__(
        self,
        local_gpu_idx: Optional[int] = None,
        use_copy_engine_for_intra: Union[bool, int, None] = False,
        *,
        num_cpus: Optional[int] = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has to be initialized before a CollectiveContext is made"
            )
        self.world_size: int = dist.get_world_size()
        self.rank: int = dist.get_rank()
        derived = _local_gpu(self.rank)
        gpu, cpus = _gpu_and_cpus(local_gpu_idx, use_copy_engine_for_intra, derived)
        if num_cpus is not None and local_gpu_idx is not None:
            gpu = local_gpu_idx
        self.local_gpu_idx: int = gpu
        self.use_copy_engine_for_intra = use_copy_engine_for_intra is True
        self._num_cpus = cpus if num_cpus is None else num_cpus
        self._group: Optional[_core.RankGroup] = None
        self._forget()

    def _forget(self) -> None:
        self.ep: Optional[p2p.Endpoint] = None
        self.send_connections: Optional[list[Optional[int]]] = None
        self.recv_connections: Optional[list[Optional[int]]] = None
        self.local_connections: Optional[list[bool]] = None
        #: The registered ranges of addresses, and their regions.
        self.memory_regions: dict[tuple[int, int], int] = {}
        self.initialized = False

    def init(self) -> None:
        """Connects to all other ranks, which call this too."""
        if self.initialized:
            warnings.warn("this CollectiveContext is initialized already", stacklevel=2)
            return
        self.ep = p2p.Endpoint(self.local_gpu_idx, self._num_cpus)
        cards = gather_bytes(_core.rank_card(self.ep), self.local_gpu_idx)
        group = _core.RankGroup(self.ep, self.rank, cards, needs_registration=True)
        others = [rank != self.rank for rank in range(self.world_size)]
        self.send_connections = [
            group.connection(i) if other else None for i, other in enumerate(others)
        ]
        self.recv_connections = list(self.send_connections)
        self.local_connections = [other and group.is_local(i) for i, other in enumerate(others)]
        self._group = group
        self.initialized = True

    def _joined(self) -> _core.RankGroup:
        if self._group is None:
            raise RuntimeError("this CollectiveContext is not initialized: call init() first")
        return self._group

    def register_tensor(self, tensor: torch.Tensor) -> int:
        """Registers a tensor's memory, unless registered memory holds it. Returns the region's number."""
        mr_id = self._joined().register(tensor)
        start = tensor.data_ptr()
        if not any(a <= start and start + tensor.nbytes <= b for a, b in self.memory_regions):
            self.memory_regions[start, start + tensor.nbytes] = mr_id
        return mr_id

    def deregister_tensor(self, tensor: torch.Tensor) -> bool:
        """Ends the registration of exactly this tensor; ``False`` if there is none."""
        ended = self._joined().deregister(tensor)
        self.memory_regions.pop((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes), None)
        return ended

    def check_tensor_registered(self, tensor: torch.Tensor) -> Optional[int]:
        """The region that holds a tensor, if it was registered."""
        return self._joined().registered(tensor)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Sends a tensor, and waits until it has arrived."""
        self.wait(self.isend(tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receives a tensor."""
        self.wait(self.irecv(tensor, src))

    def isend(self, tensor: torch.Tensor, dst: int) -> int:
        """Begins to send a tensor. It stays as it is until the wait for the handle has returned."""
        group = self._joined()
        if dst == self.rank:
            return _NOTHING
        return group.send(tensor, self._peer(dst), call_options(tensor)).id

    def irecv(self, tensor: torch.Tensor, src: int) -> int:
        """Begins to receive a tensor."""
        group = self._joined()
        if src == self.rank:
            return _NOTHING
        return group.recv(tensor, self._peer(src), call_options(tensor)).id

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"there is no connection to rank {rank}: there are {self.world_size} ranks"
            )
        return rank

    def test(self, transfer_handle: Handle) -> bool:
        """Whether a call has ended. Raises if it has failed."""
        if not isinstance(transfer_handle, int):
            return bool(transfer_handle.is_completed())
        return transfer_handle == _NOTHING or self._joined().work(transfer_handle).poll()

    def wait(self, transfer_handle: Handle) -> None:
        """Waits for a call. Raises if it has failed."""
        if not isinstance(transfer_handle, int):
            transfer_handle.wait()
        elif transfer_handle != _NOTHING:
            self._joined().work(transfer_handle).wait()

    def wait_all(self, transfer_handles: Sequence[Handle]) -> None:
        """Waits for several calls."""
        for handle in transfer_handles:
            self.wait(handle)

    def P2POp(
        self, op: Union[str, Callable[..., Any]], tensor: torch.Tensor, peer: int
    ) -> _Operation:
        """A message for :meth:`batch_isend_irecv`: ``"send"``, ``"recv"``, or a function whose name says so."""
        if callable(op):
            name = getattr(op, "__name__", str(op))
            kinds = [kind for kind in ("send", "recv") if kind in name.lower()]
            if not kinds:
                raise ValueError(f"the function {name} neither sends nor receives")
            op = kinds[0]
        elif op not in ("send", "recv"):
            raise ValueError(f"op is 'send', 'recv' or such a function, and not {op!r}")
        return _Operation(op, tensor, peer)

    def batch_isend_irecv(self, ops: Sequence[Operation]) -> list[Handle]:
        """Begins several messages. Those to the own rank are left out."""
        self._joined()
        handles: list[Handle] = []
        for operation in ops:
            if isinstance(operation, _Operation):
                op, tensor, peer = operation.op, operation.tensor, operation.peer
            else:
                op, tensor, peer = operation
            if peer == self.rank:
                continue
            handles.append(self.isend(tensor, peer) if op == "send" else self.irecv(tensor, peer))
        return handles

    def allgather(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
        """Every rank gets the tensor of every rank, one behind the other."""
        self.wait_all(self.iallgather(send_tensor, recv_tensor))

    def iallgather(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> list[Handle]:
        """Begins an :meth:`allgather`."""
        self._joined()
        needed = send_tensor.nbytes * self.world_size
        if recv_tensor.nbytes < needed:
            raise ValueError(f"recv_tensor has {recv_tensor.nbytes} bytes, and {needed} are needed")
        count = send_tensor.numel()
        parts = recv_tensor.view(-1)[: count * self.world_size].split(count) if count else ()
        if not parts:
            return []
        parts[self.rank].copy_(send_tensor.view(-1))
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        handles: list[Handle] = [self.irecv(parts[rank], rank) for rank in others]
        return handles + [self.isend(send_tensor, rank) for rank in others]

    def finalize(self) -> None:
        """Ends all connections and registrations. :meth:`init` may follow."""
        if self._group is None or self.ep is None:
            return
        group, endpoint, self._group = self._group, self.ep, None
        self._forget()
        group.close()
        endpoint.close()


def _local_gpu(rank: int) -> int:
    """The GPU that is this rank's, as the wheel finds it."""
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal():
        return int(local)
    if hasattr(dist, "get_local_rank"):
        return int(dist.get_local_rank())
    whole, ranks = os.environ.get("RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if whole.isdecimal() and ranks.isdecimal() and int(ranks) > 0:
        return int(whole) % int(ranks)
    return rank


def _gpu_and_cpus(
    first: Optional[int], second: Union[bool, int, None], derived: int
) -> tuple[int, Optional[int]]:
    """The GPU and the number of CPUs that two positional arguments mean."""
    if first is not None and second is not None and not isinstance(second, bool):
        return second, first
    if first is None or isinstance(second, int) and not isinstance(second, bool):
        return derived, None
    is_gpu = first == derived or first < torch.cuda.device_count()
    return (first, None) if is_gpu else (derived, first)


_default: Optional[CollectiveContext] = None


def init_collective(
    local_gpu_idx: Optional[int] = None,
    use_copy_engine_for_intra: Union[bool, int, None] = False,
    *,
    num_cpus: Optional[int] = None,
) -> None:
    """Makes the context of this module's functions, on all ranks. The arguments are those of
    :class:`CollectiveContext`."""
    global _default
    context = CollectiveContext(local_gpu_idx, use_copy_engine_for_intra, num_cpus=num_cpus)
    context.init()
    _default = context


def get_collective() -> CollectiveContext:
    """The context of this module's functions."""
    if _default is None:
        raise RuntimeError("the collective is not initialized: call init_collective() first")
    return _default


def finalize_collective() -> None:
    """Ends the context of this module's functions."""
    global _default
    if _default is not None:
        context, _default = _default, None
        context.finalize()


def register_tensor(tensor: torch.Tensor) -> None:
    """:meth:`CollectiveContext.register_tensor`, without its result."""
    get_collective().register_tensor(tensor)


def deregister_tensor(tensor: torch.Tensor) -> None:
    """:meth:`CollectiveContext.deregister_tensor`, without its result."""
    get_collective().deregister_tensor(tensor)


def send(tensor: torch.Tensor, dst: int) -> None:
    """:meth:`CollectiveContext.send`"""
    get_collective().send(tensor, dst)


def recv(tensor: torch.Tensor, src: int) -> None:
    """:meth:`CollectiveContext.recv`"""
    get_collective().recv(tensor, src)


def isend(tensor: torch.Tensor, dst: int) -> Handle:
    """:meth:`CollectiveContext.isend`"""
    return get_collective().isend(tensor, dst)


def irecv(tensor: torch.Tensor, src: int) -> Handle:
    """:meth:`CollectiveContext.irecv`"""
    return get_collective().irecv(tensor, src)


def test(transfer_handle: Handle) -> bool:
    """:meth:`CollectiveContext.test`"""
    return get_collective().test(transfer_handle)


def wait(transfer_handle: Handle) -> None:
    """:meth:`CollectiveContext.wait`"""
    get_collective().wait(transfer_handle)


def wait_all(transfer_handles: Sequence[Handle]) -> None:
    """:meth:`CollectiveContext.wait_all`"""
    get_collective().wait_all(transfer_handles)


def P2POp(op: Union[str, Callable[..., Any]], tensor: torch.Tensor, peer: int) -> _Operation:
    """:meth:`CollectiveContext.P2POp`"""
    return get_collective().P2POp(op, tensor, peer)


def batch_isend_irecv(ops: Sequence[Operation]) -> list[Handle]:
    """:meth:`CollectiveContext.batch_isend_irecv`"""
    return get_collective().batch_isend_irecv(ops)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
    """:meth:`CollectiveContext.allgather`"""
    get_collective().allgather(send_tensor, recv_tensor)


def iallgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> list[Handle]:
    """:meth:`CollectiveContext.iallgather`"""
    return get_collective().iallgather(send_tensor, recv_tensor)
