"""The module of the buffer in earlier versions of DeepEP."""

from deep_ep.buffers.legacy import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
