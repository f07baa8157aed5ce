// Routing: the ranks that tokens go to, and their places there. A place is the number of earlier
// tokens that go to the same rank, or chose the same expert. A block has a segment of the tokens,
// and counts places in it; the last block to end sums up the segments. Behind the segments' counts
// it keeps those of all tokens: a caller that asks for a layout gets a copy of its own, which may
// change before the dispatch.
#pragma once

#include "wait.cuh"
#include "warp.cuh"

constexpr u32 NO_EXPERT = 0xffffffff;

// An expert's number, or NO_EXPERT for a choice that is none or invalid.
__device__ __forceinline__ u32 choice_of(const UcclEpRoutes& r, u32 ranks, u64 at) {
  u64 choice = r.is_64 ? reinterpret_cast<const u64*>(r.choices)[at]
                       : static_cast<u64>(reinterpret_cast<const u32*>(r.choices)[at]);
  return choice < static_cast<u64>(ranks) * r.local_experts ? static_cast<u32>(choice) : NO_EXPERT;
}

// Whether a choice is negative, which means none, instead of invalid.
__device__ __forceinline__ bool is_none(const UcclEpRoutes& r, u64 at) {
  return r.is_64 ? reinterpret_cast<const long long*>(r.choices)[at] < 0
                 : reinterpret_cast<const int*>(r.choices)[at] < 0;
}

// A choice and its place in one word: the expert has the lower bits.
constexpr u32 EXPERT_BITS = 11;
static_assert(UCCL_EP_MAX_EXPERTS <= 1u << EXPERT_BITS, "an expert's number");
static_assert(UCCL_EP_MAX_TOKENS <= 1u << (31 - EXPERT_BITS), "a place, with room for NO_EXPERT");

__device__ __forceinline__ u32 pack_choice(u32 expert, u32 place) {
  return expert == NO_EXPERT ? NO_EXPERT : place << EXPERT_BITS | expert;
}

__device__ __forceinline__ u32 expert_of(u32 packed) {
  return packed == NO_EXPERT ? NO_EXPERT : packed & ((1u << EXPERT_BITS) - 1);
}

__device__ __forceinline__ u32 place_of(u32 packed) { return packed == NO_EXPERT ? NO_EXPERT : packed >> EXPERT_BITS; }

// A segment's counts: tokens for each rank, and then tokens that chose each expert. In the end, the
// sums over all segments before.
__device__ __forceinline__ u32* counts_of(const UcclEpRoutes& r, u32 ranks, u32 segment) {
  return reinterpret_cast<u32*>(r.segments) + static_cast<u64>(segment) * (ranks + ranks * r.local_experts);
}

// The count in a column, over the segments before a token's.
__device__ __forceinline__ u32 before_segment(const UcclEpRoutes& r, u32 ranks, u32 token, u32 column) {
  return counts_of(r, ranks, token / SEGMENT)[column];
}

// Counts of earlier tokens that go to the same rank: in the token's segment, or -1 if it does not
// go there; and in the segments before.
struct Slot {
  int in_segment;
  u32 before;

  // The token's place at the rank, or -1.
  __device__ __forceinline__ int place() const { return in_segment < 0 ? -1 : in_segment + static_cast<int>(before); }
};

__device__ __forceinline__ Slot slot_at(const UcclEpRoutes& r, u32 ranks, u32 token, u32 rank) {
  return {reinterpret_cast<const int*>(r.slots)[static_cast<u64>(token) * ranks + rank],
          before_segment(r, ranks, token, rank)};
}

// A token's `nth` choice, and its place among the tokens of the expert; or NO_EXPERT.
__device__ __forceinline__ u32 choice_sent(const UcclEpRoutes& r, u32 ranks, u32 token, u32 nth) {
  u32 choice = reinterpret_cast<const u32*>(r.places)[static_cast<u64>(token) * r.top_k + nth];
  if (choice == NO_EXPERT) return NO_EXPERT;
  return choice + (before_segment(r, ranks, token, ranks + expert_of(choice)) << EXPERT_BITS);
}

// The tokens of a segment that go to a rank, or chose an expert: a bit for each, so their order is
// the same each time.
struct Column {
  static constexpr u32 BITS = 32;
  static constexpr u32 WORDS = SEGMENT / BITS;
  static_assert(SEGMENT % BITS == 0, "whole words");

  u32 words[WORDS];

