// Work that the lanes of a warp share.
#pragma once

#include <machine.cuh>

constexpr u32 LANES = 32;
constexpr u32 ALL = 0xffffffff;
// Vectors that a lane has in flight; the second for kernels with fewer threads, which have more
// registers.
constexpr u32 ROUND = 4;
constexpr u32 LONG_ROUND = 14;

__device__ __forceinline__ u32 lane_of_thread() { return threadIdx.x % LANES; }
__device__ __forceinline__ u32 warp_of_thread() { return threadIdx.x / LANES; }
__device__ __forceinline__ u32 warps_of_block() { return blockDim.x / LANES; }

// A bit for each lane before this one.
__device__ __forceinline__ u32 lanes_before() { return (1u << lane_of_thread()) - 1; }

// Addresses that some lanes have: a bit for each in `has`.
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

// Warps that share the work on a row. All teams of a launch work at the same time, on a row each.
struct Team {
  u32 first;  // the team's first row
  u32 step;   // rows from one of its own to the next
  u32 warp;   // this warp's index in the team
  u32 warps;

  __device__ __forceinline__ u32 lane() const { return warp * LANES + lane_of_thread(); }
  __device__ __forceinline__ u32 lanes() const { return warps * LANES; }
};

// A block's number. A GPU starts blocks in the order of blockIdx: after the first, those with the
// last numbers. So the block that sends counts, and those that send rows before they take any out,
// run before those that wait for them.
__device__ __forceinline__ u32 block_number() { return blockIdx.x == 0 ? 0 : gridDim.x - blockIdx.x; }

// Some of a launch's blocks.
struct Share {
  u32 block;  // this block's index among them
  u32 blocks;
};

__device__ __forceinline__ bool has_block(const Share& share) { return share.block < share.blocks; }

// The last blocks of a launch.
__device__ __forceinline__ Share last_blocks(u32 blocks) { return {block_number() + blocks - gridDim.x, blocks}; }

// Chooses the size of teams by the rows: whole blocks, or up to `most` blocks, share each of a few
// rows; single warps take many rows. So as many loads as possible are in flight.
__device__ __forceinline__ Team team_for(u32 rows, const Share& share, u32 most) {
  u32 warps = warps_of_block(), size = warps, blocks = min(share.blocks / max(rows, 1u), most);
  if (blocks > 1) {
    return {share.block / blocks, share.blocks / blocks, share.block % blocks * warps + warp_of_thread(),
            blocks * warps};
  }
#pragma unroll 1
  while (size % 2 == 0 && warps / size * share.blocks < rows) size /= 2;
  u32 teams = warps / size;
  return {share.block + warp_of_thread() / size * share.blocks, teams * share.blocks, warp_of_thread() % size, size};
}

__device__ __forceinline__ Team team_for(u32 rows) { return team_for(rows, last_blocks(gridDim.x), 1); }

// Consecutive vectors of a row.
struct Slice {
  u32 begin;
  u32 end;
};

// The slice of `count` vectors for a warp of a team.
__device__ __forceinline__ Slice slice_of(const Team& team, u32 count) {
  u32 share = (count + team.lanes() - 1) / team.lanes() * LANES;
  u32 begin = min(team.warp * share, count);
  return {begin, min(begin + share, count)};
}

// Loads a lane's vectors of a slice, starting at `first`.
template <u32 IN_FLIGHT>
__device__ __forceinline__ void load_vectors(Vector (&v)[IN_FLIGHT], u64 from, u32 first, u32 end) {
  u32 at = first + lane_of_thread();
  u64 address = from + 16ull * at;
#pragma unroll
  for (u32 i = 0; i < IN_FLIGHT; i++) {
    if (at + i * LANES < end) v[i] = load_vector(address + 16 * i * LANES);
  }
}

template <u32 IN_FLIGHT>
__device__ __forceinline__ void store_vectors(u64 to, const Vector (&v)[IN_FLIGHT], u32 first, u32 end) {
  u32 at = first + lane_of_thread();
  u64 address = to + 16ull * at;
#pragma unroll
  for (u32 i = 0; i < IN_FLIGHT; i++) {
    if (at + i * LANES < end) store_vector(address + 16 * i * LANES, v[i]);
  }
}

// Copies `count` vectors to all targets, with IN_FLIGHT of them in flight in each lane. `meanwhile`
// runs while the first are loaded, and may set the targets.
template <u32 IN_FLIGHT, u32 SETS, typename Meanwhile>
__device__ __forceinline__ void copy_to_all(const Team& team, const Targets (&targets)[SETS], u64 from, u32 count,
                                            Meanwhile meanwhile) {
  Slice slice = slice_of(team, count);
  u32 first = slice.begin;
#pragma unroll 1
  do {
    Vector v[IN_FLIGHT];
    load_vectors(v, from, first, slice.end);
    if (first == slice.begin) meanwhile();
#pragma unroll
    for (u32 set = 0; set < SETS; set++) {
      for_each(targets[set], [&](u64 to) { store_vectors(to, v, first, slice.end); });
    }
    first += IN_FLIGHT * LANES;
  } while (first < slice.end);
}

template <u32 IN_FLIGHT, u32 SETS>
__device__ __forceinline__ void copy_to_all(const Team& team, const Targets (&targets)[SETS], u64 from, u32 count) {
  copy_to_all<IN_FLIGHT>(team, targets, from, count, [] {});
}

// Copies `count` vectors to one place.
template <u32 IN_FLIGHT>
__device__ __forceinline__ void copy(const Team& team, u64 to, u64 from, u32 count) {
  Slice slice = slice_of(team, count);
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += IN_FLIGHT * LANES) {
    Vector v[IN_FLIGHT];
    load_vectors(v, from, first, slice.end);
    store_vectors(to, v, first, slice.end);
  }
}
