// The weighted sum of a token's rows: rank by rank, in the order of the ranks' first choices. The
// rows of one rank are summed first, one by one, and this partial sum is rounded to 24 bits a
// value. So a rank with many rows may send its partial sum instead.
#pragma once

#include "../numerics.cuh"
#include "../warp.cuh"

// The terms of a sum: one for each lane, or none. In order, the first lanes have them. Masks have a
// bit for each lane.
struct Terms {
  u64 row;
  float weight;
  u32 rank;  // the term's rank; larger than any rank if there is no term
  u32 has;
  u32 begins;    // in ordered terms, the first of each rank
  u32 partials;  // terms that are a rank's partial sum, in two rows: the upper 16 bits of its values, and the next 8
};

// Sorts terms into the order in which they are summed.
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
    u32 owner = __ballot_sync(ALL, is_there && place == nth);
    if (lane == nth) from = static_cast<u32>(__ffs(static_cast<int>(owner)) - 1);
  }
  int source = static_cast<int>(from);
  u32 rank = __shfl_sync(ALL, terms.rank, source),
      before = __shfl_sync(ALL, rank, static_cast<int>(lane == 0 ? 0 : lane - 1));
  bool has = lane < count, is_partial = (terms.partials >> from & 1) != 0;
  return {__shfl_sync(ALL, terms.row, source),
          __shfl_sync(ALL, terms.weight, source),
          rank,
          __ballot_sync(ALL, has),
          __ballot_sync(ALL, has && (lane == 0 || rank != before)),
          __ballot_sync(ALL, has && is_partial)};
}

// The nearest number with the upper 24 bits of an f32, ties away from zero; subnormal numbers are
// truncated. As numerics/sum.rs.
__device__ __forceinline__ float nearest_of_24_bits(float value) {
  u32 power = __float_as_uint(value) & 0xff800000;
  return __uint_as_float(__float_as_uint(__fmaf_rn(__uint_as_float(power), 0x1p-16f, value)) & 0xffffff00);
}

// Rounds a rank's complete partial sum.
__device__ __forceinline__ void round_partial(Sums& partial) {
#pragma unroll
  for (u32 i = 0; i < 8; i++) partial.of[i] = nearest_of_24_bits(partial.of[i]);
}

// Adds a rounded partial sum to a sum, and clears it.
__device__ __forceinline__ void add_rounded(Sums& sums, Sums& partial) {
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    sums.of[i] = __fadd_rn(sums.of[i], partial.of[i]);
    partial.of[i] = 0.0f;
  }
}

// Rounds a partial sum, and adds it to a sum.
__device__ __forceinline__ void end_partial(Sums& sums, Sums& partial) {
  round_partial(partial);
  add_rounded(sums, partial);
}

// The upper 16 bits of a partial sum's values: a vector.
__device__ __forceinline__ Vector upper_of(const Sums& partial) {
  u32 words[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    words[i] = __byte_perm(__float_as_uint(partial.of[2 * i]), __float_as_uint(partial.of[2 * i + 1]), 0x7632);
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void put_upper(Sums& partial, const Vector& v) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    partial.of[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000);
}

// The next 8 bits of a partial sum's values: half a vector.
__device__ __forceinline__ Vector lower_of(const Sums& partial) {
  u32 pairs[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    pairs[i] = __byte_perm(__float_as_uint(partial.of[2 * i]), __float_as_uint(partial.of[2 * i + 1]), 0x0051);
  return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410), 0, 0};
}

// Sets the lower bits from `v`, which has those of two neighbours: the second half if `is_odd`.
__device__ __forceinline__ void put_lower(Sums& partial, const Vector& v, bool is_odd) {
  u32 words[2] = {is_odd ? v.z : v.x, is_odd ? v.w : v.y};
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    partial.of[i] =
        __uint_as_float(__byte_perm(__float_as_uint(partial.of[i]), words[i / 4], 0x3200 | (4 + i % 4) << 4));
  }
}

// Terms that a lane loads at a time: of a whole sum, and of a rank's partial sum.
constexpr u32 SUM_ROUND = 8;
constexpr u32 PARTIAL_ROUND = 4;
// Vectors of each term in flight together, where a token's rows come in pieces.
constexpr u32 PIECE_WIDTH = 2;

