// The handle that a low latency dispatch leaves for its combine, in u32: by rank, the records
// before its first, and then the number of all; then for each record its token and number of rows,
// and the rows, each with its choice.
#pragma once

#include "../records.cuh"

constexpr u32 STARTS = RANKS + 1;

__device__ __forceinline__ void store_start(u64 records, u32 rank, u32 start) {
  reinterpret_cast<u32*>(records)[rank] = start;
}

__device__ __forceinline__ u32* record_of(u64 records, u32 top_k, u32 at) {
  return reinterpret_cast<u32*>(records) + STARTS + static_cast<u64>(at) * (1 + top_k);
}

// A row of a record, and its choice, which has the lower bits.
constexpr u32 CHOICE_BITS = 5;
static_assert(UCCL_EP_MAX_TOP_K <= 1u << CHOICE_BITS, "a choice's number");
static_assert(static_cast<u64>(UCCL_EP_MAX_EXPERTS) * UCCL_EP_MAX_TOKENS < NO_ROW >> CHOICE_BITS, "a row's number");

__device__ __forceinline__ u32 row_of_record(u32 word) { return word >> CHOICE_BITS; }
__device__ __forceinline__ u32 choice_of_record(u32 word) { return word & ((1u << CHOICE_BITS) - 1); }

// The first word of a record: its token has the lower bits.
__device__ __forceinline__ u32 token_of_record(u32 begin) { return begin & ((1u << TOKEN_BITS) - 1); }
__device__ __forceinline__ u32 rows_of_record(u32 begin) { return begin >> TOKEN_BITS; }

// Stores a record. A lane has the row of a choice, or NO_ROW. One warp.
__device__ __forceinline__ void store_record(u64 records, u32 top_k, u32 at, u32 token, u32 row) {
  u32* record = record_of(records, top_k, at);
  u32 lane = lane_of_thread(), has = __ballot_sync(ALL, row != NO_ROW);
  if (lane == 0) record[0] = __popc(has) << TOKEN_BITS | token;
  if (row != NO_ROW) record[1 + __popc(has & lanes_before())] = row << CHOICE_BITS | lane;
}
