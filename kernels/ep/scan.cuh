// Exclusive prefix sums. One block computes them.
#pragma once

#include "warp.cuh"

// Turns `count` counts into the sums of the counts before each. `all[count]` becomes the sum of
// all.
__device__ __forceinline__ void scan(u32* all, u32 count, u32* sums) {
  u32 share = (count + blockDim.x - 1) / blockDim.x;
  u32 begin = min(threadIdx.x * share, count), end = min(begin + share, count);
  u32 sum = 0;
  for (u32 i = begin; i < end; i++) sum += all[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp_of_thread() == 0) {
    u32 before = 0;
    // Later threads have no counts.
    u32 counting = min(count, blockDim.x);
#pragma unroll 1
    for (u32 first = 0; first < counting; first += LANES) {
      u32 own = sums[first + lane_of_thread()], up_to = own;
#pragma unroll
      for (u32 step = 1; step < LANES; step *= 2) {
        u32 other = __shfl_up_sync(ALL, up_to, step);
        if (lane_of_thread() >= step) up_to += other;
      }
      sums[first + lane_of_thread()] = before + up_to - own;
      before += __shfl_sync(ALL, up_to, LANES - 1);
    }
    if (lane_of_thread() == 0) all[count] = before;
  }
  __syncthreads();
  u32 before = sums[threadIdx.x];
  for (u32 i = begin; i < end; i++) {
    u32 own = all[i];
    all[i] = before;
    before += own;
  }
  __syncthreads();
}
