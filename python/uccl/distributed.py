"""The backend ``uccl`` of ``torch.distributed``: collectives that copy, without NCCL.

Importing this module registers the backend:

>>> import uccl.distributed
>>> dist.init_process_group("uccl")
>>> dist.all_gather(outputs, tensor)

It has ``all_gather``, ``all_to_all``, ``broadcast``, ``scatter``, ``gather``, ``send``, ``recv`` and ``barrier`` in all
their forms, for tensors in host and GPU memory. Reductions are made on CPUs, by gathering, in the order of the ranks;
on GPUs they are refused: a program that reduces there makes a second group, ``dist.new_group(backend="nccl")``.

A rank that is lost is named by the error of each call that needs it. :func:`lost` tells which ranks are, and
:func:`shrink` makes a group of the others. See docs/collectives.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from uccl import _core, p2p
from uccl._reductions import Reduction
from uccl._torch import call_options

__all__ = ["ProcessGroupUccl", "lost", "shrink"]

_NO_TIME = datetime.timedelta(0)
#: Called once when a call has ended well.
_Last = Callable[[], object]


class _Work(dist.Work):
    """A call under way: its messages, and the steps that follow them here."""

    def __init__(
        self, works: Sequence[_core.RankWork], result: Any, last: Sequence[_Last] = ()
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._last = list(last)
        self._future: Optional[torch.futures.Future[Any]] = None

    def followed(self, last: Sequence[_Last], result: Any) -> _Work:
        """This call, with another result and more steps behind it."""
        self._result = result
        self._last += last
        return self

    def wait(self, timeout: datetime.timedelta = _NO_TIME) -> bool:
        """Waits for the call. Raises if it has failed, or if the time is over and it goes on."""
        seconds = timeout.total_seconds() if timeout > _NO_TIME else None
        for work in self._works:
            if not work.wait(seconds):
                raise RuntimeError(f"the call has not ended within {seconds} seconds, and goes on")
        self._finish()
        return True

    def _finish(self) -> None:
        last, self._last = self._last, []
        with torch.no_grad():
            for step in last:
                step()

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        try:
            done = all(work.poll() for work in self._works)
        except RuntimeError:
            return True
        if done:
            self._finish()
        return done

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The error of a call that has failed."""
        try:
            for work in self._works:
                work.poll()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> Any:
        """The tensors of the call."""
        return self._result

    def synchronize(self) -> None:
        """Waits for the call."""
        self.wait()

    def get_future(self) -> Any:
        """A future of the tensors. This waits for the call: there is no thread that would do so later."""
        if self._future is None:
            self._future = torch.futures.Future()
            try:
                self.wait()
            except RuntimeError as error:
                self._future.set_exception(error)
            else:
                self._future.set_result(self._result)
        return self._future


class _Room:
    """Memory that a call fills: a tensor's own, or, for one with gaps, other memory that is copied there."""

    def __init__(self, tensor: torch.Tensor, *, is_read: bool = False) -> None:
        self.tensor = tensor.detach()
        self.dense = self.tensor
        self.last: list[_Last] = []
        if not tensor.is_contiguous():
            self.dense = torch.empty_like(self.tensor, memory_format=torch.contiguous_format)
            if is_read:
                self.dense.copy_(self.tensor)
            self.last = [lambda: self.tensor.copy_(self.dense)]


def _last(rooms: Sequence[_Room]) -> list[_Last]:
    return [step for room in rooms for step in room.last]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        to.view(-1).copy_(source.view(-1))


