"""NIXL EP's name for :mod:`uccl.ep`: programs that import ``nixl_ep`` run unchanged.

It is a distribution of its own, so that no user gets this name unasked. Buffers are on the current
GPU where there is one, because these programs have no argument for it; ``UCCL_EP_DEVICE=cpu`` keeps
them on the CPU. UCX, NIXL and etcd have no part in it.
"""

from uccl.ep import Config, EventHandle, EventOverlap, topk_idx_t

from nixl_ep import buffer, utils
from nixl_ep.buffer import Buffer

#: Tells this module from NIXL's own, which needs UCX.
IS_OVER_UCCL = True

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "buffer",
    "topk_idx_t",
    "utils",
]
