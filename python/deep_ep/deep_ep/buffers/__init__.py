"""Where DeepEP has its buffers."""
