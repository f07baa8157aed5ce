"""NIXL EP's buffer."""

from __future__ import annotations

import os
from typing import Any, Iterable

import torch
from uccl.ep import Config, EventHandle, EventOverlap
from uccl.ep._checks import check, check_count, refuse_unknown

from nixl_ep._connections import Connections
from nixl_ep._engine import Engine, refuses_nvlink
from nixl_ep._members import Members
from nixl_ep._modes import HighThroughput, LowLatency
from nixl_ep._sizes import Sizes

__all__ = ["Buffer", "Config", "DEFAULT_TIMEOUT_MS", "EventHandle", "EventOverlap"]

#: Milliseconds that a call waits for its peers.
DEFAULT_TIMEOUT_MS = 30_000


class Buffer(Sizes, LowLatency, HighThroughput):
    """Memory of a rank, and the calls that move tokens between the ranks that are connected.

    Making a buffer is local, and so is :meth:`update_memory_buffers`. Ranks meet in
    :meth:`connect_ranks`.

    Args:
        disable_ll_nvlink: Whether ranks with GPUs reach each other through host memory. UCX's
            variable ``UCX_TLS`` says the same, if it leaves out ``cuda_ipc``.
        explicitly_destroy: Only recorded.
        rank: This rank's number.
        low_latency_mode: Whether a call goes on without peers that are late, and masks them. Else it
            fails. A buffer has the calls of both modes.
        group: The ranks' ``torch.distributed`` group, by which they meet without a store.
        comm: An MPI communicator, in place of ``group``.
        tcp_store_group: A ``torch.distributed.Store`` by which ranks meet.
        timeout_ms: Milliseconds that a call waits for its peers.

    Raises:
        NotImplementedError: For an unknown keyword that is neither None nor False.
        ValueError: For ``group`` together with ``comm``, or a number out of range.
    """

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        **unknown: Any,
    ) -> None:
        # Earlier releases asked for masks; later ones always have them.
        unknown.pop("enable_shrink", None)
        refuse_unknown("nixl_ep.Buffer", unknown)
        if group is not None and comm is not None:
            raise ValueError("group and comm exclude each other")
        check_count("rank", rank)
        check_count("timeout_ms", timeout_ms, 1)
        self.rank, self.group_size = rank, 0
        self.low_latency_mode, self.timeout_ms = low_latency_mode, timeout_ms
        self.explicitly_destroy = explicitly_destroy
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self.num_nvl_bytes = self.num_rdma_bytes = 0
        self._by_host = disable_ll_nvlink or refuses_nvlink(os.environ.get("UCX_TLS"))
        self._connections: Connections | None = None
        self._is_destroyed = False

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int,
        num_nvl_bytes: int = 0,
    ) -> None:
        """Makes the buffer's memory. Once.

        Args:
            num_ranks: The most ranks that may be connected.
            num_experts_per_rank: Experts of each rank, in low latency mode.
            num_rdma_bytes: Bytes for calls; see :meth:`get_low_latency_buffer_size_hint`.
            num_nvl_bytes: More bytes; calls use both together. See
                :meth:`Config.get_nvl_buffer_size_hint`.

        Raises:
            RuntimeError: If it was called before, or there is no GPU that ``UCCL_EP_DEVICE`` names.
            ValueError: For a number out of range.
        """
        if self._connections is not None or self._is_destroyed:
            raise RuntimeError("update_memory_buffers is called once")
        check_count("num_ranks", num_ranks, 1)
        check_count("num_experts_per_rank", num_experts_per_rank, 1)
        check_count("num_rdma_bytes", num_rdma_bytes)
        check_count("num_nvl_bytes", num_nvl_bytes)
        if self.rank >= num_ranks:
            raise ValueError(f"rank is 0 to num_ranks - 1, not {self.rank} of {num_ranks} ranks")

        def make(by_host: bool) -> Engine:
            mode = {
                "low_latency_mode": self.low_latency_mode,
                "enable_shrink": self.low_latency_mode,
                "allow_nvlink_for_low_latency_mode": not by_host,
                "timeout": self.timeout_ms / 1000,
            }
            return Engine(self.rank, num_ranks, (num_nvl_bytes, num_rdma_bytes), mode)

        members = Members(self.rank, num_ranks)
        self._connections = Connections(make, self._by_host, members, num_experts_per_rank)
        self.group_size, self._experts = num_ranks, num_experts_per_rank
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """Sets the store of later meetings.

        Args:
            tcp_store_group: A ``torch.distributed.Store``; or None.
        """
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """Meets ranks that are new, or have come back.

        Every rank that takes part calls this with the ranks that it is not connected to; new ones
        name all others. On GPUs it waits for the calls on the current stream and on the
        communication stream; none may be on other streams.

        Args:
            remote_ranks: The ranks, among which this one, and connected ones, have no effect.
            activate: Whether they take part at once. Else they are masked until
                :meth:`update_mask_buffer` lets them take part, and calls go on without them as
                before. That waits for all ranks of the meeting; a new rank, which activates the
                others, waits on a thread of its own, and may make calls with all others masked.

        Raises:
            RuntimeError: Before :meth:`update_memory_buffers`.
            TimeoutError: If a rank does not come within 300 seconds. It is named.
            ValueError: For an empty list, a rank that the buffer has no room for, ranks with
                different sizes, or without a store or a group of all of them.
        """
        self._there().connect(
            remote_ranks, bool(activate), self.tcp_store_group, self.group, self.comm
        )

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        """Leaves ranks out, until they are connected anew. Tells no other rank.

        Mapped memory of theirs is dropped when ranks meet next.

        Args:
            remote_ranks: Ranks that are connected, in any order.

        Raises:
            RuntimeError: Before :meth:`update_memory_buffers`.
            ValueError: For an empty list, this rank, or one that is not connected.
        """
        self._there().disconnect(remote_ranks)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of later calls, or lets it take part.

        It tells no other rank, unless the rank was connected with ``activate=False``: then all ranks
        of that meeting meet here. A rank that was masked takes part again if it has made as many
        calls as the others.

        Args:
            rank_to_mask: The rank.
            mask: Whether it is left out.

        Raises:
            RuntimeError: Before :meth:`update_memory_buffers`.
            TimeoutError: If a rank does not come within 300 seconds. It is named.
            ValueError: For a rank that the buffer has no room for, to mask this rank, or to let in
                one that is not connected.
        """
        self._there().mask(rank_to_mask, bool(mask))

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Reads the masks.

        Args:
            mask_status: ``[num_ranks]`` i32: it gets a 1 for each rank that is masked, or not
                connected, else 0.

        Raises:
            RuntimeError: Before :meth:`update_memory_buffers`.
            ValueError: For a tensor with a wrong shape, dtype or device.
        """
        self._there().read_masks(mask_status)

    def clean_mask_buffer(self) -> None:
        """Lets all connected ranks take part."""
        self._there().clean_masks()

    def clean_buffer(self, *sizes: int) -> None:
        """Does nothing: data of earlier calls is recognised by its call number."""
        self._there()

    def barrier(self) -> None:
        """Waits for all ranks that take part, with the timeout of a call, and masks late ones. On a
        GPU the current stream waits."""
        self._there().join().barrier()

    def get_comm_stream(self) -> Any:
        """Returns the stream of asynchronous calls; None on the CPU."""
        return self._there().engine.get_comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Makes a view of this rank's own memory, which the next call overwrites.

        Args:
            dtype: The view's dtype.
            size: Its shape; one dimension, up to the end, if it is None.
            offset: Bytes before it.
            use_rdma_buffer: Whether ``offset`` counts from the end of ``num_nvl_bytes``.

        Returns:
            The view.

        Raises:
            ValueError: If the memory ends before the view does.
        """
        engine = self._there().engine
        return engine.get_local_buffer_tensor(dtype, size, offset, use_rdma_buffer)

    @property
    def runtime(self) -> Any:
        """The buffer of :mod:`uccl.ep` below; None before :meth:`update_memory_buffers` and after
        :meth:`destroy`."""
        return None if self._connections is None else self._connections.engine

    def check(self) -> None:
        """Raises the failure of a call on a GPU that has ended. It waits for no call."""
        self._there().engine.check()

    def destroy(self) -> None:
        """Drops the buffer's memory. Local: other ranks notice that this one is gone."""
        connections, self._connections, self._is_destroyed = self._connections, None, True
        if connections is not None:
            connections.close()

    def _there(self) -> Connections:
        """The connections. Raises if there is no memory."""
        if self._connections is None:
            raise RuntimeError(
                "the buffer has been destroyed"
                if self._is_destroyed
                else "update_memory_buffers comes first: it makes the buffer's memory"
            )
        return self._connections

    def _num_ranks_of(self, num_experts: int | None) -> int:
        """The ranks that have so many experts: at least all that take part."""
        members = self._there().members
        if num_experts is None:
            return members.bound
        bound, rest = divmod(num_experts, self._experts)
        if rest or not members.bound <= bound <= members.num_ranks:
            raise ValueError(
                f"num_experts is a multiple of {self._experts}, from "
                f"{members.bound * self._experts} (ranks up to {members.bound - 1} take part) to "
                f"{members.num_ranks * self._experts} (update_memory_buffers), not {num_experts}"
            )
        return bound

    def _check_waits(self, name: str, waits: torch.Tensor | None, ranks: int) -> None:
        """Checks a tensor of waits by rank."""
        if waits is not None:
            check(name, waits, (ranks,), torch.int64, device=self._there().engine.device)
