// Rounds in which ranks have nothing to say. In a round for which a rank has no tokens left it sends nothing,
// nobody waits for it, and no rank returns rows to it. All ranks agree on that without a word, because each
// knows the others' tokens from the call with the counts of all rounds. Where late ranks are left out, and of
// ranks that were left out of that call, nobody knows: these send in every round.
#pragma once

#include "../wait.cuh"

// More tokens than any rank has: those of a rank that is not known.
constexpr u32 UNKNOWN_TOKENS = 0xffffffff;

// A table of the ranks' tokens in all rounds; behind it, the most of any rank.
__device__ __forceinline__ u32 tokens_in_rounds(u64 table, u32 rank) {
  return reinterpret_cast<const u32*>(table)[rank];
}
__device__ __forceinline__ u32 most_in_rounds(u64 table, const UcclEpGroup& g) {
  return tokens_in_rounds(table, g.ranks);
}

// Whether no rank waits for this one, which has so many tokens in a round. `table`: null in a call of one round.
__device__ __forceinline__ bool is_silent(u64 table, const UcclEpGroup& g, u32 tokens) {
  return table != 0 && tokens == 0 && most_in_rounds(table, g) != UNKNOWN_TOKENS;
}

// Leaves ranks out of what the block sends, or waits for, next. All threads take part.
template <typename IsIdle>
__device__ __forceinline__ void leave_idle(const UcclEpGroup& g, WaitState& w, IsIdle is_idle) {
  __syncthreads();
  if (threadIdx.x < g.ranks && is_idle(threadIdx.x)) add_rank(w.call.masked, threadIdx.x);
  __syncthreads();
}

// Leaves out the ranks that know that this one has no tokens in a round.
__device__ __forceinline__ void leave_knowing(u64 table, const UcclEpGroup& g, WaitState& w) {
  leave_idle(g, w, [&](u32 rank) { return tokens_in_rounds(table, rank) != UNKNOWN_TOKENS; });
}

// Leaves out the ranks without tokens in a round, whose first token of each rank has this number.
__device__ __forceinline__ void leave_without_tokens(u64 table, u32 first_token, const UcclEpGroup& g, WaitState& w) {
  leave_idle(g, w, [&](u32 rank) { return tokens_in_rounds(table, rank) <= first_token; });
}

// Takes in again all ranks that the call does not leave out. All threads take part.
__device__ __forceinline__ void let_idle_in(const UcclEpGroup& g, WaitState& w) {
  // Where late ranks are left out, none is idle.
  if (g.masks_late != 0) return;
  __syncthreads();
  if (threadIdx.x == 0) copy_set(w.call.masked, own_of(g)->masked);
  __syncthreads();
}
