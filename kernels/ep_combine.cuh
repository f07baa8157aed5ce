// What experts made of tokens comes back, and is summed.
#pragma once

#include "ep_dispatch.cuh"
#include "ep_scan.cuh"

// What a block knows of the rows that go back.
struct Returning {
  Waiting waiting;
  u32 starts[UCCL_EP_MOST_EXPERTS + 1];  // by local expert, how many rows are before its first
  u32 sums[UCCL_EP_THREADS];
};

// The last of `count` ascending numbers that is not more than `at`; the first is 0.
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

__device__ __forceinline__ void send_header(const UcclEpGroup& g, const UcclEpCall& c, const UcclEpPlaced& call) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * UCCL_EP_HEADER; i += blockDim.x) {
    u32 to = i / UCCL_EP_HEADER, word = i % UCCL_EP_HEADER;
    if (is_masked(call, to)) continue;
    reinterpret_cast<u64*>(header_of(g, to, g.rank, call.number))[word] = c.header[word];
  }
}

// The `at`th row that goes back.
__device__ __forceinline__ Going going(const UcclEpReturn& p, const Returning& s, u32 at) {
  u32 expert = find(s.starts, p.local_experts, at);
  u64 row = static_cast<u64>(expert) * p.expert_rows + (at - s.starts[expert]);
  u32 origin = reinterpret_cast<const u32*>(p.origin)[row];
  u32 token = reinterpret_cast<const u32*>(p.src_info)[row];
  u32 rank = origin / UCCL_EP_MOST_TOP_K, k = origin % UCCL_EP_MOST_TOP_K;
  // Tensors that the caller has spoilt reach no other memory.
  if (rank >= p.group.ranks || k >= p.top_k || token >= p.slots) return {0, 0, 0};
  if (is_masked(s.waiting.call, rank)) return {0, 0, 0};
  u64 slot = static_cast<u64>(k) * p.slots + token;
  u64 to = p.group.windows[rank] + s.waiting.call.place + slot * p.slot_stride;
  return {p.rows + row * p.row_stride, to, rank};
}

// Sends all rows that go back, each by `send`, and then tells of them. Returns whether the block has sent what it had to.
template <typename Send>
__device__ __forceinline__ bool send_rows(const UcclEpReturn& p, Returning& s, Send send) {
  if (!begin_send(p.group, p.call, s.waiting)) return false;
  if (is_spare_block()) send_header(p.group, p.call, s.waiting.call);
  const u64* ranges = reinterpret_cast<const u64*>(p.layout_range);
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    u64 last = ranges[expert * p.group.ranks + p.group.ranks - 1];
    s.starts[expert] = min(static_cast<u32>(last >> 32) + static_cast<u32>(last), p.expert_rows);
  }
  __syncthreads();
  scan(s.starts, p.local_experts, s.sums);
  u32 total = s.starts[p.local_experts];
  Team team = team_for(total);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) {
    Going row = going(p, s, at);
    if (row.to != 0) send(team, row);
  }
  auto of = [&](u32 at) { return going(p, s, at); };
  end_send(p.group, p.call, s.waiting, [&] { send_rows_far(p.group, s.waiting, of, total, p.slot_stride); });
  return true;
}

__device__ __forceinline__ bool combine_send(const UcclEpReturn& p, Returning& s) {
  return send_rows(p, s, [&](const Team& team, const Going& row) {
    copy<ROUND>(team, row.to, row.from, p.row_len / 16);
  });
}

// The terms of a token's sum: a lane has those of a choice.
struct Terms {
  Targets rows;
  float weight;
};

__device__ __forceinline__ Terms terms_of(const UcclEpSum& p, const UcclEpPlaced& call, u32 token) {
  u32 lane = lane_of_thread();
  Targets rows = {0, 0};
  float weight = 0.0f;
  bool is_chosen = false;
  if (lane < p.routes.top_k) {
    u64 at = static_cast<u64>(token) * p.routes.top_k + lane;
    u32 expert = choice_of(p.routes, p.group.ranks, at);
    is_chosen = expert != NO_EXPERT && !is_masked(call, expert / p.routes.local_experts);
    weight = reinterpret_cast<const float*>(p.weights)[at];
    u64 slot = static_cast<u64>(lane) * p.slots + token;
    rows.mine = p.group.windows[p.group.rank] + call.place + slot * p.slot_stride;
  }
  rows.has = __ballot_sync(ALL, is_chosen);
  return {rows, weight};
}

// Sums the rows of a token's choices, in their order.
__device__ __forceinline__ void sum_token(const UcclEpSum& p, const UcclEpPlaced& call, const Team& team, u32 token) {
  u32 lane = lane_of_thread();
  auto [rows, weight] = terms_of(p, call, token);
  u32 count = p.row_len / 16;
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < count; first += team.lanes()) {
    u32 at = first + lane;
    Sums sums = {};
#pragma unroll 1
    for (u32 left = rows.has; left != 0;) {
      Vector v[ROUND];
      float weights[ROUND];
      u32 taken = 0;
#pragma unroll
      for (u32 i = 0; i < ROUND; i++) {
        if (left != 0) {
          int k = __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          taken = i + 1;
          u64 row = __shfl_sync(ALL, rows.mine, k);
          weights[i] = __shfl_sync(ALL, weight, k);
          if (at < count) v[i] = load_vector(row + 16ull * at);
        }
      }
#pragma unroll
      for (u32 i = 0; i < ROUND; i++) {
        if (i < taken && at < count) add_weighted(sums, v[i], weights[i]);
      }
    }
    if (at < count) store_vector(p.out + token * static_cast<u64>(p.row_len) + 16ull * at, rounded(sums));
  }
}

// Makes each token's sum, by `sum`, when all rows have come. The block has begun.
template <typename Sum>
__device__ __forceinline__ void sum_tokens(const UcclEpSum& p, Waiting& w, Sum sum) {
  if (!wait_for_data(p.group, p.call, p.waits, w)) return;
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) sum(team, token);
  if (is_last_block(p.group, STEP_RECEIVE, w)) tell_taken(p.group, p.call, w);
}

__device__ __forceinline__ void sum_arriving(const UcclEpSum& p, Waiting& w) {
  sum_tokens(p, w, [&](const Team& team, u32 token) { sum_token(p, w.call, team, token); });
}

__device__ __forceinline__ void combine_receive(const UcclEpSum& p, Waiting& w) {
  if (begin_block(p.group, p.call, STEP_RECEIVE, w)) sum_arriving(p, w);
}

// Sends rows back and sums in one launch, as `dispatch` does.
__device__ __forceinline__ void combine(const UcclEpCombine& p, Returning& s) {
  if (combine_send(p.give_back, s)) sum_arriving(p.sum, s.waiting);
}
