// Which tokens go to which ranks, and to which place there: how many before them go there too. By ballots and scans, so the
// order is the same each time. One block does it.
#pragma once

#include "ep_wait.cuh"
#include "ep_warp.cuh"

constexpr u32 ROUTE_WARPS = UCCL_EP_ROUTE_THREADS / LANES;
constexpr u32 NO_EXPERT = 0xffffffff;

// By warp and expert: first how many of a warp's choices are the expert, then how many are before them.
struct ChoicesOfWarps {
  u16 counts[ROUTE_WARPS][UCCL_EP_MOST_EXPERTS];
};

struct Routing {
  Waiting waiting;
  ChoicesOfWarps choices;
};

// A choice, or NO_EXPERT.
__device__ __forceinline__ u32 choice_of(const UcclEpRoutes& r, u32 ranks, u64 at) {
  u64 choice = r.is_64 ? reinterpret_cast<const u64*>(r.choices)[at]
                       : static_cast<u64>(reinterpret_cast<const u32*>(r.choices)[at]);
  return choice < static_cast<u64>(ranks) * r.local_experts ? static_cast<u32>(choice) : NO_EXPERT;
}

// Whether a choice is negative, which is none, and not a number that no expert has.
__device__ __forceinline__ bool is_none(const UcclEpRoutes& r, u64 at) {
  return r.is_64 ? reinterpret_cast<const long long*>(r.choices)[at] < 0
                 : reinterpret_cast<const int*>(r.choices)[at] < 0;
}

// Counts of a chunk of tokens: how many go to each rank, and then how many chose each expert. In the end, those of all chunks before.
__device__ __forceinline__ u32* counts_of(const UcclEpRoutes& r, u32 ranks, u32 chunk) {
  return reinterpret_cast<u32*>(r.chunks) + static_cast<u64>(chunk) * (ranks + ranks * r.local_experts);
}

// How many tokens of the chunks before a token's are counted in a column. Few tokens have no chunks.
__device__ __forceinline__ u32 before_chunk(const UcclEpRoutes& r, u32 ranks, u32 token, u32 column) {
  return r.chunks == 0 ? 0 : counts_of(r, ranks, token / UCCL_EP_CHUNK)[column];
}

// How many tokens before one go to the same rank; or -1: it does not go there.
__device__ __forceinline__ int place_at(const UcclEpRoutes& r, u32 ranks, u32 token, u32 rank) {
  int slot = reinterpret_cast<const int*>(r.slots)[static_cast<u64>(token) * ranks + rank];
  return slot < 0 ? -1 : slot + static_cast<int>(before_chunk(r, ranks, token, rank));
}

// Counts a warp's choices, from its first to its last. `each(at, expert, before)` is told of each choice, or NO_EXPERT, and how
// many before it are the same.
template <typename Each>
__device__ __forceinline__ void count_choices(const UcclEpRoutes& r, u32 ranks, u16* counts, u32 begin, u32 end,
                                              Each each) {
#pragma unroll 1
  for (u32 first = begin; first < end; first += ROUND * LANES) {
    u32 experts[ROUND];
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      u32 at = first + i * LANES + lane_of_thread();
      experts[i] = at < end ? choice_of(r, ranks, at) : NO_EXPERT;
    }
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      u32 expert = experts[i], same = __match_any_sync(ALL, expert);
      u32 before = expert == NO_EXPERT ? 0 : counts[expert];
      __syncwarp();
      u32 earlier = __popc(same & lanes_before());
      u32 at = first + i * LANES + lane_of_thread();
      if (at < end) each(at, expert, before + earlier);
      if (expert != NO_EXPERT && earlier == 0) counts[expert] = static_cast<u16>(before + __popc(same));
      __syncwarp();
    }
  }
}

// Places of tokens among those that chose the same expert, of choices from `begin` to `end`: `each(at, expert, place)`, of all
// of them. `all(expert, count)` is told how many chose an expert.
template <typename Each, typename All>
__device__ __forceinline__ void place_by_expert(const UcclEpRoutes& r, u32 ranks, ChoicesOfWarps& s, u32 begin, u32 end,
                                                Each each, All all) {
  u32 experts = ranks * r.local_experts;
#pragma unroll 1
  for (u32 warp = 0; warp < ROUTE_WARPS; warp++) {
#pragma unroll 1
    for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) s.counts[warp][expert] = 0;
  }
  u32 share = (end - begin + warps_of_block() * LANES - 1) / (warps_of_block() * LANES) * LANES;
  u32 from = min(begin + warp_of_thread() * share, end), to = min(from + share, end);
  u16* counts = s.counts[warp_of_thread()];
  __syncthreads();
  count_choices(r, ranks, counts, from, to, [](u32, u32, u32) {});
  __syncthreads();
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    u32 before = 0;
#pragma unroll 1
    for (u32 warp = 0; warp < warps_of_block(); warp++) {
      u32 count = s.counts[warp][expert];
      s.counts[warp][expert] = static_cast<u16>(before);
      before += count;
    }
    all(expert, before);
  }
  __syncthreads();
  count_choices(r, ranks, counts, from, to, each);
}

