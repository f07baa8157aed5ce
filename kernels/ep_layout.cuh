// Normal mode: which tokens go to which ranks, and to which place there: how many before them do, and how many before them
// chose the same expert. A block has a chunk of the tokens, and counts places in it; the last block to end sums the chunks. Behind
// the chunks' counts it keeps those of all tokens: callers that ask for a layout get others, which may change before the dispatch.
#pragma once

#include "ep_route.cuh"

// A choice and its place, together: the expert has the lower bits.
constexpr u32 EXPERT_BITS = 11;
static_assert(UCCL_EP_MOST_EXPERTS <= 1u << EXPERT_BITS, "an expert's number");
static_assert(UCCL_EP_MOST_TOKENS <= 1u << (31 - EXPERT_BITS), "a place, with room for NO_EXPERT");
// A thread has a token.
static_assert(UCCL_EP_CHUNK == UCCL_EP_ROUTE_THREADS, "tokens of a block");

struct Layout {
  Waiting waiting;
  ChoicesOfWarps choices;
  u64 masks[UCCL_EP_CHUNK];
};

__device__ __forceinline__ u32 placed(u32 expert, u32 place) {
  return expert == NO_EXPERT ? NO_EXPERT : place << EXPERT_BITS | expert;
}

__device__ __forceinline__ u32 expert_of(u32 placed) {
  return placed == NO_EXPERT ? NO_EXPERT : placed & ((1u << EXPERT_BITS) - 1);
}

// The ranks of a token that has no choices.
__device__ __forceinline__ u64 given_ranks(u64 goes, u32 ranks, u32 token) {
  const u8* given = reinterpret_cast<const u8*>(goes) + static_cast<u64>(token) * ranks;
  u64 mask = 0;
#pragma unroll 1
  for (u32 rank = 0; rank < ranks; rank++) mask |= static_cast<u64>(given[rank] != 0) << rank;
  return mask;
}

// Places the tokens of a chunk, and keeps their choices: the caller's may change before the combine.
__device__ __forceinline__ void place_chunk(const UcclEpNormalSend& p, Layout& s, u32 chunk) {
  const UcclEpRoutes& r = p.send.routes;
  u32 ranks = p.send.group.ranks, begin = chunk * UCCL_EP_CHUNK, end = min(begin + UCCL_EP_CHUNK, r.tokens);
  u32 token = begin + threadIdx.x;
  u32* counts = counts_of(r, ranks, chunk);
  if (token < end) {
    u64 mask = p.goes != 0 ? given_ranks(p.goes, ranks, token) : ranks_of(p.send.group, r, s.waiting, token);
    s.masks[threadIdx.x] = reinterpret_cast<u64*>(r.masks)[token] = mask;
  }
  __syncthreads();
  if (p.goes == 0) {
    u32* places = reinterpret_cast<u32*>(r.places);
    place_by_expert(
        r, ranks, s.choices, begin * r.top_k, end * r.top_k,
        [&](u32 at, u32 expert, u32 place) { places[at] = placed(expert, place); },
        [&](u32 expert, u32 count) { counts[ranks + expert] = count; });
  }
  place_by_rank(r, ranks, begin, end, counts, [&](u32 at) { return s.masks[at - begin]; });
  if (p.goes_told == 0) return;
#pragma unroll 1
  for (u32 i = begin * ranks + threadIdx.x; i < end * ranks; i += blockDim.x) {
    reinterpret_cast<u8*>(p.goes_told)[i] = static_cast<u8>(s.masks[i / ranks - begin] >> i % ranks & 1);
  }
}

// Turns counts of chunks into those of the chunks before. One block does it.
__device__ __forceinline__ void sum_chunks(const UcclEpNormalSend& p, u32 chunks) {
  const UcclEpRoutes& r = p.send.routes;
  u32 ranks = p.send.group.ranks, experts = ranks * r.local_experts;
  u32 counted = p.goes == 0 ? ranks + experts : ranks;
  // Chunks whose counts are read at a time: most calls have no more.
  constexpr u32 BATCH = 16;
#pragma unroll 1
  for (u32 column = threadIdx.x; column < ranks + experts; column += blockDim.x) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < chunks && column < counted; first += BATCH) {
      u32 counts[BATCH];
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) counts[i] = first + i < chunks ? counts_of(r, ranks, first + i)[column] : 0;
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) {
        if (first + i < chunks) counts_of(r, ranks, first + i)[column] = before;
        before += counts[i];
      }
    }
    if (column < ranks) {
      reinterpret_cast<u32*>(r.counts)[column] = before;
    } else {
      u32 expert = column - ranks;
      if (p.goes != 0) before = reinterpret_cast<const u32*>(p.per_expert)[expert];
      reinterpret_cast<u32*>(r.experts)[expert] = before;
    }
    counts_of(r, ranks, chunks)[column] = before;
  }
}

__device__ __forceinline__ void lay_out(const UcclEpNormalSend& p, Layout& s) {
  const UcclEpSend& send = p.send;
  if (!begin_block(send.group, send.call, STEP_SEND, s.waiting)) return;
  if (blockIdx.x * UCCL_EP_CHUNK < send.routes.tokens) place_chunk(p, s, blockIdx.x);
  if (!is_sound(send.group, send.call, s.waiting)) return;
  if (!is_last_block(reinterpret_cast<u32*>(p.ended), s.waiting)) return;
  sum_chunks(p, (send.routes.tokens + UCCL_EP_CHUNK - 1) / UCCL_EP_CHUNK);
}