// Loads `WIDTH` vectors of each term in `which`, `AT_ONCE` terms at a time, and calls `each(nth,
// vectors)` for the `nth`.
template <u32 AT_ONCE, u32 WIDTH, typename Each>
__device__ __forceinline__ void for_terms(const Terms& terms, u32 which, u32 first, u32 end, Each each) {
  // Two lanes load the same vector with the lower bits of a partial sum. `first` is a multiple of
  // the lanes.
  u32 at = first + lane_of_thread(), lower = terms.partials & ~terms.begins;
#pragma unroll 1
  for (u32 left = which; left != 0;) {
    Vector v[AT_ONCE][WIDTH];
    u32 loading = left;
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (loading == 0) continue;
      int nth = __ffs(static_cast<int>(loading)) - 1;
      u64 row = __shfl_sync(ALL, terms.row, nth);
      u32 is_lower = lower >> nth & 1;
      loading &= loading - 1;
#pragma unroll
      for (u32 j = 0; j < WIDTH; j++) {
        if (at + j * LANES < end) v[i][j] = load_vector(row + 16ull * (at + j * LANES >> is_lower));
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

// Adds a rank's terms in `which` to its partial sum of some vectors.
template <u32 AT_ONCE, u32 WIDTH>
__device__ __forceinline__ void add_partial(const Terms& terms, u32 which, u32 first, u32 end, Sums (&partial)[WIDTH]) {
  for_terms<AT_ONCE, WIDTH>(terms, which, first, end, [&](u32 nth, const Vector(&v)[WIDTH]) {
    float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(nth));
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) add_weighted(partial[j], v[j], weight);
  });
}

// A rank's rounded partial sum of some vectors, and its terms; or none.
template <u32 WIDTH>
struct KnownPartial {
  u32 terms;
  Sums of[WIDTH];
};

// Sums some vectors of ordered terms, with one rank's partial sum perhaps known: calls `store(at,
// sums)` for each vector.
template <u32 AT_ONCE, u32 WIDTH, typename Store>
__device__ __forceinline__ void sum_vectors(const Terms& terms, KnownPartial<WIDTH>& known, u32 first, u32 end,
                                            Store store) {
  Sums sums[WIDTH] = {}, partial[WIDTH] = {};
  // Lanes of the terms before the known ones; all, if none are known, or they have been added.
  constexpr u32 NONE_LEFT = ALL;
  u32 before = (known.terms & (0u - known.terms)) - 1;
  auto add_known = [&] {
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) {
      end_partial(sums[j], partial[j]);
      add_rounded(sums[j], known.of[j]);
    }
    before = NONE_LEFT;
  };
  for_terms<AT_ONCE, WIDTH>(terms, terms.has & ~known.terms, first, end, [&](u32 nth, const Vector(&v)[WIDTH]) {
    if ((before >> nth & 1) == 0) add_known();
    float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(nth));
    bool begins = (terms.begins >> nth & 1) != 0, is_partial = (terms.partials >> nth & 1) != 0;
#pragma unroll
    for (u32 j = 0; j < WIDTH; j++) {
      if (begins) end_partial(sums[j], partial[j]);
      if (is_partial && begins) {
        put_upper(partial[j], v[j]);
      } else if (is_partial) {
        put_lower(partial[j], v[j], lane_of_thread() % 2 != 0);
      } else {
        add_weighted(partial[j], v[j], weight);
      }
    }
  });
  if (before != NONE_LEFT) add_known();
#pragma unroll
  for (u32 j = 0; j < WIDTH; j++) {
    end_partial(sums[j], partial[j]);
    u32 at = first + lane_of_thread() + j * LANES;
    if (at < end) store(at, sums[j]);
  }
}

// Sums a slice of ordered terms to a row.
__device__ __forceinline__ void sum_terms(const Terms& terms, u64 out, const Slice& slice) {
  KnownPartial<1> none = {};
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += LANES) {
    sum_vectors<SUM_ROUND>(terms, none, first, slice.end,
                           [&](u32 at, const Sums& sums) { store_vector(out + 16ull * at, rounded(sums)); });
  }
}
