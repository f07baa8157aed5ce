// The weighted sum of a token's rows: rank by rank, in the order of the ranks' first choices. Of each rank its choices are summed before,
// one by one; so that a rank may send its part, in f32, where there are many.
#pragma once

#include "ep_numerics.cuh"
#include "ep_warp.cuh"

// The terms of a sum: a lane has one, or none; when they are in order the first lanes have them. Masks have a bit for each lane.
struct Terms {
  u64 row;
  float weight;
  u32 rank;    // whose term it is; more than any if there is none
  u32 has;
  u32 begins;  // of terms in order, the first of each rank
  u32 halves;  // those that are half of a rank's part, in f32; its first has the lower values of each vector
};

// Puts terms in the order in which they are summed.
__device__ __forceinline__ Terms in_order(const Terms& terms) {
  u32 lane = lane_of_thread(), count = __popc(terms.has), place = 0, from = lane;
  bool is_there = (terms.has >> lane & 1) != 0;
  u32 first = __ffs(static_cast<int>(__match_any_sync(ALL, terms.rank)));
#pragma unroll 1
  for (u32 left = terms.has; left != 0; left &= left - 1) {
    int other = __ffs(static_cast<int>(left)) - 1;
    u32 theirs = __shfl_sync(ALL, first, other);
    if (theirs < first || (theirs == first && other < static_cast<int>(lane))) place++;
  }
#pragma unroll 1
  for (u32 nth = 0; nth < count; nth++) {
    u32 whose = __ballot_sync(ALL, is_there && place == nth);
    if (lane == nth) from = static_cast<u32>(__ffs(static_cast<int>(whose)) - 1);
  }
  int source = static_cast<int>(from);
  u32 rank = __shfl_sync(ALL, terms.rank, source), before = __shfl_sync(ALL, rank, static_cast<int>(lane == 0 ? 0 : lane - 1));
  bool has = lane < count, is_half = (terms.halves >> from & 1) != 0;
  return {__shfl_sync(ALL, terms.row, source),
          __shfl_sync(ALL, terms.weight, source),
          rank,
          __ballot_sync(ALL, has),
          __ballot_sync(ALL, has && (lane == 0 || rank != before)),
          __ballot_sync(ALL, has && is_half)};
}

// Adds a rank's part to a sum.
__device__ __forceinline__ void end_part(Sums& sums, Sums& part) {
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    sums.of[i] = __fadd_rn(sums.of[i], part.of[i]);
    part.of[i] = 0.0f;
  }
}

// Half of the values of a part.
__device__ __forceinline__ Vector half_of(const Sums& sums, bool is_upper) {
  u32 words[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) words[i] = __float_as_uint(is_upper ? sums.of[4 + i] : sums.of[i]);
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void put_half(Sums& part, const Vector& v, bool is_upper) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 i = 0; i < 4; i++) (is_upper ? part.of[4 + i] : part.of[i]) = __uint_as_float(words[i]);
}

// Terms that a lane loads at a time: of a whole sum, and of a rank's part.
constexpr u32 SUM_ROUND = 8;
constexpr u32 PART_ROUND = 4;

// Sums some vectors of terms in order, so many terms at a time: `store(at, sums)` has each.
template <u32 AT_ONCE, typename Store>
__device__ __forceinline__ void sum_each(const Terms& terms, const Slice& slice, Store store) {
  u32 count = __popc(terms.has);
#pragma unroll 1
  for (u32 at = slice.begin + lane_of_thread(); at - lane_of_thread() < slice.end; at += LANES) {
    Sums sums = {}, part = {};
#pragma unroll 1
    for (u32 first = 0; first < count; first += AT_ONCE) {
      Vector v[AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) {
        if (first + i >= count) continue;
        u64 row = __shfl_sync(ALL, terms.row, static_cast<int>(first + i));
        if (at < slice.end) v[i] = load_vector(row + 16ull * at);
      }
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) {
        if (first + i >= count) continue;
        float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(first + i));
        bool begins = (terms.begins >> (first + i) & 1) != 0;
        if (begins) end_part(sums, part);
        if ((terms.halves >> (first + i) & 1) != 0) {
          put_half(part, v[i], !begins);
        } else {
          add_weighted(part, v[i], weight);
        }
      }
    }
    end_part(sums, part);
    if (at < slice.end) store(at, sums);
  }
}

// Sums some vectors of terms in order to a row.
__device__ __forceinline__ void sum_terms(const Terms& terms, u64 out, const Slice& slice) {
  sum_each<SUM_ROUND>(terms, slice, [&](u32 at, const Sums& sums) { store_vector(out + 16ull * at, rounded(sums)); });
}
