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
// Vectors of each that are on their way together where a token's rows come in pieces.
constexpr u32 PIECE_WIDTH = 2;

// Loads `WIDTH` vectors of each of some terms, so many terms at a time: `each(nth, vectors)` has those of the `nth`.
template <u32 AT_ONCE, u32 WIDTH, typename Each>
__device__ __forceinline__ void for_terms(const Terms& terms, u32 which, u32 first, u32 end, Each each) {
  u32 at = first + lane_of_thread();
#pragma unroll 1
  for (u32 left = which; left != 0;) {
    Vector v[AT_ONCE][WIDTH];
    u32 loading = left;
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (loading == 0) continue;
      u64 row = __shfl_sync(ALL, terms.row, __ffs(static_cast<int>(loading)) - 1);
      loading &= loading - 1;
#pragma unroll
      for (u32 j = 0; j < WIDTH; j++) {
        if (at + j * LANES < end) v[i][j] = load_vector(row + 16ull * (at + j * LANES));
      }
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (left == 0) continue;
      each(static_cast<u32>(__ffs(static_cast<int>(left)) - 1), v[i]);
      left &= left - 1;
    }
  }
}

// The part of a rank's terms in the sums of some vectors.
template <u32 AT_ONCE, u32 WIDTH>
__device__ __forceinline__ void add_part(const Terms& terms, u32 which, u32 first, u32 end, Sums (&part)[WIDTH]) {
  for_terms<AT_ONCE, WIDTH>(terms, which, first, end, [&](u32 nth, const Vector (&v)[WIDTH]) {
    float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(nth));
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) add_weighted(part[j], v[j], weight);
  });
}

// A rank's part of some vectors, which has been summed, and the terms that it is of; or none.
template <u32 WIDTH>
struct KnownPart {
  u32 terms;
  Sums of[WIDTH];
};

// Sums some vectors of terms in order, of which those of one rank may have been summed: `store(at, sums)` has each.
template <u32 AT_ONCE, u32 WIDTH, typename Store>
__device__ __forceinline__ void sum_vectors(const Terms& terms, KnownPart<WIDTH>& known, u32 first, u32 end, Store store) {
  Sums sums[WIDTH] = {}, part[WIDTH] = {};
  // Lanes of terms before the known ones; all, if there are none, or they have been added.
  constexpr u32 NONE_LEFT = ALL;
  u32 before = (known.terms & (0u - known.terms)) - 1;
  auto add_known = [&] {
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) {
      end_part(sums[j], part[j]);
      end_part(sums[j], known.of[j]);
    }
    before = NONE_LEFT;
  };
  for_terms<AT_ONCE, WIDTH>(terms, terms.has & ~known.terms, first, end, [&](u32 nth, const Vector (&v)[WIDTH]) {
    if ((before >> nth & 1) == 0) add_known();
    float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(nth));
    bool begins = (terms.begins >> nth & 1) != 0, is_half = (terms.halves >> nth & 1) != 0;
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) {
      if (begins) end_part(sums[j], part[j]);
      if (is_half) {
        put_half(part[j], v[j], !begins);
      } else {
        add_weighted(part[j], v[j], weight);
      }
    }
  });
  if (before != NONE_LEFT) add_known();
#pragma unroll
  for (u32 j = 0; j < WIDTH; j++) {
    end_part(sums[j], part[j]);
    u32 at = first + lane_of_thread() + j * LANES;
    if (at < end) store(at, sums[j]);
  }
}

// Sums a slice of terms in order, so many terms at a time.
template <u32 AT_ONCE, typename Store>
__device__ __forceinline__ void sum_each(const Terms& terms, const Slice& slice, Store store) {
  KnownPart<1> none = {};
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += LANES) {
    sum_vectors<AT_ONCE, 1>(terms, none, first, slice.end, store);
  }
}

// Sums some vectors of terms in order to a row.
__device__ __forceinline__ void sum_terms(const Terms& terms, u64 out, const Slice& slice) {
  sum_each<SUM_ROUND>(terms, slice, [&](u32 at, const Sums& sums) { store_vector(out + 16ull * at, rounded(sums)); });
}
