// Low latency combine: rows come back from the experts, and are summed.
#pragma once

#include "../scan.cuh"
#include "dispatch.cuh"
#include "terms.cuh"

// Up to so many records, a block counts their rows, to give all warps equally many. With more
// records, each warp has about as many rows anyway.
constexpr u32 MAX_COUNTED = 1024;

// State of a block that sends rows back.
struct ReturnState {
  WaitState wait;
  u32 starts[STARTS];         // by rank: records before its first
  u32 rows[MAX_COUNTED + 1];  // by record: rows before its first, if they are counted
  u32 sums[UCCL_EP_PACKING_THREADS];
};

// The index of the last of `count` ascending numbers that is not more than `at`; the first is 0.
__device__ __forceinline__ u32 find(const u32* starts, u32 count, u32 at) {
  u32 low = 0, high = count;
#pragma unroll 1
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (starts[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Reads the starts of the records, valid behind the block's next barrier. Values from a corrupted
// table are capped.
__device__ __forceinline__ void load_starts(const UcclEpLowLatencyReturn& p, ReturnState& s) {
  auto load = [&](u32 rank) {
    s.starts[rank] = min(reinterpret_cast<const u32*>(p.records)[rank], p.group.ranks * p.slots);
  };
  // The first warp may still be finding the call's place.
  u32 first = threadIdx.x - LANES;
  if constexpr (IS_WIDE) {
#pragma unroll 1
    for (u32 rank = first; rank <= p.group.ranks; rank += blockDim.x - LANES) load(rank);
  } else {
    if (first <= p.group.ranks) load(first);
  }
}

// The number of records from a rank.
__device__ __forceinline__ u32 records_of_rank(const ReturnState& s, u32 rank) {
  return max(s.starts[rank + 1], s.starts[rank]) - s.starts[rank];
}

// A row that an expert has made of a record's token, and the token's choice of this expert.
struct ExpertRow {
  u32 token;
  u32 row;
  u32 choice;
  bool is_there;

  // Its slot in the place of the token's rank.
  __device__ __forceinline__ u32 slot(const UcclEpLowLatencyReturn& p) const { return choice * p.slots + token; }
};

// The `nth` expert row of a record.
__device__ __forceinline__ ExpertRow expert_row_of(const UcclEpLowLatencyReturn& p, u32 at, u32 nth) {
  const u32* record = record_of(p.records, p.top_k, at);
  ExpertRow expert_row = {token_of_record(record[0]), row_of_record(record[1 + nth]), choice_of_record(record[1 + nth]),
                          false};
  // Indices from corrupted tensors reach no other memory.
  expert_row.is_there = nth < rows_of_record(record[0]) && expert_row.row < p.len && expert_row.choice < p.top_k &&
                        expert_row.token < p.slots;
  return expert_row;
}

// The copy of an expert row to the rank of its record.
__device__ __forceinline__ RowCopy row_copy(const UcclEpLowLatencyReturn& p, const PlacedCall& call, u32 rank,
                                            const ExpertRow& expert_row) {
  if (!expert_row.is_there || is_masked(call, rank)) return {0, 0, 0};
  u64 to = place_at_rank(call, rank) + static_cast<u64>(expert_row.slot(p)) * p.slot_stride;
  return {p.rows + expert_row.row * p.row_stride, to, rank};
}

// The number of rows that go back for so many records, or a bound where rows are not counted. All
// threads of the block take part.
__device__ __forceinline__ u32 count_rows(const UcclEpLowLatencyReturn& p, ReturnState& s, u32 records) {
  if (records > MAX_COUNTED) return records * p.top_k;
#pragma unroll 1
  for (u32 at = threadIdx.x; at < records; at += blockDim.x) {
    s.rows[at] = min(rows_of_record(record_of(p.records, p.top_k, at)[0]), p.top_k);
  }
  __syncthreads();
  scan(s.rows, records, s.sums);
  return s.rows[records];
}

// The copy of the `i`th of all rows. If rows are not counted, the first rows of all records come
// first.
__device__ __forceinline__ RowCopy nth_row_copy(const UcclEpLowLatencyReturn& p, const ReturnState& s, u32 i) {
  u32 records = s.starts[p.group.ranks], at = i % records, nth = i / records, rank = 0;
  if (records <= MAX_COUNTED) {
    at = find(s.rows, records, i);
    nth = i - s.rows[at];
  }
#pragma unroll 1
  while (s.starts[rank + 1] <= at) rank++;
  return row_copy(p, s.wait.call, rank, expert_row_of(p, at, nth));
}

// Sends all rows back, each by `send`, and then sets `arrived` at every rank.
template <typename Send>
__device__ __forceinline__ void send_rows(const UcclEpLowLatencyReturn& p, ReturnState& s, Send send) {
  if (!begin_send(p.group, p.call, s.wait)) return;
  if (is_spare_block()) write_headers(p.group, p.call, s.wait.call, nullptr);
  load_starts(p, s);
  __syncthreads();
  u32 total = count_rows(p, s, s.starts[p.group.ranks]);
  Team team = team_for(total);
#pragma unroll 1
  for (u32 i = team.first; i < total; i += team.step) {
    RowCopy row = nth_row_copy(p, s, i);
    if (row.to != 0) send(team, row);
  }
  auto of = [&](u32 i) { return nth_row_copy(p, s, i); };
  end_send(p.group, p.call, s.wait, [&] { send_rows_far(p.group, s.wait, of, total, p.slot_stride); });
}

__device__ __forceinline__ void return_whole(const UcclEpLowLatencyReturn& p, ReturnState& s) {
  send_rows(p, s, [&](const Team& team, const RowCopy& row) { copy<ROUND>(team, row.to, row.from, p.row_len / 16); });
}

// The terms of a token's sum, with a choice for each lane.
__device__ __forceinline__ Terms terms_of(const UcclEpLowLatencySum& p, const WaitState& w, u32 token) {
  u32 lane = lane_of_thread();
  Terms terms = {0, 0.0f, NO_RANK, 0, 0, 0};
  if (lane < p.routes.top_k) {
    u64 at = static_cast<u64>(token) * p.routes.top_k + lane;
    u32 expert = choice_of(p.routes, p.group.ranks, at), rank = expert / p.routes.local_experts;
    if (expert != NO_EXPERT && !has_no_row(w, rank)) terms.rank = rank;
    terms.weight = reinterpret_cast<const float*>(p.weights)[at];
    u64 slot = static_cast<u64>(lane) * p.slots + token;
    terms.row = place_of_rows_from(p.group, w.call, rank) + slot * p.slot_stride;
  }
  terms.has = __ballot_sync(ALL, terms.rank != NO_RANK);
  return terms;
}

__device__ __forceinline__ void sum_token(const UcclEpLowLatencySum& p, const WaitState& w, const Team& team,
                                          u32 token) {
  u64 out = p.out + token * static_cast<u64>(p.row_len);
  sum_terms(in_order(terms_of(p, w, token)), out, slice_of(team, p.row_len / 16));
}

// Sums each token, by `sum`, once all rows have come. Each team has a token at a time. The block
// has begun.
template <typename Sum>
__device__ __forceinline__ void sum_tokens(const UcclEpLowLatencySum& p, WaitState& w, const Team& team, Sum sum) {
  if (!wait_for_data(p.group, p.call, p.waits, w)) return;
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) sum(team, token);
  if (is_last_block(p.group, STEP_RECEIVE, w)) set_taken(p.group, p.call, w);
}

__device__ __forceinline__ void sum_whole(const UcclEpLowLatencySum& p, WaitState& w) {
  sum_tokens(p, w, team_for(p.routes.tokens), [&](const Team& team, u32 token) { sum_token(p, w, team, token); });
}
