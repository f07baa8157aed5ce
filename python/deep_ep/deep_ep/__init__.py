"""DeepEP's name for :mod:`uccl.ep`: programs that import ``deep_ep`` run unchanged.

A distribution of its own, so that nobody gets this name who has not asked for it.
"""

from uccl.ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    destroy_uccl,
    get_logical_domain_size,
    get_physical_domain_size,
    initialize_uccl,
    topk_idx_t,
)

#: The version of DeepEP whose interface this is.
__version__ = "2.1.0"

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "destroy_uccl",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "initialize_uccl",
    "topk_idx_t",
]
