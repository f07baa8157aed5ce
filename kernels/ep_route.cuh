// Which tokens go to which ranks, and to which place there: how many before them go there too. By ballots and scans, so the
// order is the same each time. One block does it.
#pragma once

#include "ep_wait.cuh"
#include "ep_warp.cuh"

constexpr u32 ROUTE_WARPS = UCCL_EP_ROUTE_THREADS / LANES;
constexpr u32 NO_EXPERT = 0xffffffff;

struct Routing {
  Waiting waiting;
  // By warp and expert: first how many of a warp's choices are the expert, then how many are before them.
  u16 counts[ROUTE_WARPS][UCCL_EP_MOST_EXPERTS];
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

// Counts a warp's choices, from its first to its last. With `places`, says for each how many are before it.
template <bool WITH_PLACES>
__device__ __forceinline__ void count_choices(const UcclEpRoutes& r, u32 ranks, Routing& s,
                                              u32 begin, u32 end) {
  u16* counts = s.counts[warp_of_thread()];
  int* places = reinterpret_cast<int*>(r.places);
#pragma unroll 1
  for (u32 first = begin; first < end; first += LANES) {
    u32 at = first + lane_of_thread();
    u32 expert = at < end ? choice_of(r, ranks, at) : NO_EXPERT;
    u32 same = __match_any_sync(ALL, expert);
    u32 before = expert == NO_EXPERT ? 0 : counts[expert];
    __syncwarp();
    u32 earlier = __popc(same & lanes_before());
    if (WITH_PLACES && at < end) {
      places[at] = expert == NO_EXPERT ? -1 : static_cast<int>(before + earlier);
    }
    if (expert != NO_EXPERT && earlier == 0) {
      counts[expert] = static_cast<u16>(before + __popc(same));
    }
    __syncwarp();
  }
}

// Places of tokens among those that chose the same expert.
__device__ __forceinline__ void place_by_expert(const UcclEpRoutes& r, u32 ranks, Routing& s) {
  u32 experts = ranks * r.local_experts, choices = r.tokens * r.top_k;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ROUTE_WARPS * UCCL_EP_MOST_EXPERTS; i += blockDim.x) {
    s.counts[i / UCCL_EP_MOST_EXPERTS][i % UCCL_EP_MOST_EXPERTS] = 0;
  }
  u32 share = (choices + warps_of_block() * LANES - 1) / (warps_of_block() * LANES) * LANES;
  u32 begin = min(warp_of_thread() * share, choices), end = min(begin + share, choices);
  __syncthreads();
  count_choices<false>(r, ranks, s, begin, end);
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
    reinterpret_cast<u32*>(r.experts)[expert] = before;
  }
  __syncthreads();
  count_choices<true>(r, ranks, s, begin, end);
}

// The ranks of a token. A choice that cannot be is noted.
__device__ __forceinline__ u64 ranks_of(const UcclEpGroup& g, const UcclEpRoutes& r, Waiting& w,
                                        u32 token) {
  u64 mask = 0;
#pragma unroll 1
  for (u32 k = 0; k < r.top_k; k++) {
    u64 at = static_cast<u64>(token) * r.top_k + k;
    u32 expert = choice_of(r, g.ranks, at);
    bool is_wrong = expert == NO_EXPERT && !is_none(r, at);
#pragma unroll 1
    for (u32 other = 0; other < k; other++) {
      is_wrong |= expert != NO_EXPERT && choice_of(r, g.ranks, at - k + other) == expert;
    }
    if (is_wrong) {
      w.expected[g.rank] = token;
      w.seen[g.rank] = k;
      note_fault(w, UCCL_EP_WRONG_CHOICE, 0, g.rank);
    }
    if (expert != NO_EXPERT) mask |= 1ull << expert / r.local_experts;
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

// Places of tokens among those that go to the same rank.
__device__ __forceinline__ void place_by_rank(const UcclEpGroup& g, const UcclEpRoutes& r) {
  const u64* masks = reinterpret_cast<const u64*>(r.masks);
#pragma unroll 1
  for (u32 rank = warp_of_thread(); rank < g.ranks; rank += warps_of_block()) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < r.tokens; first += LANES) {
      u32 token = first + lane_of_thread();
      bool goes = token < r.tokens && (masks[token] >> rank & 1) != 0;
      u32 going = __ballot_sync(ALL, goes);
      if (token < r.tokens) {
        int place = goes ? static_cast<int>(before + __popc(going & lanes_before())) : -1;
        reinterpret_cast<int*>(r.slots)[static_cast<u64>(token) * g.ranks + rank] = place;
      }
      before += __popc(going);
    }
    if (lane_of_thread() == 0) reinterpret_cast<u32*>(r.counts)[rank] = before;
  }
}

__device__ __forceinline__ void route(const UcclEpSend& p, Routing& s) {
  if (!begin_block(p.group, p.call, STEP_SEND, s.waiting)) return;
  place_by_expert(p.routes, p.group.ranks, s);
  find_ranks(p.group, p.routes, s.waiting);
  place_by_rank(p.group, p.routes);
  is_sound(p.group, p.call, s.waiting);
}
