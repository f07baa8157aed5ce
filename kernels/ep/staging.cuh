// The staging copy, in this GPU's memory, of a window in host memory. Rows from this rank to itself
// are written to the copy; data from other ranks is fetched to the same place in it, once and
// whole, before it is read. Elsewhere window and copy are the same memory.
#pragma once

#include "params.cuh"
#include "warp.cuh"

// The address in the staging copy of an address of this rank's window.
__device__ __forceinline__ u64 staging_address(const UcclEpGroup& g, u64 address) {
  return g.staging + (address - g.windows[g.rank]);
}

// Where the call's place of a rank begins, for rows that this rank writes.
__device__ __forceinline__ u64 place_at_rank(const UcclEpGroup& g, const UcclEpPlacement& call, u32 rank) {
  return (rank == g.rank ? g.staging : g.windows[rank]) + call.place;
}

// Where this rank's own place begins, for rows from a rank that are not fetched.
__device__ __forceinline__ u64 place_of_rows_from(const UcclEpGroup& g, const UcclEpPlacement& call, u32 rank) {
  return (rank == g.rank ? g.staging : g.windows[g.rank]) + call.place;
}

// Where this rank's own place begins, for fetched data.
__device__ __forceinline__ u64 staged_place(const UcclEpGroup& g, const UcclEpPlacement& call) {
  return g.staging + call.place;
}
