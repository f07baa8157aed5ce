// Routing of a small batch: each block finds the places of its own tokens, without a launch of
// `layout` before. It reads the choices of all tokens, and counts those before its own.
#pragma once

#include "../layout.cuh"

// Choices that name no expert: no choice, and an invalid one.
constexpr u32 NONE = 0xffff;
constexpr u32 WRONG = 0xfffe;
// A choice that repeats an expert of the token: it has the same row, and is not counted.
constexpr u32 AGAIN = 0x4000;
static_assert(UCCL_EP_MOST_EXPERTS <= AGAIN, "an expert's number");

// The expert that a choice names.
__device__ __forceinline__ u32 expert_of_few(u32 choice) { return choice & (AGAIN - 1); }

// The most tokens that a block sends at a time, each by an equal share of its warps.
constexpr u32 TOGETHER = 2;

struct Few {
  u16 choices[UCCL_EP_FEW_CHOICES];
  u64 masks[UCCL_EP_FEW_TOKENS];  // by token: its ranks
  // By token of the block: by choice, earlier tokens that chose the same expert; by rank, earlier
  // tokens that go there.
  u32 places[TOGETHER][UCCL_EP_MOST_TOP_K];
  u32 slots[TOGETHER][UCCL_EP_MOST_RANKS];
  // Over all tokens, in the block that sends the counts.
  u32 per_expert[UCCL_EP_MOST_EXPERTS];
  u32 per_rank[UCCL_EP_MOST_RANKS];
};

// The tokens that a block sends at a time; their numbers differ by the number of blocks.
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

// Whether the first `count` stored choices of a token name an expert.
__device__ __forceinline__ bool is_named(const Few& few, u32 begin, u32 count, u32 expert) {
  bool is_named = false;
#pragma unroll 1
  for (u32 k = 0; k < count; k++) is_named |= few.choices[begin + k] == expert;
  return is_named;
}

// Reads the choices of all tokens, a token for each thread at a time. The first warp is busy with
// the call's place.
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

// The sum of a count over the lanes of a warp.
__device__ __forceinline__ u32 sum_of_warp(u32 count) {
#pragma unroll
  for (u32 other = 1; other < LANES; other *= 2) count += __shfl_xor_sync(ALL, count, static_cast<int>(other));
  return count;
}

// The number of earlier tokens that chose the same expert as a token's choice.
__device__ __forceinline__ u32 count_same(const UcclEpRoutes& r, u32 token, u32 k, const Few& few) {
  u32 end = token * r.top_k, mine = few.choices[end + k], same = 0;
  if (mine >= WRONG) return 0;
  mine = expert_of_few(mine);
#pragma unroll 4
  for (u32 at = lane_of_thread(); at < end; at += LANES) same += few.choices[at] == mine ? 1 : 0;
  return sum_of_warp(same);
}

// The number of the first `tokens` tokens that go to a rank.
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

// Sets a fault for the first invalid choice of a token. One warp.
__device__ __forceinline__ void check_choices(const UcclEpSend& p, const Few& few, u32 token, Waiting& w) {
  u32 lane = lane_of_thread();
  u32 choice = lane < p.routes.top_k ? few.choices[token * p.routes.top_k + lane] : NONE;
  u32 wrong = __ballot_sync(ALL, choice == WRONG);
  if (wrong == 0 || lane != 0) return;
  w.expected[p.group.rank] = token;
  w.seen[p.group.rank] = static_cast<u32>(__ffs(static_cast<int>(wrong)) - 1);
  set_fault(w, UCCL_EP_WRONG_CHOICE, 0, p.group.rank);
}

// Finds the places of tokens: a warp counts for a choice or for a rank. All threads of the block
// take part. Returns false after a fault, such as an invalid choice.
__device__ __forceinline__ bool place_tokens(const UcclEpSend& p, const Batch& batch, Few& few, Waiting& w) {
  const UcclEpRoutes& r = p.routes;
  // All choices have been read, and the tokens before have been sent.
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
