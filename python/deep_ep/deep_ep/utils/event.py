"""Names that callers import from here."""

from uccl.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