def _one(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise ValueError(f"a process has one tensor for each call, and not {len(items)}")
    return items[0]


def _joined(works: Sequence[_Work]) -> _Work:
    """Several calls as one."""
    parts = [part for work in works for part in work._works]
    last = [step for work in works for step in work._last]
    return _Work(parts, [work._result for work in works], last)


def _expect_alike(tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    for tensor in tensors[1:]:
        if (tensor.dtype, tensor.numel(), tensor.device.type) != (
            first.dtype,
            first.numel(),
            first.device.type,
        ):
            raise ValueError(
                f"a tensor of {tensor.numel()} {tensor.dtype} on {tensor.device} in a call of tensors of "
                f"{first.numel()} {first.dtype} on {first.device}"
            )


class ProcessGroupUccl(dist.ProcessGroup):
    """A group of the backend ``uccl``. ``torch.distributed`` makes and calls it."""

    def __init__(
        self, group: _core.RankGroup, endpoint: Optional[p2p.Endpoint], timeout: datetime.timedelta
    ) -> None:
        super().__init__(group.rank, group.ranks)
        self._group = group
        self._endpoint = endpoint
        self._timeout = timeout
        self._name = self._desc = ""

    # The base class keeps these in its backends, and has none here.
    def getBackendName(self) -> str:
        return "uccl"

    def name(self) -> str:
        return "uccl"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.ranks

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        self._group.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def abort(self) -> None:
        self.shutdown()

    def lost(self) -> list[int]:
        """The ranks of this group that are lost, as far as this rank can tell now."""
        return self._group.lost()

    def _options(
        self, tensor: Optional[torch.Tensor], opts: Any = None
    ) -> tuple[Optional[float], Any]:
        timeout = getattr(opts, "timeout", self._timeout)
        timeout = timeout if timeout > _NO_TIME else self._timeout
        return call_options(tensor, timeout.total_seconds())

    # Messages.

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> _Work:
        """Sends a tensor. Tags are not compared: messages of a pair meet in their order."""
        tensor = _dense(_one(tensors))
        return _Work([self._group.send(tensor, dst, self._options(tensor))], [tensor])

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> _Work:
        """Receives a tensor."""
        room = _Room(_one(tensors))
        work = self._group.recv(room.dense, src, self._options(room.dense))
        return _Work([work], list(tensors), room.last)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> _Work:
        """Refused: a receive names its source."""
        raise RuntimeError(
            "the backend uccl does not receive from any source: name the rank, or use gloo"
        )

    # Collectives that copy.

    def allgather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> _Work:
        """Every rank gets every rank's tensor."""
        outputs, given = _one(output_tensors), _dense(_one(input_tensors))
        if len(outputs) != self.size():
            raise ValueError(
                f"all_gather has {len(outputs)} output tensors for {self.size()} ranks"
            )
        _expect_alike([given, *outputs])
        rooms = [_Room(output) for output in outputs]
        work = self._group.all_gather(
            given, [room.dense for room in rooms], self._options(given, opts)
        )
        _copy(rooms[self.rank()].dense, given)
        return _Work([work], list(outputs), _last(rooms))

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> _Work:
        if output.numel() != given.numel() * self.size():
            raise ValueError(
                "the output of all_gather_into_tensor has one input's elements for each rank"
            )
        room = _Room(output)
        parts = room.dense.view(-1).split(given.numel()) if given.numel() else [given] * self.size()
        given = _dense(given)
        work = self.allgather([list(parts)], [given.view(-1) if given.numel() else given], opts)
        return work.followed(room.last, [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> _Work:
        """Several all_gather_into_tensor."""
        return _joined([self._allgather_base(o, i, opts) for o, i in zip(outputs, inputs)])

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> _Work:
        """Several all_gathers: ``output_lists[r]`` are the tensors of rank ``r``."""
        each = [[of_rank[i] for of_rank in output_lists] for i in range(len(inputs))]
        return _joined(
            [self.allgather([outputs], [given], opts) for outputs, given in zip(each, inputs)]
        )

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> _Work:
        """Every rank gets a tensor from every rank."""
        dense, rooms = [_dense(one) for one in inputs], [_Room(one) for one in outputs]
        options = self._options(dense[0] if dense else None, opts)
        work = self._group.all_to_all(dense, [room.dense for room in rooms], options)
        _copy(rooms[self.rank()].dense, dense[self.rank()])
        return _Work([work], list(outputs), _last(rooms))

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> _Work:
        """Every rank gets a part of every rank's tensor, along the first dimension."""
        room = _Room(output)
        outputs = self._split(room.dense, output_split_sizes)
        work = self.alltoall(outputs, self._split(_dense(given), input_split_sizes), opts)
        return work.followed(room.last, [output])

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        length = tensor.size(0) if tensor.dim() else 1
        if sizes and (len(sizes) != self.size() or sum(sizes) != length):
            raise ValueError(
                f"the split sizes {list(sizes)} do not cut {length} rows for {self.size()} ranks"
            )
        if not sizes and length % self.size():
            raise ValueError(f"{length} rows do not divide equally between {self.size()} ranks")
        return list(tensor.split(list(sizes) if sizes else [length // self.size()] * self.size()))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Work:
        """Every rank gets the root's tensor."""
        room = _Room(_one(tensors), is_read=True)
        work = self._group.broadcast(opts.rootRank, room.dense, self._options(room.dense, opts))
        return _Work([work], list(tensors), room.last)

    def scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> _Work:
        """Every rank gets its tensor of the root's."""
        room, is_root = _Room(_one(output_tensors)), opts.rootRank == self.rank()
        inputs = [_dense(one) for one in _one(input_tensors)] if is_root else []
        _expect_alike([room.dense, *inputs])
        work = self._group.scatter(
            opts.rootRank, inputs, room.dense, self._options(room.dense, opts)
        )
        if is_root:
            _copy(room.dense, inputs[self.rank()])
        return _Work([work], list(output_tensors), room.last)

    def gather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any,
    ) -> _Work:
        """The root gets every rank's tensor."""
        given, is_root = _dense(_one(input_tensors)), opts.rootRank == self.rank()
        rooms = [_Room(one) for one in _one(output_tensors)] if is_root else []
        _expect_alike([given, *(room.dense for room in rooms)])
        outputs = [room.dense for room in rooms]
        work = self._group.gather(opts.rootRank, given, outputs, self._options(given, opts))
        if is_root:
            _copy(outputs[self.rank()], given)
        return _Work([work], [room.tensor for room in rooms], _last(rooms))

    def barrier(self, opts: Any = None) -> _Work:
        """Ends when every rank has begun it."""
        return _Work([self._group.barrier(self._options(None, opts))], [])

    # Reductions: on CPUs, in the order of the ranks.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Work:
        """Every rank gets the reduction of all ranks' tensors."""
        tensor = _one(tensors)
        reduction = Reduction(opts.reduceOp, tensor)
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(self.size())
        ]
        work = self.allgather([parts], [tensor], opts)
        return work.followed([lambda: reduction.into(tensor, parts)], list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Work:
        """Several all_reduces."""
        return _joined([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Work:
        """The root gets the reduction of all ranks' tensors."""
        tensor = _one(tensors)
        reduction = Reduction(opts.reduceOp, tensor)
        is_root = opts.rootRank == self.rank()
        count = self.size() if is_root else 0
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(count)
        ]
        work = self.gather([parts], [tensor], opts)
        last: list[_Last] = [lambda: reduction.into(tensor, parts)] if is_root else []
        return work.followed(last, list(tensors))

    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> _Work:
        """Every rank gets the reduction of its tensor of all ranks'."""
        output, inputs = _one(output_tensors), _one(input_tensors)
        reduction = Reduction(opts.reduceOp, output)
        parts = [
            torch.empty_like(output, memory_format=torch.contiguous_format)
            for _ in range(self.size())
        ]
        work = self.alltoall(parts, inputs, opts)
        return work.followed([lambda: reduction.into(output, parts)], list(output_tensors))

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> _Work:
        if given.numel() != output.numel() * self.size():
            raise ValueError(
                "the input of reduce_scatter_tensor has one output's elements for each rank"
            )
        inputs = [part.view(output.shape) for part in _dense(given).view(-1).split(output.numel())]
        return self.reduce_scatter([output], [inputs], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> _Work:
        """Several reduce_scatter_tensors."""
        return _joined([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs)])


def _create(options: Any, backend_options: Any = None) -> ProcessGroupUccl:
    """Joins a group; ``torch.distributed`` calls this."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gpus = torch.cuda.device_count()
    gpu = (
        torch.cuda.current_device() if gpus and torch.cuda.is_initialized() else rank % max(gpus, 1)
    )
    endpoint = p2p.Endpoint(gpu)
    store.set(f"uccl/{rank}", _core.rank_card(endpoint))
    cards = [bytes(store.get(f"uccl/{other}")) for other in range(size)]
    group = _core.RankGroup(endpoint, rank, cards, timeout=options.timeout.total_seconds())
    return ProcessGroupUccl(group, endpoint, options.timeout)


def lost(group: Optional[dist.ProcessGroup] = None) -> list[int]:
    """The ranks of a group of this backend that are lost, by their numbers in the group."""
    return _ours(group).lost()


def shrink(
    group: Optional[dist.ProcessGroup] = None, *, timeout: Optional[float] = None
) -> ProcessGroupUccl:
    """The group of those ranks that are not lost. All of these call this, and the group's other calls end.

    The ranks keep their order; ``torch.distributed`` takes the group as any other, by ``group=``. ``timeout`` is the
    number of seconds that the ranks may take to come.
    """
    old = _ours(group)
    smaller = old._group.shrink(
        timeout=old._timeout.total_seconds() if timeout is None else timeout
    )
    gone = [rank for rank in range(old.size()) if old._group.members[rank] not in smaller.members]
    # The endpoint goes to the new group, and closes with that.
    endpoint, old._endpoint = old._endpoint, None
    new = ProcessGroupUccl(smaller, endpoint, old._timeout)
    new._set_group_name(f"{old.group_name}/without-{'-'.join(map(str, gone))}")
    new._set_group_desc(old.group_desc)
    world = c10d._world
    whole = {there: number for number, there in world.pg_group_ranks[old].items()}
    ranks = [rank for rank in range(old.size()) if rank not in gone]
    world.pg_group_ranks[new] = {whole[rank]: place for place, rank in enumerate(ranks)}
    world.pg_map[new] = world.pg_map[old]
    world.pg_names[new] = new.group_name
    world.pg_backend_config[new] = world.pg_backend_config[old]
    c10d._register_process_group(new.group_name, new)
    old._group.close()
    return new


def _ours(group: Optional[dist.ProcessGroup]) -> ProcessGroupUccl:
    group = c10d._get_default_group() if group is None else group
    if not isinstance(group, ProcessGroupUccl):
        raise ValueError("the group is not of the backend uccl")
    return group


dist.Backend.register_backend("uccl", _create, extended_api=True, devices=["cpu", "cuda"])
