"""Events, in the module where NIXL EP has them."""

from uccl.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
