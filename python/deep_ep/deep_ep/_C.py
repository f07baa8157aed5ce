"""DeepEP's extension module: its names that programs and DeepEP's helpers import."""

from uccl.ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
