// Sets of ranks, a bit for each. The kernels are compiled for two sizes of groups. In ep.cu a set is
// one word, and a lane of a warp has two ranks. In wide.cu a set has several words, which stay in
// memory, and a lane has one of a token's ranks.
#pragma once

#include "params.cuh"
#include "warp.cuh"

#ifdef UCCL_EP_WIDE
constexpr u32 RANKS = UCCL_EP_MAX_RANKS;
constexpr u32 SEGMENT = UCCL_EP_WIDE_SEGMENT;
#else
constexpr u32 RANKS = UCCL_EP_NARROW_RANKS;
constexpr u32 SEGMENT = UCCL_EP_SEGMENT;
#endif

constexpr u32 WORD_RANKS = 64;
constexpr u32 SET_WORDS = RANKS / WORD_RANKS;
static_assert(RANKS % WORD_RANKS == 0 && SET_WORDS <= UCCL_EP_RANK_WORDS, "whole words");
constexpr bool IS_WIDE = SET_WORDS > 1;

constexpr u32 NO_RANK = RANKS;

// The word of a rank in a set, and its bit there.
__device__ __forceinline__ u32 word_of_rank(u32 rank) { return IS_WIDE ? rank / WORD_RANKS : 0; }
__device__ __forceinline__ u32 bit_of_rank(u32 rank) { return IS_WIDE ? rank % WORD_RANKS : rank; }

__device__ __forceinline__ bool has_rank(const UcclEpRankSet& set, u32 rank) {
  return (set.words[word_of_rank(rank)] >> bit_of_rank(rank) & 1) != 0;
}

// Adds a rank to a set that other threads may change.
__device__ __forceinline__ void add_rank(UcclEpRankSet& set, u32 rank) {
  atomicOr(&set.words[word_of_rank(rank)], 1ull << bit_of_rank(rank));
}

// Calls `each(word)` for the words of a set.
template <typename Each>
__device__ __forceinline__ void for_words(Each each) {
#pragma unroll
  for (u32 word = 0; word < SET_WORDS; word++) each(word);
}

__device__ __forceinline__ void copy_set(UcclEpRankSet& to, const UcclEpRankSet& from) {
  for_words([&](u32 word) { to.words[word] = from.words[word]; });
}

__device__ __forceinline__ void clear_set(UcclEpRankSet& set) {
  for_words([&](u32 word) { set.words[word] = 0; });
}

__device__ __forceinline__ u32 count_bits(u64 bits) {
  return __popc(static_cast<u32>(bits)) + __popc(static_cast<u32>(bits >> 32));
}

// Calls `each(i)` for the first numbers up to `ranks`: a thread has one, where a block has more
// threads than a group has ranks.
template <typename Each>
__device__ __forceinline__ void for_starts(u32 ranks, Each each) {
  if constexpr (RANKS < UCCL_EP_THREADS) {
    if (threadIdx.x <= ranks) each(threadIdx.x);
  } else {
#pragma unroll 1
    for (u32 i = threadIdx.x; i <= ranks; i += blockDim.x) each(i);
  }
}

// Ranks of a token that the lanes of a warp have at a time, in so many sets: in one word each lane has
// two ranks of the group, and otherwise one of the token's.
constexpr u32 TARGET_SETS = IS_WIDE ? 1 : 2;

// The ranks of a token.
#ifdef UCCL_EP_WIDE
struct RanksOfToken {
  const u64* words;

  // The number of ranks.
  __device__ __forceinline__ u32 count() const {
    u32 sum = 0;
#pragma unroll 1
    for (u32 word = 0; word < SET_WORDS; word++) sum += count_bits(words[word]);
    return sum;
  }

  // The number of ranks before one.
  __device__ __forceinline__ u32 before(u32 rank) const {
    u32 sum = count_bits(words[word_of_rank(rank)] & ((1ull << bit_of_rank(rank)) - 1));
#pragma unroll 1
    for (u32 word = 0; word < word_of_rank(rank); word++) sum += count_bits(words[word]);
    return sum;
  }

  // The rank before which there are `nth`, or NO_RANK.
  __device__ __forceinline__ u32 nth(u32 nth) const {
#pragma unroll 1
    for (u32 word = 0; word < SET_WORDS; word++) {
      u64 bits = words[word];
      u32 count = count_bits(bits);
      if (nth >= count) {
        nth -= count;
        continue;
      }
#pragma unroll 1
      for (; nth > 0; nth--) bits &= bits - 1;
      return word * WORD_RANKS + static_cast<u32>(__ffsll(static_cast<long long>(bits))) - 1;
    }
    return NO_RANK;
  }

  // The times that the lanes have to take ranks, and those of this lane.
  __device__ __forceinline__ u32 parts() const { return max((count() + LANES - 1) / LANES, 1u); }
  __device__ __forceinline__ u32 of_lane(u32 part, u32) const { return nth(part * LANES + lane_of_thread()); }
  // The number of ranks before that of a lane.
  __device__ __forceinline__ u32 before_lane(u32 part, u32, u32 lane) const { return part * LANES + lane; }
};

__device__ __forceinline__ RanksOfToken ranks_of_token(u64 masks, u32 token) {
  return {reinterpret_cast<const u64*>(masks) + static_cast<u64>(token) * SET_WORDS};
}
#else
struct RanksOfToken {
  u64 mask;

  __device__ __forceinline__ u32 before(u32 rank) const { return count_bits(mask & ((1ull << rank) - 1)); }
  __device__ __forceinline__ u32 parts() const { return 1; }
  __device__ __forceinline__ u32 of_lane(u32, u32 set) const {
    u32 rank = set * LANES + lane_of_thread();
    return (mask >> rank & 1) != 0 ? rank : NO_RANK;
  }
  __device__ __forceinline__ u32 before_lane(u32, u32 set, u32 lane) const { return before(set * LANES + lane); }
};

__device__ __forceinline__ RanksOfToken ranks_of_token(u64 masks, u32 token) {
  return {reinterpret_cast<const u64*>(masks)[token]};
}
#endif
