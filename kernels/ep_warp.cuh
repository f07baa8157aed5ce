// What a warp does together.
#pragma once

#include <machine.cuh>

constexpr u32 LANES = 32;
constexpr u32 ALL = 0xffffffff;
// Vectors that a lane has in flight.
constexpr u32 ROUND = 4;

__device__ __forceinline__ u32 lane_of_thread() { return threadIdx.x % LANES; }
__device__ __forceinline__ u32 warp_of_thread() { return threadIdx.x / LANES; }
__device__ __forceinline__ u32 warps_of_block() { return blockDim.x / LANES; }

// Lanes before this one.
__device__ __forceinline__ u32 lanes_before() { return (1u << lane_of_thread()) - 1; }

// Addresses that some lanes have: `has` is one bit for each.
struct Targets {
  u64 mine;
  u32 has;
};

template <typename Each>
__device__ __forceinline__ void for_each(const Targets& targets, Each each) {
#pragma unroll 1
  for (u32 left = targets.has; left != 0; left &= left - 1) {
    each(__shfl_sync(ALL, targets.mine, __ffs(static_cast<int>(left)) - 1));
  }
}

// Copies `count` vectors to all targets; the warps of a block share the work.
template <u32 SETS>
__device__ __forceinline__ void copy_to_all(const Targets (&targets)[SETS], u64 from, u32 count) {
  u32 step = warps_of_block() * LANES;
#pragma unroll 1
  for (u32 first = warp_of_thread() * LANES; first < count; first += ROUND * step) {
    u32 at = first + lane_of_thread();
    Vector r[ROUND];
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      if (at + i * step < count) r[i] = load_vector(from + 16ull * (at + i * step));
    }
#pragma unroll
    for (u32 set = 0; set < SETS; set++) {
      for_each(targets[set], [&](u64 to) {
#pragma unroll
        for (u32 i = 0; i < ROUND; i++) {
          if (at + i * step < count) store_vector(to + 16ull * (at + i * step), r[i]);
        }
      });
    }
  }
}