// Whether a choice is there among a token's first.
__device__ __forceinline__ bool is_among(const UcclEpRoutes& r, u32 ranks, u64 first, u32 count, u32 expert) {
  bool is_there = false;
#pragma unroll 1
  for (u32 k = 0; k < count; k++) is_there |= choice_of(r, ranks, first + k) == expert;
  return is_there;
}

// The ranks of a token. A choice that cannot be is noted. Some choices are read at a time.
__device__ __forceinline__ u64 ranks_of(const UcclEpGroup& g, const UcclEpRoutes& r, Waiting& w,
                                        u32 token) {
  constexpr u32 BATCH = 8;
  u64 first = static_cast<u64>(token) * r.top_k, mask = 0;
#pragma unroll 1
  for (u32 begin = 0; begin < r.top_k; begin += BATCH) {
    u32 experts[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      experts[i] = begin + i < r.top_k ? choice_of(r, g.ranks, first + begin + i) : NO_EXPERT;
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      u32 expert = experts[i], k = begin + i;
      if (k >= r.top_k) continue;
      bool is_wrong = expert == NO_EXPERT && !is_none(r, first + k);
#pragma unroll
      for (u32 other = 0; other < i; other++) is_wrong |= expert != NO_EXPERT && experts[other] == expert;
      if (begin != 0 && expert != NO_EXPERT) is_wrong |= is_among(r, g.ranks, first, begin, expert);
      if (is_wrong) {
        w.expected[g.rank] = token;
        w.seen[g.rank] = k;
        note_fault(w, UCCL_EP_WRONG_CHOICE, 0, g.rank);
      }
      if (expert != NO_EXPERT) mask |= 1ull << expert / r.local_experts;
    }
  }
  return mask;
}

// The ranks of all tokens.
__device__ __forceinline__ void find_ranks(const UcclEpGroup& g, const UcclEpRoutes& r, Waiting& w) {
  u64* masks = reinterpret_cast<u64*>(r.masks);
#pragma unroll 1
  for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
    masks[token] = ranks_of(g, r, w, token);
  }
  __syncthreads();
}

// Places of tokens among those that go to the same rank, of tokens from `begin` to `end`. `mask_of` is a token's ranks; `counts`
// become how many go to each rank.
template <typename MaskOf>
__device__ __forceinline__ void place_by_rank(const UcclEpRoutes& r, u32 ranks, u32 begin, u32 end, u32* counts,
                                              MaskOf mask_of) {
#pragma unroll 1
  for (u32 rank = warp_of_thread(); rank < ranks; rank += warps_of_block()) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = begin; first < end; first += LANES) {
      u32 token = first + lane_of_thread();
      bool goes = token < end && (mask_of(token) >> rank & 1) != 0;
      u32 going = __ballot_sync(ALL, goes);
      if (token < end) {
        int place = goes ? static_cast<int>(before + __popc(going & lanes_before())) : -1;
        reinterpret_cast<int*>(r.slots)[static_cast<u64>(token) * ranks + rank] = place;
      }
      before += __popc(going);
    }
    if (lane_of_thread() == 0) counts[rank] = before;
  }
}

__device__ __forceinline__ void route(const UcclEpSend& p, Routing& s) {
  const UcclEpRoutes& r = p.routes;
  u32 ranks = p.group.ranks, choices = r.tokens * r.top_k;
  if (!begin_block(p.group, p.call, STEP_SEND, s.waiting)) return;
  int* places = reinterpret_cast<int*>(r.places);
  place_by_expert(
      r, ranks, s.choices, 0, choices,
      [&](u32 at, u32 expert, u32 place) { places[at] = expert == NO_EXPERT ? -1 : static_cast<int>(place); },
      [&](u32 expert, u32 count) { reinterpret_cast<u32*>(r.experts)[expert] = count; });
  find_ranks(p.group, r, s.waiting);
  const u64* masks = reinterpret_cast<const u64*>(r.masks);
  place_by_rank(r, ranks, 0, r.tokens, reinterpret_cast<u32*>(r.counts), [&](u32 token) { return masks[token]; });
  is_sound(p.group, p.call, s.waiting);
}
