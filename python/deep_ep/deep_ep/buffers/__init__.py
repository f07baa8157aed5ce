"""DeepEP's buffers."""
