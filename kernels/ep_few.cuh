// Where tokens go, if there are few: each block finds it out for its own, and no launch before it has to. It reads the choices of all,
// and counts those before its token's.
#pragma once

#include "ep_layout.cuh"

// Choices that are no expert: those that are none, and those that cannot be.
constexpr u32 NONE = 0xffff;
constexpr u32 WRONG = 0xfffe;
// A choice that names an expert which the token has named before: it has the same row, and is not counted.
constexpr u32 AGAIN = 0x4000;
static_assert(UCCL_EP_MOST_EXPERTS <= AGAIN, "an expert's number");

// The expert of a choice that is one.
__device__ __forceinline__ u32 expert_of_few(u32 choice) { return choice & (AGAIN - 1); }

// Tokens that a block sends at a time at most, each by as many of its warps.
constexpr u32 TOGETHER = 2;

struct Few {
  u16 choices[UCCL_EP_FEW_CHOICES];
  u64 masks[UCCL_EP_FEW_TOKENS];  // by token: its ranks
  // Of each of the block's tokens: by choice, how many tokens before it chose the same expert; by rank, how many go there.
  u32 places[TOGETHER][UCCL_EP_MOST_TOP_K];
  u32 slots[TOGETHER][UCCL_EP_MOST_RANKS];
  // Of all tokens, for the block that tells how many there are.
  u32 per_expert[UCCL_EP_MOST_EXPERTS];
  u32 per_rank[UCCL_EP_MOST_RANKS];
};

// The tokens that a block sends at a time, which are as many apart as there are blocks.
struct Batch {
  u32 first;
  u32 count;

  __device__ __forceinline__ u32 token(u32 nth) const { return first + nth * gridDim.x; }
};

__device__ __forceinline__ Batch batch_at(const UcclEpRoutes& r, u32 first) {
  return {first, first + gridDim.x < r.tokens ? TOGETHER : 1};
}

// Choices of a token that a thread reads at a time.
constexpr u32 CHOICES_AT_ONCE = 8;

// Whether a token has named an expert with one of its first choices, of which `count` are kept.
__device__ __forceinline__ bool is_named(const Few& few, u32 begin, u32 count, u32 expert) {
  bool is_named = false;
#pragma unroll 1
  for (u32 k = 0; k < count; k++) is_named |= few.choices[begin + k] == expert;
  return is_named;
}

// Reads the choices of all tokens: a thread has one at a time. The first warp does not: it has the call's place to find.
__device__ __forceinline__ void load_choices(const UcclEpRoutes& r, u32 ranks, Few& few) {
  if (warp_of_thread() == 0) return;
#pragma unroll 1
  for (u32 token = threadIdx.x - LANES; token < r.tokens; token += blockDim.x - LANES) {
    u64 mask = 0;
#pragma unroll 1
    for (u32 first = 0; first < r.top_k; first += CHOICES_AT_ONCE) {
      u32 begin = token * r.top_k + first, count = min(r.top_k - first, CHOICES_AT_ONCE), experts[CHOICES_AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < CHOICES_AT_ONCE; i++) experts[i] = i < count ? choice_of(r, ranks, begin + i) : NO_EXPERT;
#pragma unroll
      for (u32 i = 0; i < CHOICES_AT_ONCE; i++) {
        if (i >= count) continue;
        bool is_expert = experts[i] != NO_EXPERT, is_again = is_expert && is_named(few, token * r.top_k, first, experts[i]);
#pragma unroll
        for (u32 k = 0; k < i; k++) is_again |= is_expert && experts[k] == experts[i];
        u32 choice = is_again ? experts[i] | AGAIN : experts[i];
        few.choices[begin + i] = static_cast<u16>(is_expert ? choice : is_none(r, begin + i) ? NONE : WRONG);
        if (is_expert) mask |= 1ull << experts[i] / r.local_experts;
      }
    }
    few.masks[token] = mask;
  }
}

// The sum of what the lanes of a warp have.
__device__ __forceinline__ u32 sum_of_warp(u32 count) {
#pragma unroll
  for (u32 other = 1; other < LANES; other *= 2) count += __shfl_xor_sync(ALL, count, static_cast<int>(other));
  return count;
}

// How many of the tokens before one name the same expert as one of its choices.
__device__ __forceinline__ u32 count_same(const UcclEpRoutes& r, u32 token, u32 k, const Few& few) {
  u32 end = token * r.top_k, mine = few.choices[end + k], same = 0;
  if (mine >= WRONG) return 0;
  mine = expert_of_few(mine);
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
    if (few.choices[at] < AGAIN) atomicAdd(&few.per_expert[few.choices[at]], 1u);
  }
#pragma unroll 1
  for (u32 rank = warp_of_thread(); rank < ranks; rank += warps_of_block()) {
    u32 going = count_going(r.tokens, rank, few);
    if (lane_of_thread() == 0) few.per_rank[rank] = going;
  }
  __syncthreads();
}

// Notes the first choice of a token that cannot be. One warp does it.
__device__ __forceinline__ void check_choices(const UcclEpSend& p, const Few& few, u32 token, Waiting& w) {
  u32 lane = lane_of_thread();
  u32 choice = lane < p.routes.top_k ? few.choices[token * p.routes.top_k + lane] : NONE;
  u32 wrong = __ballot_sync(ALL, choice == WRONG);
  if (wrong == 0 || lane != 0) return;
  w.expected[p.group.rank] = token;
  w.seen[p.group.rank] = static_cast<u32>(__ffs(static_cast<int>(wrong)) - 1);
  note_fault(w, UCCL_EP_WRONG_CHOICE, 0, p.group.rank);
}

// Finds where tokens go: a warp counts for a choice or for a rank. All threads of the block come here. Returns whether their choices
// can be.
__device__ __forceinline__ bool place_tokens(const UcclEpSend& p, const Batch& batch, Few& few, Waiting& w) {
  const UcclEpRoutes& r = p.routes;
  // The choices are there, and the tokens before have been sent.
  __syncthreads();
  u32 checks = r.top_k + p.group.ranks;
#pragma unroll 1
  for (u32 all = warp_of_thread(); all < batch.count * (checks + 1); all += warps_of_block()) {
    u32 nth = all > checks ? 1 : 0, i = all - nth * (checks + 1), token = batch.token(nth);
    if (i == checks) {
      check_choices(p, few, token, w);
      continue;
    }
    u32 rank = i - r.top_k;
    u32 count = i < r.top_k ? count_same(r, token, i, few) : count_going(token, rank, few);
    if (lane_of_thread() == 0) (i < r.top_k ? few.places[nth][i] : few.slots[nth][rank]) = count;
  }
  return is_sound(p.group, p.call, w);
}
