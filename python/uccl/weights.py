"""Weights that trainers publish and inference ranks read where they need them.

Ranks have parts of the same tensors, cut in any way, some of them several times. Each describes its parts
(:meth:`Publisher.manifest`, :meth:`Reader.manifest`), the program carries the descriptions to all ranks, and all
``join`` with the same lists. From then on each fetch reads every byte once, from the rank that the plan names, with
no word between the programs:

>>> publisher = Publisher(endpoint, {"w": Shard(rows, shape=(4096, 1024), offsets=(2048, 0))})
>>> publisher.join(sources, targets, index=1)
>>> publisher.begin()           # before the first byte changes
>>> publisher.publish(7)        # after the last one

>>> reader = Reader(endpoint, {"w": Shard(columns, shape=(4096, 1024), offsets=(0, 512))})
>>> reader.join(sources, targets, index=1)
>>> reader.fetch(7).version
7

A fetch that succeeds has filled all of its memory with bytes of one version. After one that fails no byte of it
lands any more, and the memory may hold bytes of several versions. See docs/weights.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from uccl import _core

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Fetched", "Options", "Publisher", "Reader", "Shard", "area_of_rank", "plan"]

#: Bytes that a rank has said about itself.
Manifest = bytes


@dataclass(frozen=True)
class Shard:
    """A part of a tensor in this process.

    ``tensor`` is contiguous: a ``torch.Tensor`` on any device, a NumPy array, or anything with
    ``__array_interface__``. ``shape`` is the shape of the whole tensor, ``offsets`` the first of its elements in each
    dimension. Without them the part is the whole.
    """

    tensor: Any
    shape: Union[Sequence[int], None] = None
    offsets: Union[Sequence[int], None] = None


@dataclass(frozen=True)
class Options:
    """Choices of a plan; None is the default.

    ``fan_out`` is the most readers of a byte that read it from the same reader, 0 has all read from sources, and
    without it the plan chooses by the hosts of the ranks;
    ``waves`` the number of parts of the bytes that follow each other from reader to reader; ``cut_bytes`` the most
    bytes of a part, where several ranks may send it. All ranks have the same.
    """

    fan_out: Union[int, None] = None
    waves: Union[int, None] = None
    cut_bytes: Union[int, None] = None


class Fetched(NamedTuple):
    """The result of a fetch."""

    #: The version of all bytes.
    version: int
    #: The number of bytes that were read.
    bytes: int
    #: How often a source changed its bytes meanwhile, so that all were read again.
    retries: int


@dataclass(frozen=True)
class _Entry:
    """A shard as the extension module takes it."""

    name: str
    dtype: str
    element_bytes: int
    shape: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    ptr: int
    memory_ptr: int
    memory_len: int


Shards = Mapping[str, Union[Shard, Any]]


def area_of_rank(
    shape: Sequence[int], axes: Sequence[tuple[int, int, int | None]]
) -> tuple[list[int], list[int]]:
    """The elements of one rank of a mesh: ``(offsets, sizes)``.

    Each axis of the mesh is ``(ranks, rank, dimension)``; ``None`` is an axis of replicas. Dimensions are cut as
    ``torch.chunk`` and ``DTensor`` cut them.
    """
    return _core.weights_area(shape, axes)


def plan(
    sources: Sequence[Manifest], targets: Sequence[Manifest], options: Options | None = None
) -> list[list[list[tuple[bool, int, list[tuple[int, int, int, int, int]]]]]]:
    """The reads of each target, by step: ``(is_source, rank, pieces)``.

    A piece is the target's buffer and offset there, the source's buffer and offset there, and a length, all in bytes.
    """
    return _core.weights_plan(sources, targets, options)


class _Rank:
    """The calls that publishers and readers have in common."""

    _end: _core.WeightsPublisher | _core.WeightsReader

    def manifest(self) -> Manifest:
        """The description of this rank, for all others."""
        return self._end.manifest()

    def join(
        self,
        sources: Sequence[Manifest],
        targets: Sequence[Manifest],
        index: int,
        options: Options | None = None,
    ) -> None:
        """Tells it the manifests of all ranks, in the same order everywhere, and its place among those of its kind."""
        self._end.join(sources, targets, index, options)

    @property
    def mark(self) -> tuple[int, bool]:
        """A version, and whether all bytes are of it."""
        return self._end.mark

    def wait_taken(self, version: int, timeout: float | None = None) -> None:
        """Waits until every target that reads from this rank has a version: its bytes may change then."""
        self._end.wait_taken(version, timeout)

    def close(self) -> None:
        """Ends the regions. If a peer may still touch them, this raises, and the same call waits again."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Publisher(_Rank):
    """A rank that publishes its shards, version after version.

    ``shards`` are by name. Their memory is registered with the endpoint, which accepts every peer from now on.
    """

    _end: _core.WeightsPublisher

    def __init__(self, endpoint: _core.Endpoint, shards: Shards) -> None:
        self._end = _core.WeightsPublisher(endpoint, _entries(shards), list(shards.values()))

    def begin(self) -> None:
        """Says that bytes are about to change. A fetch that has read some of them reads again."""
        self._end.begin()

    def publish(self, version: int) -> None:
        """Says that all bytes are of a version, which is higher than those before.

        All work that wrote them must have ended, on GPUs too.
        """
        self._end.publish(version)


class Reader(_Rank):
    """A rank that reads shards into its memory.

    ``shards`` are by name. Their memory is registered with the endpoint, which accepts every peer from now on, since
    targets may read from each other.
    """

    _end: _core.WeightsReader

    def __init__(self, endpoint: _core.Endpoint, shards: Shards) -> None:
        self._end = _core.WeightsReader(endpoint, _entries(shards), list(shards.values()))

    def fetch(self, version: int = 0, timeout: float | None = None) -> Fetched:
        """Reads the newest version that all sources have, which is ``version`` or a later one, and waits for it.

        Raises a ``TimeoutError`` if that takes longer than ``timeout`` seconds.
        """
        return Fetched(*self._end.fetch(version, timeout))

    def begin(self) -> None:
        """Says that the memory is about to change by other means than a fetch, after :meth:`wait_taken`."""
        self._end.begin()

    def abort(self) -> None:
        """Ends the fetch of another thread. When this returns, no byte of it lands any more."""
        self._end.abort()


def _entries(shards: Shards) -> list[_Entry]:
    return [_entry(name, shard) for name, shard in shards.items()]


def _entry(name: str, shard: Shard | Any) -> _Entry:
    part = shard if isinstance(shard, Shard) else Shard(shard)
    tensor = part.tensor
    if hasattr(tensor, "untyped_storage"):
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of {name} is not contiguous")
        storage = tensor.untyped_storage()
        dtype, width = str(tensor.dtype).replace("torch.", ""), tensor.element_size()
        ptr, memory = tensor.data_ptr(), (storage.data_ptr(), storage.nbytes())
    else:
        array = tensor.__array_interface__
        if array.get("strides") is not None:
            raise ValueError(f"the array of {name} is not contiguous")
        dtype, width = str(tensor.dtype), tensor.dtype.itemsize
        ptr = array["data"][0]
        memory = (ptr, math.prod(array["shape"]) * width)
    sizes = [int(size) for size in tensor.shape]
    return _Entry(
        name=name,
        dtype=dtype,
        element_bytes=width,
        shape=sizes if part.shape is None else list(part.shape),
        offsets=[0] * len(sizes) if part.offsets is None else list(part.offsets),
        sizes=sizes,
        ptr=ptr,
        memory_ptr=memory[0],
        memory_len=memory[1],
    )
