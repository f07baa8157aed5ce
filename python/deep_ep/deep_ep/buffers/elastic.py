"""DeepEP's second interface."""

from uccl import ep
from uccl.ep import EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]


class ElasticBuffer(ep.ElasticBuffer):
    """As :class:`uccl.ep.ElasticBuffer`, on the current GPU where there is one."""

    prefers_gpu = True
