// Normal mode: one row of each rank comes back for a token, and they are summed. Where rows are by expert, it is a sum already.
#pragma once

#include "ep_combine.cuh"
#include "ep_normal_dispatch.cuh"

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

// Sends a token's row, and its weights, to a record.
__device__ __forceinline__ void return_row(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  Targets targets[1] = {{to, 1}};
  copy_to_all(team, targets, p.rows + at * p.row_stride, p.row_len / 16);
  u32 k = team.lane();
  if (p.weights != 0 && k < p.top_k) {
    u64 of_row = static_cast<u64>(at) * p.top_k + k;
    reinterpret_cast<float*>(to + p.weights_at)[k] = reinterpret_cast<const float*>(p.weights)[of_row];
  }
}

// The row of a token's choice, where rows are by expert; or NO_ROW.
__device__ __forceinline__ u32 given_row(const UcclEpNormalReturn& p, u32 at, u32 choice) {
  u32 row = NO_ROW;
  if (choice < p.top_k) row = reinterpret_cast<const u32*>(p.metadata)[static_cast<u64>(at) * (2 + p.top_k) + 2 + choice];
  return row < p.len ? row : NO_ROW;
}

// Sends the sum of a token's rows, in order of choice, and the weight of each.
__device__ __forceinline__ void return_sum(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  u32 lane = lane_of_thread(), row = given_row(p, at, lane);
  bool is_there = row != NO_ROW;
  Targets rows = {p.rows + row * p.row_stride, __ballot_sync(ALL, is_there)};
  u32 count = p.row_len / 16;
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < count; first += team.lanes()) {
    u32 vector = first + lane;
    Sums sums = {};
    add_rows(sums, rows, vector, vector < count);
    if (vector < count) store_vector(to + 16ull * vector, rounded(sums));
  }
  if (p.weights != 0 && team.warp == 0 && lane < p.top_k) {
    float weight = is_there ? reinterpret_cast<const float*>(p.weights)[row] : 0.0f;
    reinterpret_cast<float*>(to + p.weights_at)[lane] = weight;
  }
}

// Sends each of a token's rows to the slot of its choice, of which the first is at `to`.
__device__ __forceinline__ void return_each(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  u32 row = given_row(p, at, lane_of_thread());
  u64 mine = p.rows + row * p.row_stride;
#pragma unroll 1
  for (u32 left = __ballot_sync(ALL, row != NO_ROW); left != 0; left &= left - 1) {
    u32 choice = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    Targets targets[1] = {{to + static_cast<u64>(choice) * p.slots * p.slot_stride, 1}};
    copy_to_all(team, targets, __shfl_sync(ALL, mine, static_cast<int>(choice)), p.row_len / 16);
  }
}

// Where what belongs to a token goes: its first slot, and the one that this rank has. 0 is nowhere.
struct Back {
  u64 first;
  u64 to;
  u32 rank;
};

__device__ __forceinline__ Back back_of(const UcclEpNormalReturn& p, const UcclEpPlaced& call, u32 at) {
  u32 origin = reinterpret_cast<const u32*>(p.origin)[at], token = reinterpret_cast<const u32*>(p.src_info)[at];
  u32 rank = origin / ORIGIN_RANK, nth = origin % ORIGIN_RANK;
  // Tensors that the caller has spoilt reach no other memory.
  if (rank >= p.group.ranks || nth >= p.token_rows || token >= p.slots) return {0, 0, 0};
  if (is_masked(call, rank)) return {0, 0, 0};
  u64 first = p.group.windows[rank] + call.place + token * p.slot_stride;
  return {first, first + static_cast<u64>(nth) * p.slots * p.slot_stride, rank};
}

// Sends what belongs to a token back to where it came from.
__device__ __forceinline__ void return_token(const UcclEpNormalReturn& p, const UcclEpPlaced& call, const Team& team,
                                             u32 at) {
  Back back = back_of(p, call, at);
  if (back.first == 0) return;
  if (p.metadata == 0) {
    return_row(p, team, at, back.to);
  } else if (p.sends_each != 0) {
    return_each(p, team, at, back.first);
  } else {
    return_sum(p, team, at, back.to);
  }
}

