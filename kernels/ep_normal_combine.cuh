// Normal mode: one row of each rank comes back for a token, and they are summed.
#pragma once

#include "ep_combine.cuh"
#include "ep_normal_dispatch.cuh"

// Where a row goes.
__device__ __forceinline__ Going going(const UcclEpNormalReturn& p, const UcclEpPlaced& call, u32 row) {
  u32 origin = reinterpret_cast<const u32*>(p.origin)[row], token = reinterpret_cast<const u32*>(p.src_info)[row];
  u32 rank = origin / ORIGIN_RANK, nth = origin % ORIGIN_RANK;
  // Tensors that the caller has spoilt reach no other memory.
  if (rank >= p.group.ranks || nth >= p.token_rows || token >= p.slots) return {0, 0, 0};
  if (is_masked(call, rank)) return {0, 0, 0};
  u64 slot = static_cast<u64>(nth) * p.slots + token;
  return {p.rows + row * p.row_stride, p.group.windows[rank] + call.place + slot * p.slot_stride, rank};
}

// Sends a row, and its weights, back to where its token came from.
__device__ __forceinline__ void return_row(const UcclEpNormalReturn& p, const UcclEpPlaced& call, const Team& team,
                                           u32 row) {
  Going one = going(p, call, row);
  if (one.to == 0) return;
  Targets targets[1] = {{one.to, 1}};
  copy_to_all(team, targets, one.from, p.row_len / 16);
  u32 k = team.lane();
  if (p.weights != 0 && k < p.top_k) {
    u64 at = static_cast<u64>(row) * p.top_k + k;
    reinterpret_cast<float*>(one.to + p.weights_at)[k] = reinterpret_cast<const float*>(p.weights)[at];
  }
}

__device__ __forceinline__ void normal_return(const UcclEpNormalReturn& p, Waiting& w) {
  const UcclEpGroup& g = p.group;
  if (!begin_send(g, p.call, w)) return;
  if (is_spare_block()) send_header(g, p.call, w.call);
  u32 total = reinterpret_cast<const u32*>(p.starts)[g.ranks];
  if (!has_room(g, p.call, total, p.len, w)) return;
  Team team = team_for(total);
#pragma unroll 1
  for (u32 row = team.first; row < total; row += team.step) return_row(p, w.call, team, row);
  auto of = [&](u32 row) { return going(p, w.call, row); };
  end_send(g, p.call, w, [&] { send_rows_far(g, w, of, total, p.slot_stride); });
}

// The row of a rank for a token: of the rows in a token's slots, as many as there are ranks of the token before it.
__device__ __forceinline__ u64 row_of(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token, u32 rank) {
  u64 mask = reinterpret_cast<const u64*>(p.routes.masks)[token];
  u64 slot = static_cast<u64>(ranks_before(mask, rank)) * p.slots + token;
  return p.group.windows[p.group.rank] + call.place + slot * p.slot_stride;
}

// A token's rows by rank: a lane has those of two ranks.
__device__ __forceinline__ void rows_by_rank(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token,
                                             Targets (&rows)[2]) {
  u64 mask = reinterpret_cast<const u64*>(p.routes.masks)[token];
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 rank = half * LANES + lane_of_thread();
    bool is_there = (mask >> rank & 1) != 0 && !is_masked(call, rank);
    rows[half] = {row_of(p, call, token, rank), __ballot_sync(ALL, is_there)};
  }
}

// A token's rows by the last of each rank's choices: a lane has a choice. Returns whether the lane has a row, its rank's last
// or not.
__device__ __forceinline__ bool rows_by_choice(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token,
                                               Targets (&rows)[2]) {
  u32 lane = lane_of_thread(), expert = NO_EXPERT;
  if (lane < p.routes.top_k) {
    expert = reinterpret_cast<const u32*>(p.routes.places)[static_cast<u64>(token) * p.routes.top_k + lane];
  }
  u32 rank = expert == NO_EXPERT ? UCCL_EP_MOST_RANKS : expert / p.routes.local_experts;
  u32 same = __match_any_sync(ALL, rank);
  bool is_there = rank < p.group.ranks && !is_masked(call, rank);
  bool is_last = same >> lane == 1;
  rows[0] = {is_there ? row_of(p, call, token, rank) : 0, __ballot_sync(ALL, is_there && is_last)};
  rows[1] = {0, 0};
  return is_there;
}

// Adds some rows' vectors at a place, in their order.
__device__ __forceinline__ void add_rows(Sums& sums, const Targets& rows, u32 at, bool is_inside) {
#pragma unroll 1
  for (u32 left = rows.has; left != 0;) {
    Vector v[ROUND];
    u32 taken = 0;
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      if (left != 0) {
        u64 row = __shfl_sync(ALL, rows.mine, __ffs(static_cast<int>(left)) - 1);
        left &= left - 1;
        taken = i + 1;
        if (is_inside) v[i] = load_vector(row + 16ull * at);
      }
    }
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) {
      if (i < taken && is_inside) add(sums, v[i]);
    }
  }
}

// Sums what came back of a token's weights: those of all ranks, or of each choice's rank. One warp does it.
__device__ __forceinline__ void sum_weights(const UcclEpNormalSum& p, u32 token, const Targets (&rows)[2],
                                            bool has_row) {
  u32 lane = lane_of_thread();
  float sum = 0.0f;
  if (p.order == UCCL_EP_BY_CHOICE) {
    if (has_row) sum = reinterpret_cast<const float*>(rows[0].mine + p.weights_at)[lane];
  } else {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      for_each(rows[half], [&](u64 row) {
        if (lane < p.routes.top_k) sum = __fadd_rn(sum, reinterpret_cast<const float*>(row + p.weights_at)[lane]);
      });
    }
  }
  if (lane < p.routes.top_k) reinterpret_cast<float*>(p.weights)[static_cast<u64>(token) * p.routes.top_k + lane] = sum;
}

// Sums a token's rows, from its biases on.
__device__ __forceinline__ void sum_rows(const UcclEpNormalSum& p, const UcclEpPlaced& call, const Team& team,
                                         u32 token) {
  Targets rows[2];
  bool has_row = false;
  if (p.order == UCCL_EP_BY_CHOICE) {
    has_row = rows_by_choice(p, call, token, rows);
  } else {
    rows_by_rank(p, call, token, rows);
  }
  u32 count = p.row_len / 16;
  u64 row_at = token * static_cast<u64>(p.row_len);
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < count; first += team.lanes()) {
    u32 at = first + lane_of_thread();
    bool is_inside = at < count;
    Sums sums = {};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      if (p.bias[i] != 0 && is_inside) add(sums, load_vector(p.bias[i] + row_at + 16ull * at));
    }
    add_rows(sums, rows[0], at, is_inside);
    add_rows(sums, rows[1], at, is_inside);
    if (is_inside) store_vector(p.out + row_at + 16ull * at, rounded(sums));
  }
  if (p.weights != 0 && team.warp == 0) sum_weights(p, token, rows, has_row);
}

__device__ __forceinline__ void normal_sum(const UcclEpNormalSum& p, Waiting& w) {
  if (!wait_for_data(p.group, p.call, 0, w)) return;
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) sum_rows(p, w.call, team, token);
  if (is_last_block(p.group, STEP_RECEIVE, w)) tell_taken(p.group, p.call, w);
}
