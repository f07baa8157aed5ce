// Where tokens go, if there are few: each block finds it out for its own, and no launch before it has to. It reads the choices of all,
// and counts those before its token's.
#pragma once

#include "ep_layout.cuh"

// Choices that are no expert: those that are none, and those that cannot be.
constexpr u32 NONE = 0xffff;
constexpr u32 WRONG = 0xfffe;

struct Few {
  u16 choices[UCCL_EP_FEW_CHOICES];
  u64 masks[UCCL_EP_FEW_TOKENS];  // by token: its ranks
  // Of the block's token: by choice, how many tokens before it chose the same expert; by rank, how many go there.
  u32 places[UCCL_EP_MOST_TOP_K];
  u32 slots[UCCL_EP_MOST_RANKS];
  // Of all tokens, for the block that tells how many there are.
  u32 per_expert[UCCL_EP_MOST_EXPERTS];
  u32 per_rank[UCCL_EP_MOST_RANKS];
};

// Reads the choices of all tokens. The first warp does not: it has the call's place to find.
__device__ __forceinline__ void load_choices(const UcclEpRoutes& r, u32 ranks, Few& few) {
  u32 choices = r.tokens * r.top_k, nth = threadIdx.x - LANES, readers = blockDim.x - LANES;
#pragma unroll 1
  for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) few.masks[token] = 0;
  __syncthreads();
  if (warp_of_thread() == 0) return;
#pragma unroll 1
  for (u32 first = nth; first < choices; first += ROUND * readers) {
    u32 experts[ROUND];
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      u32 at = first + i * readers;
      experts[i] = at < choices ? choice_of(r, ranks, at) : NO_EXPERT;
    }
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      u32 at = first + i * readers, expert = experts[i];
      if (at >= choices) continue;
      few.choices[at] = static_cast<u16>(expert != NO_EXPERT ? expert : is_none(r, at) ? NONE : WRONG);
      if (expert != NO_EXPERT) atomicOr(&few.masks[at / r.top_k], 1ull << expert / r.local_experts);
    }
  }
}

// The sum of what the lanes of a warp have.
__device__ __forceinline__ u32 sum_of_warp(u32 count) {
#pragma unroll
  for (u32 other = 1; other < LANES; other *= 2) count += __shfl_xor_sync(ALL, count, static_cast<int>(other));
  return count;
}

// How many of the choices before one of a token's are the same.
__device__ __forceinline__ u32 count_same(const UcclEpRoutes& r, u32 token, u32 k, const Few& few) {
  u32 end = token * r.top_k, mine = few.choices[end + k], same = 0;
  if (mine >= WRONG) return 0;
#pragma unroll 4
  for (u32 at = lane_of_thread(); at < end; at += LANES) same += few.choices[at] == mine ? 1 : 0;
  return sum_of_warp(same);
}

// How many of the first tokens go to a rank.
__device__ __forceinline__ u32 count_going(u32 tokens, u32 rank, const Few& few) {
  u32 going = 0;
#pragma unroll 4
  for (u32 token = lane_of_thread(); token < tokens; token += LANES) going += static_cast<u32>(few.masks[token] >> rank) & 1;
  return sum_of_warp(going);
}

// Counts all tokens by expert and by rank.
__device__ __forceinline__ void count_all(const UcclEpRoutes& r, u32 ranks, Few& few) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ranks * r.local_experts; i += blockDim.x) few.per_expert[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 at = threadIdx.x; at < r.tokens * r.top_k; at += blockDim.x) {
    if (few.choices[at] < WRONG) atomicAdd(&few.per_expert[few.choices[at]], 1u);
  }
#pragma unroll 1
  for (u32 rank = warp_of_thread(); rank < ranks; rank += warps_of_block()) {
    u32 going = count_going(r.tokens, rank, few);
    if (lane_of_thread() == 0) few.per_rank[rank] = going;
  }
  __syncthreads();
}

// Notes the first choice of a token that cannot be, or is there twice. One warp does it.
__device__ __forceinline__ void check_choices(const UcclEpSend& p, const Few& few, u32 token, Waiting& w) {
  u32 lane = lane_of_thread();
  u32 choice = lane < p.routes.top_k ? few.choices[token * p.routes.top_k + lane] : NONE;
  u32 same = __match_any_sync(ALL, choice);
  u32 wrong = __ballot_sync(ALL, choice == WRONG || (choice < WRONG && (same & lanes_before()) != 0));
  if (wrong == 0 || lane != 0) return;
  w.expected[p.group.rank] = token;
  w.seen[p.group.rank] = static_cast<u32>(__ffs(static_cast<int>(wrong)) - 1);
  note_fault(w, UCCL_EP_WRONG_CHOICE, 0, p.group.rank);
}

// Finds where a token goes: a warp counts for a choice or for a rank. All threads of the block come here. Returns whether its choices
// can be.
__device__ __forceinline__ bool place_token(const UcclEpSend& p, u32 token, Few& few, Waiting& w) {
  const UcclEpRoutes& r = p.routes;
  // The choices are there, and the token before it has been sent.
  __syncthreads();
  u32 checks = r.top_k + p.group.ranks;
#pragma unroll 1
  for (u32 i = warp_of_thread(); i <= checks; i += warps_of_block()) {
    if (i == checks) {
      check_choices(p, few, token, w);
      continue;
    }
    u32 rank = i - r.top_k;
    u32 count = i < r.top_k ? count_same(r, token, i, few) : count_going(token, rank, few);
    if (lane_of_thread() == 0) (i < r.top_k ? few.places[i] : few.slots[rank]) = count;
  }
  return is_sound(p.group, p.call, w);
}
