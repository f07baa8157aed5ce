// Normal mode: which tokens go to which ranks, and to which place there. Experts only count their tokens. One block does it.
#pragma once

#include "ep_route.cuh"

struct Layout {
  Waiting waiting;
  u32 counts[UCCL_EP_MOST_EXPERTS];
};

// Counts the tokens of each expert, and keeps their choices: the caller's may change before the combine.
__device__ __forceinline__ void count_tokens(const UcclEpRoutes& r, u32 ranks, u32* counts) {
  u32 experts = ranks * r.local_experts, choices = r.tokens * r.top_k;
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) counts[expert] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 at = threadIdx.x; at < choices; at += blockDim.x) {
    u32 expert = choice_of(r, ranks, at);
    reinterpret_cast<u32*>(r.places)[at] = expert;
    // Sums are the same in any order.
    if (expert != NO_EXPERT) atomicAdd(&counts[expert], 1u);
  }
  __syncthreads();
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    reinterpret_cast<u32*>(r.experts)[expert] = counts[expert];
  }
}

// Takes the ranks of tokens that have no choices, and what experts are told.
__device__ __forceinline__ void take_ranks(const UcclEpNormalSend& p) {
  const UcclEpRoutes& r = p.send.routes;
  u32 ranks = p.send.group.ranks;
#pragma unroll 1
  for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
    const u8* goes = reinterpret_cast<const u8*>(p.goes) + static_cast<u64>(token) * ranks;
    u64 mask = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < ranks; rank++) mask |= static_cast<u64>(goes[rank] != 0) << rank;
    reinterpret_cast<u64*>(r.masks)[token] = mask;
  }
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < ranks * r.local_experts; expert += blockDim.x) {
    reinterpret_cast<u32*>(r.experts)[expert] = reinterpret_cast<const u32*>(p.per_expert)[expert];
  }
  __syncthreads();
}

// Tells the caller which tokens go to which ranks.
__device__ __forceinline__ void tell_ranks(const UcclEpRoutes& r, u32 ranks, u64 goes) {
  const u64* masks = reinterpret_cast<const u64*>(r.masks);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < r.tokens * ranks; i += blockDim.x) {
    reinterpret_cast<u8*>(goes)[i] = static_cast<u8>(masks[i / ranks] >> i % ranks & 1);
  }
}

__device__ __forceinline__ void lay_out(const UcclEpNormalSend& p, Layout& s) {
  const UcclEpSend& send = p.send;
  if (!begin_block(send.group, send.call, STEP_SEND, s.waiting)) return;
  if (p.goes != 0) {
    take_ranks(p);
  } else {
    count_tokens(send.routes, send.group.ranks, s.counts);
    find_ranks(send.group, send.routes, s.waiting);
  }
  place_by_rank(send.group, send.routes);
  if (p.goes_told != 0) tell_ranks(send.routes, send.group.ranks, p.goes_told);
  is_sound(send.group, send.call, s.waiting);
}