  // Adds a token of the segment, which may be there already.
  __device__ __forceinline__ void add(u32 token) { atomicOr(&words[token / BITS], 1u << token % BITS); }

  __device__ __forceinline__ bool has(u32 token) const { return (words[token / BITS] >> token % BITS & 1) != 0; }

  // The number of tokens before one, or, for the segment's end, of all.
  __device__ __forceinline__ u32 before(u32 token) const {
    u32 count = 0;
#pragma unroll
    for (u32 word = 0; word < WORDS; word++) {
      u32 bits = token - min(token, word * BITS);
      count += __popc(words[word] & (bits < BITS ? (1u << bits) - 1 : ALL));
    }
    return count;
  }
};

// Words of 32 bits in a set of ranks.
constexpr u32 MASK_WORDS = 2 * SET_WORDS;

struct LayoutState {
  WaitState wait;
  Column columns[RANKS + UCCL_EP_MAX_EXPERTS];  // by rank, and then by expert
  u32 masks[SEGMENT][MASK_WORDS];               // by token: its ranks
};
static_assert(RANKS <= MASK_WORDS * Column::BITS, "ranks of a token");

// A segment of the tokens.
struct Segment {
  u32 number;
  u32 begin;
  u32 end;
};

// Clears the columns and masks. All threads take part.
__device__ __forceinline__ void clear(LayoutState& s, u32 columns) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < columns * Column::WORDS; i += blockDim.x)
    s.columns[i / Column::WORDS].words[i % Column::WORDS] = 0;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < SEGMENT * MASK_WORDS; i += blockDim.x) s.masks[i / MASK_WORDS][i % MASK_WORDS] = 0;
}

// Adds a rank to those of a token of the segment.
__device__ __forceinline__ void add_rank(LayoutState& s, u32 token, u32 rank) {
  s.columns[rank].add(token);
  atomicOr(&s.masks[token][rank / Column::BITS], 1u << rank % Column::BITS);
}

// Whether a choice is invalid: neither an expert nor none.
__device__ __forceinline__ bool is_invalid_choice(const UcclEpRoutes& r, u32 ranks, u64 at) {
  return choice_of(r, ranks, at) == NO_EXPERT && !is_none(r, at);
}

// Sets a fault for the first invalid choice of a token that has one. One thread.
UCCL_COLD void set_choice_fault(const UcclEpLayout& p, WaitState& w, u32 token) {
  const UcclEpRoutes& r = p.routes;
  u64 first = static_cast<u64>(token) * r.top_k;
  u32 nth = 0;
#pragma unroll 1
  while (nth + 1 < r.top_k && !is_invalid_choice(r, p.group.ranks, first + nth)) nth++;
  w.expected[p.group.rank] = token;
  w.seen[p.group.rank] = nth;
  set_fault(w, UCCL_EP_WRONG_CHOICE, 0, p.group.rank);
}

// Calls `each(at, token, expert)` for the choices of a segment; a thread has several in flight. All
// threads take part.
template <typename Each>
__device__ __forceinline__ void for_choices(const UcclEpLayout& p, const Segment& segment, Each each) {
  const UcclEpRoutes& r = p.routes;
  constexpr u32 BATCH = 2;
  u32 end = segment.end * r.top_k;
#pragma unroll 1
  for (u32 first = segment.begin * r.top_k + threadIdx.x; first < end; first += BATCH * blockDim.x) {
    u32 experts[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      u32 at = first + i * blockDim.x;
      experts[i] = at < end ? choice_of(r, p.group.ranks, at) : NO_EXPERT;
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      u32 at = first + i * blockDim.x;
      if (at < end) each(at, at / r.top_k, experts[i]);
    }
  }
}

// Finds the ranks of a segment's tokens. Sets a fault for an invalid choice.
__device__ __forceinline__ void find_ranks(const UcclEpLayout& p, LayoutState& s, const Segment& segment) {
  const UcclEpRoutes& r = p.routes;
  u32 ranks = p.group.ranks;
  if (p.token_in_rank != 0) {
    const u8* token_in_rank = reinterpret_cast<const u8*>(p.token_in_rank);
#pragma unroll 1
    for (u32 i = segment.begin * ranks + threadIdx.x; i < segment.end * ranks; i += blockDim.x) {
      if (token_in_rank[i] != 0) add_rank(s, i / ranks - segment.begin, i % ranks);
    }
    return;
  }
  for_choices(p, segment, [&](u32 at, u32 token, u32 expert) {
    if (expert != NO_EXPERT) {
      s.columns[ranks + expert].add(token - segment.begin);
      add_rank(s, token - segment.begin, expert / r.local_experts);
    } else if (!is_none(r, at)) {
      set_choice_fault(p, s.wait, token);
    }
  });
}

