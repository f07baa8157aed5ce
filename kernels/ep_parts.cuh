// Normal mode, where ranks reach each other's windows: a call's rows are sent in parts, and a part has a mark of its own, so
// that whoever takes them out waits for no more than what it takes. `arrived` then says that the counts are there.
#pragma once

#include "ep_wait.cuh"
#include "ep_warp.cuh"

// Up to so many rows, each is a part of its own, and several warps share it.
constexpr u32 FEW_ROWS = 1024;
constexpr u32 MOST_PIECES = 8;

// How rows are cut, which both sides find by their number: into parts of so many rows, and each row into pieces. A mark is of a piece
// of a part.
struct Cut {
  u32 rows;
  u32 pieces;
  u32 marks;
};

__device__ __forceinline__ Cut cut_of(u32 rows) {
  if (rows == 0) return {1, 1, 0};
  if (rows <= FEW_ROWS) {
    u32 pieces = min(UCCL_EP_PARTS / rows, MOST_PIECES);
    return {1, pieces, rows * pieces};
  }
  u32 of_part = max((rows + UCCL_EP_PARTS - 1) / UCCL_EP_PARTS, 2u);
  return {of_part, 1, (rows + of_part - 1) / of_part};
}

// Some of a launch's blocks, of which each warp takes one thing at a time.
struct Share {
  u32 block;   // which of them this one is
  u32 blocks;

  __device__ __forceinline__ u32 first() const { return block + warp_of_thread() * blocks; }
  __device__ __forceinline__ u32 step() const { return blocks * warps_of_block(); }
};

// A launch that sends and takes out: as the link is slower than the GPU's memory, fewer blocks send. One block does both.
constexpr u32 BLOCKS_OF_SENDER = 3;

__device__ __forceinline__ u32 senders() { return max(gridDim.x / BLOCKS_OF_SENDER, 1u); }
__device__ __forceinline__ bool is_sender() { return blockIdx.x + senders() >= gridDim.x; }
__device__ __forceinline__ bool is_taker() { return !is_sender() || gridDim.x == 1; }
__device__ __forceinline__ Share share_of_sender() { return {blockIdx.x + senders() - gridDim.x, senders()}; }
__device__ __forceinline__ Share share_of_taker() { return {blockIdx.x, max(gridDim.x - senders(), 1u)}; }

// A mark: the call's number, and which of the rows for its receiver the part has. No part has more than 63.
constexpr u32 MARK_CALL = 22;
constexpr u32 MARK_FIRST = 6;

__device__ __forceinline__ u64 mark_of_part(u64 call, u32 first, u32 count) {
  return call << MARK_CALL | first << MARK_FIRST | count;
}
__device__ __forceinline__ u32 first_of_mark(u64 mark) { return static_cast<u32>(mark) >> MARK_FIRST & 0xffff; }
__device__ __forceinline__ u32 count_of_mark(u64 mark) { return static_cast<u32>(mark) & ((1u << MARK_FIRST) - 1); }

// The first mark of a call's parts from a rank.
__device__ __forceinline__ u64 marks_of(const UcclEpGroup& g, u32 at, u32 from, u64 call) {
  u64 nth = static_cast<u64>(slot_of(call)) * g.ranks + from;
  return g.windows[at] + g.marks_at + nth * UCCL_EP_PARTS * sizeof(u64);
}

// Waits for marks, of which a lane has one or none. All lanes of a warp come here. Returns whether all are there; `seen` is what a
// lane's has.
__device__ __forceinline__ bool wait_for_parts(const UcclEpGroup& g, Waiting& w, bool has, u32 peer, u64 word,
                                               u64& seen) {
  u64 call = w.call.number;
  seen = 0;
  bool is_there = true;
  if (has) {
    Awaited part = {word, mark_of_part(call, 0, 0), peer, UCCL_EP_DATA};
    is_there = wait_for_word(g, w, part, seen, [&](u64 mark) { return mark >> MARK_CALL == call; }) == CAME;
  }
  bool are_there = __all_sync(ALL, is_there);
  __syncwarp();
  return are_there;
}
