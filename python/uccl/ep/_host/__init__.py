"""Expert parallelism of ranks with tensors on the CPU."""
