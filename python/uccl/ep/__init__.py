"""Expert parallelism: tokens go to the ranks of their experts, and the experts' rows come back.

The interface is DeepEP's, of both generations: :class:`Buffer` has its first,
:class:`ElasticBuffer` its second. Tensors are torch's, on the CPU or on GPUs; importing this module
imports torch.
"""

from __future__ import annotations

import torch

from uccl.ep._buffer import Buffer, destroy_uccl, initialize_uccl
from uccl.ep._config import Config
from uccl.ep._elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from uccl.ep._events import EventHandle, EventOverlap
from uccl.ep._handles import EPHandle

#: The dtype of choices that callers make; 32 bits are taken too.
topk_idx_t = torch.int64

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
