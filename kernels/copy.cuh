// Parameters of the kernels that copy. `cargo xtask headers` makes this file from
// crates/uccl-device/src/cuda/gather/params.rs.
// clang-format off
#pragma once

#include <machine.cuh>

// Threads of a block; two blocks fit on a multiprocessor, however many registers they take.
constexpr u32 UCCL_MOST_THREADS = 256;
constexpr u32 UCCL_SMALL_PIECES = 100;
constexpr u32 UCCL_SMALL_WARPS = 100;
constexpr u32 UCCL_WIDE_PIECES = 256;
constexpr u32 UCCL_WIDE_WARPS = 1056;

// One piece of a vector.
struct UcclPiece {
  u64 destination;  // The destination address.
  u64 source;       // The source address.
  u64 len_bytes;    // Its length in bytes.
};

// The begin of a warp's share, where the previous warp's share ends.
struct UcclCursor {
  u64 offset;  // How many bytes of the piece belong to earlier shares.
  u32 piece;   // The piece's index.
  u32 zero;
};

// The parameters that all kernels have in common.
struct UcclHead {
  u64 flag;     // Host memory to which the kernel writes the ticket once all is copied, or null.
  u64 ticket;
  u64 counter;  // A zeroed u32 in device memory, which only this launch uses.
  u64 word;     // The word that the kernel changes once all is copied, or null.
  u64 value;    // The value to set the word to, or to add to it.
  u32 warps;    // How many warps have work; there is one more cursor.
  u32 adds;     // 1: adds to the word; 0: sets it.
};

// The tables are in memory of their own.
struct UcclCopyTable {
  UcclHead head;
  u64 pieces;
  u64 cursors;
};

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