// Whether a token has a slot for each of its choices, and not for each of its ranks.
__device__ __forceinline__ bool has_each(const UcclEpNormalReturn& p) { return p.metadata != 0 && p.sends_each != 0; }

// The `i`th slot that goes back: of a token, or of one of its choices.
__device__ __forceinline__ Going filled(const UcclEpNormalReturn& p, const UcclEpPlaced& call, u32 i) {
  u32 at = has_each(p) ? i / p.top_k : i;
  Back back = back_of(p, call, at);
  if (back.first == 0 || !has_each(p)) return {0, back.to, back.rank};
  u32 choice = i % p.top_k;
  if (given_row(p, at, choice) == NO_ROW) return {0, 0, 0};
  return {0, back.first + static_cast<u64>(choice) * p.slots * p.slot_stride, back.rank};
}

__device__ __forceinline__ void normal_return(const UcclEpNormalReturn& p, Waiting& w) {
  const UcclEpGroup& g = p.group;
  if (!begin_send(g, p.call, w)) return;
  if (is_spare_block()) send_header(g, p.call, w.call);
  u32 total = reinterpret_cast<const u32*>(p.starts)[g.ranks];
  u32 rows = p.metadata != 0 ? reinterpret_cast<const u32*>(p.ends)[p.local_experts - 1] : total;
  if (!has_room(g, p.call, rows, p.len, w)) return;
  Team team = team_for(total);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) return_token(p, w.call, team, at);
  auto of = [&](u32 i) { return filled(p, w.call, i); };
  u32 slots = has_each(p) ? total * p.top_k : total;
  end_send(g, p.call, w, [&] { send_rows_far(g, w, of, slots, p.slot_stride); });
}

__device__ __forceinline__ u64 row_at(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token, u32 nth) {
  u64 slot = static_cast<u64>(nth) * p.slots + token;
  return p.group.windows[p.group.rank] + call.place + slot * p.slot_stride;
}

// The row of a rank for a token: of the rows in a token's slots, as many as there are ranks of the token before it.
__device__ __forceinline__ u64 row_of(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token, u32 rank) {
  u64 mask = reinterpret_cast<const u64*>(p.routes.masks)[token];
  return row_at(p, call, token, ranks_before(mask, rank));
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

// A token's rows by the last of each rank's choices, or of each choice: a lane has a choice. Returns whether the lane has a row,
// its rank's last or not.
__device__ __forceinline__ bool rows_by_choice(const UcclEpNormalSum& p, const UcclEpPlaced& call, u32 token,
                                               Targets (&rows)[2]) {
  u32 lane = lane_of_thread(), expert = NO_EXPERT;
  if (lane < p.routes.top_k) {
    expert = expert_of(reinterpret_cast<const u32*>(p.routes.places)[static_cast<u64>(token) * p.routes.top_k + lane]);
  }
  u32 rank = expert == NO_EXPERT ? UCCL_EP_MOST_RANKS : expert / p.routes.local_experts;
  u32 same = __match_any_sync(ALL, rank);
  bool is_there = rank < p.group.ranks && !is_masked(call, rank);
  bool is_each = p.order == UCCL_EP_EACH_CHOICE, is_last = same >> lane == 1;
  u64 row = 0;
  if (is_there) row = is_each ? row_at(p, call, token, lane) : row_of(p, call, token, rank);
  rows[0] = {row, __ballot_sync(ALL, is_there && (is_each || is_last))};
  rows[1] = {0, 0};
  return is_there;
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
  if (p.order == UCCL_EP_BY_RANK) {
    rows_by_rank(p, call, token, rows);
  } else {
    has_row = rows_by_choice(p, call, token, rows);
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
  if (!begin_receive(p.group, p.call, 0, w)) return;
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) sum_rows(p, w.call, team, token);
  if (is_last_block(p.group, STEP_RECEIVE, w)) tell_taken(p.group, p.call, w);
}
