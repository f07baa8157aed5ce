// Routing of a small batch: each block finds the places of its own tokens, without a launch of
// `layout` before. It reads the choices of all tokens, and counts those before its own.
#pragma once

#include "../layout.cuh"

static_assert(!IS_WIDE, "the ranks of a token are one word");

// Choices that name no expert: no choice, and an invalid one.
constexpr u32 NO_CHOICE = 0xffff;
constexpr u32 INVALID_CHOICE = 0xfffe;
// A choice that repeats an expert of the token: it has the same row, and is not counted.
constexpr u32 REPEATED = 0x4000;
static_assert(UCCL_EP_MAX_EXPERTS <= REPEATED, "an expert's number");

// The expert that a choice names.
__device__ __forceinline__ u32 expert_of_choice(u32 choice) { return choice & (REPEATED - 1); }

// The most tokens that a block sends at a time, each by an equal share of its warps.
constexpr u32 BLOCK_TOKENS = 2;

struct SmallBatch {
  u16 choices[UCCL_EP_SMALL_BATCH_CHOICES];
  u64 masks[UCCL_EP_SMALL_BATCH_TOKENS];  // by token: its ranks
  // By token of the block: by choice, earlier tokens that chose the same expert; by rank, earlier
  // tokens that go there.
  u32 places[BLOCK_TOKENS][UCCL_EP_MAX_TOP_K];
  u32 slots[BLOCK_TOKENS][RANKS];
  // Over all tokens, in the block that sends the counts.
  u32 per_expert[UCCL_EP_MAX_EXPERTS];
  u32 per_rank[RANKS];
};

// The one or two tokens that a block sends at a time; their numbers differ by the number of blocks.
struct BlockTokens {
  u32 first;
  u32 count;

  __device__ __forceinline__ u32 token(u32 nth) const { return first + nth * gridDim.x; }
};

__device__ __forceinline__ BlockTokens block_tokens_at(const UcclEpRoutes& r, u32 first) {
  return {first, first + gridDim.x < r.tokens ? BLOCK_TOKENS : 1};
}

// Choices of a token that a thread reads at a time.
constexpr u32 CHOICES_AT_ONCE = 8;

// Whether the first `count` stored choices of a token name an expert.
__device__ __forceinline__ bool is_named(const SmallBatch& small_batch, u32 begin, u32 count, u32 expert) {
  bool is_named = false;
#pragma unroll 1
  for (u32 k = 0; k < count; k++) is_named |= small_batch.choices[begin + k] == expert;
  return is_named;
}

// Reads the choices of all tokens, a token for each thread at a time. The first warp is busy with
// the call's place.
__device__ __forceinline__ void load_choices(const UcclEpRoutes& r, u32 ranks, SmallBatch& small_batch) {
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
        bool is_expert = experts[i] != NO_EXPERT,
             is_repeated = is_expert && is_named(small_batch, token * r.top_k, first, experts[i]);
#pragma unroll
        for (u32 k = 0; k < i; k++) is_repeated |= is_expert && experts[k] == experts[i];
        u32 choice = is_repeated ? experts[i] | REPEATED : experts[i];
        small_batch.choices[begin + i] = static_cast<u16>(is_expert               ? choice
                                                          : is_none(r, begin + i) ? NO_CHOICE
                                                                                  : INVALID_CHOICE);
        if (is_expert) mask |= 1ull << experts[i] / r.local_experts;
      }
    }
    small_batch.masks[token] = mask;
  }
}

// The sum of a count over the lanes of a warp.
__device__ __forceinline__ u32 sum_of_warp(u32 count) {
#pragma unroll
  for (u32 other = 1; other < LANES; other *= 2) count += __shfl_xor_sync(ALL, count, static_cast<int>(other));
  return count;
}

// The number of earlier tokens that chose the same expert as a token's choice.
__device__ __forceinline__ u32 count_earlier(const UcclEpRoutes& r, u32 token, u32 k, const SmallBatch& small_batch) {
  u32 end = token * r.top_k, mine = small_batch.choices[end + k], same = 0;
  if (mine >= INVALID_CHOICE) return 0;
  mine = expert_of_choice(mine);
#pragma unroll 4
  for (u32 at = lane_of_thread(); at < end; at += LANES) same += small_batch.choices[at] == mine ? 1 : 0;
  return sum_of_warp(same);
}

// The number of the first `tokens` tokens that go to a rank.
__device__ __forceinline__ u32 count_in_rank(u32 tokens, u32 rank, const SmallBatch& small_batch) {
  u32 count = 0;
#pragma unroll 4
  for (u32 token = lane_of_thread(); token < tokens; token += LANES)
    count += static_cast<u32>(small_batch.masks[token] >> rank) & 1;
  return sum_of_warp(count);
}

// Counts all tokens by expert and by rank.
__device__ __forceinline__ void count_all(const UcclEpRoutes& r, u32 ranks, SmallBatch& small_batch) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ranks * r.local_experts; i += blockDim.x) small_batch.per_expert[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 at = threadIdx.x; at < r.tokens * r.top_k; at += blockDim.x) {
    if (small_batch.choices[at] < REPEATED) atomicAdd(&small_batch.per_expert[small_batch.choices[at]], 1u);
  }
#pragma unroll 1
  for (u32 rank = warp_of_thread(); rank < ranks; rank += warps_of_block()) {
    u32 count = count_in_rank(r.tokens, rank, small_batch);
    if (lane_of_thread() == 0) small_batch.per_rank[rank] = count;
  }
  __syncthreads();
}

// Sets a fault for the first invalid choice of a token. One warp.
__device__ __forceinline__ void check_choices(const UcclEpSend& p, const SmallBatch& small_batch, u32 token,
                                              WaitState& w) {
  u32 lane = lane_of_thread();
  u32 choice = lane < p.routes.top_k ? small_batch.choices[token * p.routes.top_k + lane] : NO_CHOICE;
  u32 invalid = __ballot_sync(ALL, choice == INVALID_CHOICE);
  if (invalid == 0 || lane != 0) return;
  w.expected[p.group.rank] = token;
  w.seen[p.group.rank] = static_cast<u32>(__ffs(static_cast<int>(invalid)) - 1);
  set_fault(w, UCCL_EP_WRONG_CHOICE, 0, p.group.rank);
}

// Finds the places of tokens: a warp counts for a choice or for a rank. All threads of the block
// take part. Returns false after a fault, such as an invalid choice.
__device__ __forceinline__ bool place_tokens(const UcclEpSend& p, const BlockTokens& block_tokens,
                                             SmallBatch& small_batch, WaitState& w) {
  const UcclEpRoutes& r = p.routes;
  // All choices have been read, and the tokens before have been sent.
  __syncthreads();
  u32 checks = r.top_k + p.group.ranks;
#pragma unroll 1
  for (u32 all = warp_of_thread(); all < block_tokens.count * (checks + 1); all += warps_of_block()) {
    u32 nth = all > checks ? 1 : 0, i = all - nth * (checks + 1), token = block_tokens.token(nth);
    if (i == checks) {
      check_choices(p, small_batch, token, w);
      continue;
    }
    u32 rank = i - r.top_k;
    u32 count = i < r.top_k ? count_earlier(r, token, i, small_batch) : count_in_rank(token, rank, small_batch);
    if (lane_of_thread() == 0) (i < r.top_k ? small_batch.places[nth][i] : small_batch.slots[nth][rank]) = count;
  }
  return is_sound(p.group, p.call, w);
}
