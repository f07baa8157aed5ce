"""Names that callers import from here."""

from uccl.ep import EventHandle, EventOverlap

from deep_ep.utils import event

__all__ = ["EventHandle", "EventOverlap", "event"]
