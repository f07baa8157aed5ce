// Where tokens go, if there are few: each block finds it out for its own, and no launch before it has to. It reads the choices of all,
// and counts those before its token's.
#pragma once

#include "ep_route.cuh"

// Choices that are no expert: those that are none, and those that cannot be.
constexpr u32 NONE = 0xffff;
constexpr u32 WRONG = 0xfffe;

struct Few {
  u16 choices[UCCL_EP_FEW_CHOICES];
  // Of the block's token: by choice, how many tokens before it chose the same expert; by rank, how many go there.
  u32 places[UCCL_EP_MOST_TOP_K];
  u32 slots[UCCL_EP_MOST_RANKS];
  // Of all tokens, for the block that tells how many there are.
  u32 per_expert[UCCL_EP_MOST_EXPERTS];
  u32 per_rank[UCCL_EP_MOST_RANKS];
};

__device__ __forceinline__ void load_choices(const UcclEpRoutes& r, u32 ranks, Few& few) {
#pragma unroll 1
  for (u32 at = threadIdx.x; at < r.tokens * r.top_k; at += blockDim.x) {
    u32 expert = choice_of(r, ranks, at);
    few.choices[at] = static_cast<u16>(expert != NO_EXPERT ? expert : is_none(r, at) ? NONE : WRONG);
  }
}

// The ranks of a token.
__device__ __forceinline__ u64 ranks_of(const UcclEpRoutes& r, const Few& few, u32 token) {
  u64 mask = 0;
#pragma unroll 1
  for (u32 k = 0; k < r.top_k; k++) {
    u32 choice = few.choices[token * r.top_k + k];
    if (choice < WRONG) mask |= 1ull << choice / r.local_experts;
  }
  return mask;
}

// Counts all tokens by expert and by rank.
__device__ __forceinline__ void count_all(const UcclEpRoutes& r, u32 ranks, Few& few) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ranks * r.local_experts; i += blockDim.x) few.per_expert[i] = 0;
  if (threadIdx.x < ranks) few.per_rank[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 at = threadIdx.x; at < r.tokens * r.top_k; at += blockDim.x) {
    if (few.choices[at] < WRONG) atomicAdd(&few.per_expert[few.choices[at]], 1u);
  }
#pragma unroll 1
  for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
#pragma unroll 1
    for (u64 left = ranks_of(r, few, token); left != 0; left &= left - 1) {
      atomicAdd(&few.per_rank[__ffsll(static_cast<long long>(left)) - 1], 1u);
    }
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

// Counts the choices before a token's that are the same as its own: a lane has one of its own.
__device__ __forceinline__ void count_same(const UcclEpRoutes& r, u32 token, Few& few) {
  u32 lane = lane_of_thread(), end = token * r.top_k, same = 0;
  u32 mine = lane < r.top_k ? few.choices[end + lane] : NONE;
#pragma unroll 1
  for (u32 first = warp_of_thread() * LANES; first < end; first += warps_of_block() * LANES) {
    u32 choice = first + lane < end ? few.choices[first + lane] : NONE;
#pragma unroll 1
    for (u32 k = 0; k < r.top_k; k++) {
      u32 chosen = __ballot_sync(ALL, choice == __shfl_sync(ALL, mine, static_cast<int>(k)));
      if (lane == k) same += __popc(chosen);
    }
  }
  if (lane < r.top_k && same != 0) atomicAdd(&few.places[lane], same);
}

// Counts the tokens before a token that go to the same ranks.
__device__ __forceinline__ void count_going(const UcclEpRoutes& r, u32 token, Few& few) {
  u64 mask = ranks_of(r, few, token);
#pragma unroll 1
  for (u32 first = warp_of_thread() * LANES; first < token; first += warps_of_block() * LANES) {
    u32 other = first + lane_of_thread();
    u64 theirs = other < token ? ranks_of(r, few, other) : 0;
#pragma unroll 1
    for (u64 left = mask; left != 0; left &= left - 1) {
      u32 rank = static_cast<u32>(__ffsll(static_cast<long long>(left)) - 1);
      u32 going = __ballot_sync(ALL, (theirs >> rank & 1) != 0);
      if (lane_of_thread() == 0 && going != 0) atomicAdd(&few.slots[rank], __popc(going));
    }
  }
}

// Finds where a token goes. All threads of the block come here. Returns whether its choices can be.
__device__ __forceinline__ bool place_token(const UcclEpSend& p, u32 token, Few& few, Waiting& w) {
  // The token before it has been sent.
  __syncthreads();
  if (threadIdx.x < UCCL_EP_MOST_TOP_K) few.places[threadIdx.x] = 0;
  if (threadIdx.x < UCCL_EP_MOST_RANKS) few.slots[threadIdx.x] = 0;
  if (warp_of_thread() == 0) check_choices(p, few, token, w);
  __syncthreads();
  count_same(p.routes, token, few);
  count_going(p.routes, token, few);
  return is_sound(p.group, p.call, w);
}
