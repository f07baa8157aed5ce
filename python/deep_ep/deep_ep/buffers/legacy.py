"""DeepEP's first interface."""

from uccl import ep
from uccl.ep import Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]


class Buffer(ep.Buffer):
    """As :class:`uccl.ep.Buffer`, on the current GPU where there is one."""

    prefers_gpu = True
