//! What this machine has: memory kinds, CPUs, NUMA nodes, NICs, and later GPUs.