// Places the tokens of a segment, and keeps a copy of their choices: the caller's may change before
// the combine.
__device__ __forceinline__ void place_segment(const UcclEpLayout& p, LayoutState& s, const Segment& segment) {
  const UcclEpRoutes& r = p.routes;
  u32 ranks = p.group.ranks, counted = p.token_in_rank != 0 ? ranks : ranks + ranks * r.local_experts;
  find_ranks(p, s, segment);
  __syncthreads();
  u32* counts = counts_of(r, ranks, segment.number);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < counted; i += blockDim.x) counts[i] = s.columns[i].before(SEGMENT);
  if (p.token_in_rank == 0) {
    u32* places = reinterpret_cast<u32*>(r.places);
    for_choices(p, segment, [&](u32 at, u32 token, u32 expert) {
      u32 place = expert == NO_EXPERT ? 0 : s.columns[ranks + expert].before(token - segment.begin);
      places[at] = pack_choice(expert, place);
    });
  }
#pragma unroll 1
  for (u32 i = segment.begin * ranks + threadIdx.x; i < segment.end * ranks; i += blockDim.x) {
    u32 token = i / ranks - segment.begin;
    const Column& column = s.columns[i % ranks];
    bool is_in_rank = column.has(token);
    reinterpret_cast<int*>(r.slots)[i] = is_in_rank ? static_cast<int>(column.before(token)) : -1;
    if (p.token_in_rank_out != 0) reinterpret_cast<u8*>(p.token_in_rank_out)[i] = is_in_rank ? 1 : 0;
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < (segment.end - segment.begin) * SET_WORDS; i += blockDim.x) {
    const u32* mask = &s.masks[i / SET_WORDS][i % SET_WORDS * 2];
    u64 word = static_cast<u64>(mask[1]) << Column::BITS | mask[0];
    reinterpret_cast<u64*>(r.masks)[static_cast<u64>(segment.begin) * SET_WORDS + i] = word;
  }
}

// Turns the counts of segments into the sums of the segments before. One block.
__device__ __forceinline__ void sum_segments(const UcclEpLayout& p, u32 segments) {
  const UcclEpRoutes& r = p.routes;
  u32 ranks = p.group.ranks, experts = ranks * r.local_experts;
  u32 counted = p.token_in_rank == 0 ? ranks + experts : ranks;
  // Chunks that are read at a time: most calls have no more.
  constexpr u32 BATCH = 16;
#pragma unroll 1
  for (u32 column = threadIdx.x; column < ranks + experts; column += blockDim.x) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < segments && column < counted; first += BATCH) {
      u32 counts[BATCH];
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) counts[i] = first + i < segments ? counts_of(r, ranks, first + i)[column] : 0;
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) {
        if (first + i < segments) counts_of(r, ranks, first + i)[column] = before;
        before += counts[i];
      }
    }
    if (column < ranks) {
      reinterpret_cast<u32*>(r.counts)[column] = before;
    } else {
      u32 expert = column - ranks;
      if (p.token_in_rank != 0) before = reinterpret_cast<const u32*>(p.per_expert)[expert];
      reinterpret_cast<u32*>(r.experts)[expert] = before;
    }
    counts_of(r, ranks, segments)[column] = before;
  }
}

__device__ __forceinline__ void layout(const UcclEpLayout& p, LayoutState& s) {
  const UcclEpRoutes& r = p.routes;
  clear(s, p.group.ranks + p.group.ranks * r.local_experts);
  if (!begin_block(p.group, p.call, STEP_LAYOUT, s.wait)) return;
  u32 begin = blockIdx.x * SEGMENT;
  if (begin < r.tokens) place_segment(p, s, {blockIdx.x, begin, min(begin + SEGMENT, r.tokens)});
  if (!is_sound(p.group, p.call, s.wait)) return;
  if (!is_last_block(reinterpret_cast<u32*>(p.ended), s.wait)) return;
  sum_segments(p, (r.tokens + SEGMENT - 1) / SEGMENT);
}
