"""One rank's end of a group of ranks with GPUs, for calls of all modes.

A call enqueues kernels on torch's current stream, or on the communication stream, and returns. Its
tensors belong to the current stream, so torch reuses their memory only for work behind the call's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from uccl import _core
from uccl.ep._backend import BufferParams, Exchange
from uccl.ep._cuda.streams import Streams, new_comm_stream, shared_comm_stream
from uccl.ep._ranks import Ranks, node_of_environment
from uccl.ep._tensors import address, pool_tensor


class HasScratch(Protocol):
    """A dispatch's handle."""

    memory: torch.Tensor
    free_scratch: int
    """The address in ``memory`` of scratch that no combine has used, or 0."""


class CudaGroup(Streams):
    """One rank's end of a group of GPUs. Calls of both modes are numbered together."""

    def __init__(
        self,
        ranks: Ranks,
        params: BufferParams,
        timeout: float,
        device: torch.device,
    ) -> None:
        torch.cuda.init()
        super().__init__(
            device,
            shared_comm_stream(device, ranks.rank)
            if params.shares_comm_stream
            else new_comm_stream(device),
        )
        self.rank, self.ranks = ranks.rank, ranks.size
        #: A tensor of this rank's whole pool, once a caller has asked for a part of it.
        self._pool: torch.Tensor | None = None
        #: The empty tables of channels in DeepEP's handles.
        self.channels = self.empty((ranks.size, 0), torch.int32)
        self.native = _core.EpCudaGroup(
            rank=ranks.rank,
            ranks=ranks.size,
            pool=max(params.pool_bytes, 1),
            timeout=timeout,
            masks_late=params.masks_late,
            device=device.index,
            node=node_of_environment(),
            via_host=params.via_host,
            in_fabric=params.in_fabric,
            exchange=ranks.exchange,
        )
        refusal = self.native.fabric_refusal
        if params.says_fabric and refusal is not None:
            logging.getLogger("uccl").warning("use_fabric has no effect: %s", refusal)
        why = self.native.unreached_reason
        if why is not None:
            warnings.warn(
                "GPUs of one node, or of one NVLink domain, do not reach each other's memory, so calls take the slower way "
                f"by the host's: {why}",
                RuntimeWarning,
                stacklevel=7,
            )

    def mask(
        self,
        left_out: Sequence[int] = (),
        let_in: Sequence[int] = (),
        status: torch.Tensor | None = None,
    ) -> None:
        """Enqueues a change of masks: ranks that are left out, and others that are readmitted.
        ``status`` then gets by rank which are left out."""
        self.native.mask(
            left_out=list(left_out),
            let_in=list(let_in),
            status=address(status),
            stream=self.stream(),
        )

    def regroup(self, exchange: Exchange) -> None:
        """Joins the group anew, with the ranks that exchange bytes now, behind the calls on the
        current stream and on the communication stream."""
        streams = list({self.stream(), self.comm_stream.cuda_stream})
        self.native.regroup(streams=streams, exchange=exchange)
        # Tensors that callers hold keep the pool that was shared with the ranks before.
        self._pool = None

    def combine_scratch_of(self, handle: HasScratch) -> tuple[torch.Tensor, int]:
        """Memory for a combine's scratch, and its address: the handle's for the first combine, else
        new memory."""
        if handle.free_scratch:
            scratch, handle.free_scratch = handle.free_scratch, 0
            return handle.memory, scratch
        memory = self.empty((_core.ep_cuda_combine_scratch_len(),), torch.uint8)
        return memory, memory.data_ptr()

    def rows_in_pool(
        self, offset: int, stride: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows in this rank's own pool, from byte ``offset`` on, ``stride`` bytes apart."""
        if self._pool is None:
            self._pool = pool_tensor(self.native, torch.int32, 0, None, self.device)
        flat, size = self._pool.view(dtype), dtype.itemsize
        behind = (1,) if len(shape) > 1 else ()
        return flat.as_strided(shape, (stride // size, *behind), offset // size)

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`empty`, for rows that a combine may send back without a copy: any memory will
        do."""
        return self.empty(shape, dtype)
