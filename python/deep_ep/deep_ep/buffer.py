"""Where earlier versions of DeepEP had its buffer."""

from deep_ep.buffers.legacy import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
