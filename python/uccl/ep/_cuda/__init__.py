"""Expert parallelism of ranks with tensors on GPUs."""
