// What this GPU's memory has of its rank's window, where that is in the host's: rows that stay with the rank are written there, and what
// has come from others is fetched to the same place, once and whole, before it is read. Else both are the same memory.
#pragma once

#include "ep.cuh"
#include "ep_warp.cuh"

// Where what is at an address of this rank's window is at home.
__device__ __forceinline__ u64 at_home(const UcclEpGroup& g, u64 address) { return g.home + (address - g.windows[g.rank]); }

// Where a rank's place of a call begins, for rows that this rank writes.
__device__ __forceinline__ u64 place_of_rank(const UcclEpGroup& g, const UcclEpPlaced& call, u32 rank) {
  return (rank == g.rank ? g.home : g.windows[rank]) + call.place;
}

// Where this rank's own place of a call begins, for rows that have come from a rank and are not fetched.
__device__ __forceinline__ u64 place_with_rows_of(const UcclEpGroup& g, const UcclEpPlaced& call, u32 rank) {
  return (rank == g.rank ? g.home : g.windows[g.rank]) + call.place;
}

// Where it begins for what is fetched.
__device__ __forceinline__ u64 place_at_home(const UcclEpGroup& g, const UcclEpPlaced& call) { return g.home + call.place; }
