// Addresses of memory that changes when ranks meet anew. They are in the GPU's memory and not in
// the parameters of a launch, so a graph that was captured before a meeting works after it.
#pragma once

#include "rank_set.cuh"

__device__ __forceinline__ const UcclEpAddresses* addresses_of(const UcclEpGroup& g) {
  return reinterpret_cast<const UcclEpAddresses*>(g.addresses);
}

// The window of a rank, or the mirror of it; 0 if the rank is absent.
__device__ __forceinline__ u64 window_of(const UcclEpGroup& g, u32 rank) {
  return load_fixed(&addresses_of(g)->windows[rank]);
}

// The same, but of this rank its staging copy.
__device__ __forceinline__ u64 row_window_of(const UcclEpGroup& g, u32 rank) {
  return load_fixed(&addresses_of(g)->row_windows[rank]);
}

// This rank's window, or its staging copy: see staging.cuh.
__device__ __forceinline__ u64 staging_of(const UcclEpGroup& g) { return load_fixed(&addresses_of(g)->staging); }

// The base of commands' sources.
__device__ __forceinline__ u64 mirrors_of(const UcclEpGroup& g) { return load_fixed(&addresses_of(g)->mirrors); }

// The ring of commands, and the number of its slots: see far.cuh.
__device__ __forceinline__ u64 ring_of(const UcclEpGroup& g) { return load_fixed(&addresses_of(g)->ring); }
__device__ __forceinline__ u64 ring_slots_of(const UcclEpGroup& g) { return load_fixed(&addresses_of(g)->ring_slots); }

// A word of the set of ranks whose windows this GPU does not reach. GPUs that reach each other read
// nothing.
__device__ __forceinline__ u64 far_of(const UcclEpGroup& g, u32 word) {
  return g.via_host == 0 ? 0 : load_fixed(&addresses_of(g)->far.words[word]);
}

__device__ __forceinline__ bool has_far(const UcclEpGroup& g) {
  u64 any = 0;
  for_words([&](u32 word) { any |= far_of(g, word); });
  return any != 0;
}
__device__ __forceinline__ bool is_far(const UcclEpGroup& g, u32 rank) {
  return (far_of(g, word_of_rank(rank)) >> bit_of_rank(rank) & 1) != 0;
}
