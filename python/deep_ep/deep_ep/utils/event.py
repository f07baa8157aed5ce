"""Names that callers look for here."""

from uccl.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
