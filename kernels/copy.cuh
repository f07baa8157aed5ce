// Parameters of the copy kernels. Mirrored in crates/uccl-device/src/cuda/gather/params.rs: `cargo
// xtask kernels --check` compares sizes and offsets.
#pragma once

#include <machine.cuh>

// One piece of a vector: `len` bytes from `src` to `dst`, both addresses that this GPU reaches.
struct UcclPiece {
  u64 dst;
  u64 src;
  u64 len;
};

// The begin of a warp's share: a piece, and the bytes of it that belong to earlier shares.
struct UcclCursor {
  u64 offset;
  u32 piece;
  u32 zero;
};

struct UcclHead {
  u64 flag;  // host memory for `ticket` once all is copied, or null
  u64 ticket;
  u64 counter;  // device memory, a zeroed u32 for each launch in flight
  u64 word;     // eight bytes that this GPU reaches, to be changed once all is copied, or null
  u64 value;    // the word's new value, or the number to add to it
  u32 warps;    // warps that have work; there is one more cursor
  u32 adds;     // 1: add to the word; 0: set it
};

// The tables are in memory of their own.
struct UcclCopyTable {
  UcclHead head;
  u64 pieces;
  u64 cursors;
};

// Threads of a block; two blocks fit on a multiprocessor, however many registers they take.
constexpr u32 UCCL_MOST_THREADS = 256;

constexpr u32 UCCL_SMALL_PIECES = 100;
constexpr u32 UCCL_SMALL_WARPS = 100;
constexpr u32 UCCL_WIDE_PIECES = 256;
constexpr u32 UCCL_WIDE_WARPS = 1056;

// The tables are launch parameters, within the 4 KiB that every driver takes.
struct UcclCopySmall {
  UcclHead head;
  UcclPiece pieces[UCCL_SMALL_PIECES];
  UcclCursor cursors[UCCL_SMALL_WARPS + 1];
};

// The same within 32 KiB, which drivers of CUDA 12.1 and later take.
struct UcclCopyWide {
  UcclHead head;
  UcclPiece pieces[UCCL_WIDE_PIECES];
  UcclCursor cursors[UCCL_WIDE_WARPS + 1];
};

static_assert(sizeof(UcclCopySmall) <= 4096, "the parameters of every driver");
static_assert(sizeof(UcclCopyWide) <= 32764, "the parameters of a CUDA 12.1 driver");
