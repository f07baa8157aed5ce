"""DeepEP's name for :mod:`uccl.ep`: programs that import ``deep_ep`` run unchanged.

It is a distribution of its own, so that no user gets this name unasked. Buffers are on the current
GPU where there is one, because DeepEP's programs have no argument for it; ``UCCL_EP_DEVICE=cpu``
keeps them on the CPU.
"""

from uccl.ep import (
    Config,
    EPHandle,
    EventHandle,
    EventOverlap,
    destroy_uccl,
    get_logical_domain_size,
    get_physical_domain_size,
    initialize_uccl,
    topk_idx_t,
)

from deep_ep import buffer, buffers, utils
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.buffers.legacy import Buffer

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "buffer",
    "buffers",
    "destroy_uccl",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "initialize_uccl",
    "topk_idx_t",
    "utils",
]

#: The version of DeepEP that this interface follows.
__version__ = "2.1.0"
