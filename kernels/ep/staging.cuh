// The staging copy, in this GPU's memory, of a window in host memory. Rows from this rank to itself
// are written to the copy; data from other ranks is fetched to the same place in it, once and
// whole, before it is read. Elsewhere window and copy are the same memory.
#pragma once

#include "addresses.cuh"
#include "warp.cuh"

// A call's number and place, and the windows for its rows, which are read once for a block: by rank,
// of this one its staging copy.
struct PlacedCall : UcclEpPlacement {
  u64 row_windows[RANKS];
  u64 staged;  // where this rank's own place begins, for fetched data
};

// The address in the staging copy of an address of this rank's window.
__device__ __forceinline__ u64 staging_address(const UcclEpGroup& g, u64 address) {
  return g.via_host == 0 ? address : staging_of(g) + (address - window_of(g, g.rank));
}

// Where the call's place of a rank begins, for rows that this rank writes.
__device__ __forceinline__ u64 place_at_rank(const PlacedCall& call, u32 rank) {
  return call.row_windows[rank] + call.place;
}

// Where this rank's own place begins, for rows from a rank that are not fetched.
__device__ __forceinline__ u64 place_of_rows_from(const UcclEpGroup& g, const PlacedCall& call, u32 rank) {
  return rank == g.rank || g.via_host == 0 ? call.staged : window_of(g, g.rank) + call.place;
}
