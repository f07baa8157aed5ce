// Changes of the ranks that are left out.
#pragma once

#include "rank_set.cuh"

// One block, with a thread for each rank that a group may have.
__device__ __forceinline__ void change_masks(const UcclEpMask& p) {
  UcclEpOwnState* own = reinterpret_cast<UcclEpOwnState*>(p.own);
  u32 rank = threadIdx.x, word = word_of_rank(rank), bit = bit_of_rank(rank);
  u64 masked = (own->masked.words[word] & ~p.clear.words[word]) | p.set.words[word];
  if (p.status != 0 && rank < p.ranks) reinterpret_cast<u32*>(p.status)[rank] = masked >> bit & 1;
  __syncthreads();
  if (bit == 0) own->masked.words[word] = masked;
}
