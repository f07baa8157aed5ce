"""Names that callers import from here."""

from deep_ep.utils import event
from uccl.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "event"]
