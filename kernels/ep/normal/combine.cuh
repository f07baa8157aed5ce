// Normal-mode combine: each rank of a token returns a row, and these are summed. Where rows are by
// expert, a returned row is a sum already, unless each row goes back.
#pragma once

#include "../numerics.cuh"
#include "dispatch.cuh"

// Vectors of a row that a lane sums at a time: in a final sum, in one of one or two rows, and in
// one that is sent on.
constexpr u32 SUM_WIDTH = 4;
constexpr u32 PAIR_WIDTH = 7;
constexpr u32 SENT_SUM_WIDTH = 2;

// Adds vectors of some rows in order, with those of two rows in flight.
template <u32 N>
__device__ __forceinline__ void add_rows(Sums (&sums)[N], const Targets& rows, u32 first, u32 end) {
#pragma unroll 1
  for (u32 left = rows.has; left != 0;) {
    Vector one[N] = {}, other[N] = {};
    load_vectors(one, __shfl_sync(ALL, rows.mine, __ffs(static_cast<int>(left)) - 1), first, end);
    left &= left - 1;
    bool has_other = left != 0;
    if (has_other) load_vectors(other, __shfl_sync(ALL, rows.mine, __ffs(static_cast<int>(left)) - 1), first, end);
    left &= left - 1;
#pragma unroll
    for (u32 i = 0; i < N; i++) {
      add(sums[i], one[i]);
      if (has_other) add(sums[i], other[i]);
    }
  }
}

// Sums rows to a row at `to`, beginning with the values that `begin(sums, first, end)` adds, and ending
// with those that `rest` adds.
template <u32 N, u32 SETS, typename Begin, typename Rest>
__device__ __forceinline__ void sum_all(const Team& team, const Targets (&rows)[SETS], u64 to, u32 count, Begin begin,
                                        Rest rest) {
  Slice slice = slice_of(team, count);
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += N * LANES) {
    Sums sums[N] = {};
    begin(sums, first, slice.end);
#pragma unroll
    for (u32 set = 0; set < SETS; set++) add_rows(sums, rows[set], first, slice.end);
    rest(sums, first, slice.end);
    Vector out[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) out[i] = rounded(sums[i]);
    store_vectors(to, out, first, slice.end);
  }
}

// The first two of some rows, in order; and the number of rows.
struct RowPair {
  u64 one;
  u64 other;
  u32 count;
};

template <u32 SETS>
__device__ __forceinline__ RowPair first_two(const Targets (&rows)[SETS]) {
  RowPair pair = {0, 0, 0};
#pragma unroll
  for (u32 set = 0; set < SETS; set++) {
    for_each(rows[set], [&](u64 row) {
      if (pair.count == 0) pair.one = row;
      if (pair.count == 1) pair.other = row;
      pair.count++;
    });
  }
  return pair;
}

// Sums one row or two, as `sum_all` does from zero. No sum is kept for later rows, so there are
// registers for more loads in flight.
template <u32 N>
__device__ __forceinline__ void sum_pair(const Team& team, const RowPair& rows, u64 to, u32 count) {
  Slice slice = slice_of(team, count);
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += N * LANES) {
    Vector one[N] = {}, other[N] = {};
    load_vectors(one, rows.one, first, slice.end);
    if (rows.count == 2) load_vectors(other, rows.other, first, slice.end);
#pragma unroll
    for (u32 i = 0; i < N; i++) {
      Sums sums = {};
      add(sums, one[i]);
      if (rows.count == 2) add(sums, other[i]);
      one[i] = rounded(sums);
    }
    store_vectors(to, one, first, slice.end);
  }
}

// Sends a token's row, and its weights, to a slot.
__device__ __forceinline__ void return_row(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  copy<LONG_ROUND>(team, to, p.rows + at * p.row_stride, p.row_len / 16);
  u32 k = team.lane();
  if (p.weights != 0 && k < p.top_k) {
    u64 of_row = static_cast<u64>(at) * p.top_k + k;
    reinterpret_cast<float*>(to + p.weights_at)[k] = reinterpret_cast<const float*>(p.weights)[of_row];
  }
}

// The row of a token's choice, where rows are by expert; or NO_ROW.
__device__ __forceinline__ u32 row_of_nth_choice(const UcclEpNormalReturn& p, u32 at, u32 choice) {
  u32 row = NO_ROW;
  if (choice < p.top_k)
    row = reinterpret_cast<const u32*>(p.metadata)[static_cast<u64>(at) * (2 + p.top_k) + 2 + choice];
  return row < p.len ? row : NO_ROW;
}

// Sends the sum of a token's rows, in order of choice, and the weight of each.
__device__ __forceinline__ void return_sum(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  u32 lane = lane_of_thread(), row = row_of_nth_choice(p, at, lane);
  bool is_there = row != NO_ROW;
  Targets rows[1] = {{p.rows + row * p.row_stride, __ballot_sync(ALL, is_there)}};
  auto nothing = [](Sums(&)[SENT_SUM_WIDTH], u32, u32) {};
  sum_all<SENT_SUM_WIDTH>(team, rows, to, p.row_len / 16, nothing, nothing);
  if (p.weights != 0 && team.warp == 0 && lane < p.top_k) {
    float weight = is_there ? reinterpret_cast<const float*>(p.weights)[row] : 0.0f;
    reinterpret_cast<float*>(to + p.weights_at)[lane] = weight;
  }
}

// Sends each of a token's rows to the slot of its choice; the first slot is at `to`.
__device__ __forceinline__ void return_each(const UcclEpNormalReturn& p, const Team& team, u32 at, u64 to) {
  u32 row = row_of_nth_choice(p, at, lane_of_thread());
  u64 mine = p.rows + row * p.row_stride;
#pragma unroll 1
  for (u32 left = __ballot_sync(ALL, row != NO_ROW); left != 0; left &= left - 1) {
    u32 choice = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    u64 slot = to + static_cast<u64>(choice) * p.slots * p.slot_stride;
    copy<LONG_ROUND>(team, slot, __shfl_sync(ALL, mine, static_cast<int>(choice)), p.row_len / 16);
  }
}

// The tokens received from a rank: the first, and their number. Values from a corrupted table are
// capped.
struct RankTokens {
  u32 first;
  u32 count;
};

// The rows that go back in a call of one round. A call of several has another such type: see
// rounds.cuh.
struct OneReturn {
  __device__ __forceinline__ RankTokens from(const UcclEpNormalReturn& p, u32 rank) const {
    const u32* starts = reinterpret_cast<const u32*>(p.starts);
    u32 end = min(starts[rank + 1], starts[p.group.ranks]), first = min(starts[rank], end);
    return {p.spread != 0 ? rank * p.spread : first, min(end - first, p.slots)};
  }
  // The first row of a rank's tokens.
  __device__ __forceinline__ u32 first_of(const UcclEpNormalReturn& p, u32 rank) const {
    return first_row(p.spread, reinterpret_cast<const u32*>(p.starts), rank);
  }
  // The slot of a token, by its number at its rank.
  __device__ __forceinline__ u32 slot(u32 token) const { return token; }
  // Begins a block, once the ranks that rows go back to have room.
  __device__ __forceinline__ bool begin(const UcclEpNormalReturn& p, WaitState& w) const {
    return begin_send(p.group, p.call, w);
  }
  // Begins to wait for other ranks' rows, behind the sends of this one.
  __device__ __forceinline__ void begin_sums(const UcclEpNormalSum&, WaitState&) const {}
  // Comes before the acknowledgement.
  __device__ __forceinline__ void end(const UcclEpNormalSum&, WaitState&) const {}
};

// Destinations of a token's rows: its first slot, and this rank's slot. 0: none.
struct ReturnSlots {
  u64 first;
  u64 to;
  u32 rank;
};

template <typename Rows>
__device__ __forceinline__ ReturnSlots return_slots_of(const UcclEpNormalReturn& p, const Rows& rows,
                                                       const PlacedCall& call, u32 at) {
  u32 origin = reinterpret_cast<const u32*>(p.origin)[at];
  u32 token = rows.slot(reinterpret_cast<const u32*>(p.src_info)[at]);
  u32 rank = origin / UCCL_EP_ORIGIN_RANK, nth = origin % UCCL_EP_ORIGIN_RANK;
  // Indices from corrupted tensors reach no other memory.
  if (rank >= p.group.ranks || nth >= p.token_rows || token >= p.slots) return {0, 0, 0};
  if (is_masked(call, rank)) return {0, 0, 0};
  u64 first = place_at_rank(call, rank) + token * p.slot_stride;
  return {first, first + static_cast<u64>(nth) * p.slots * p.slot_stride, rank};
}

// Sends a token's row, its rows or their sum back to the token's rank.
template <typename Rows>
__device__ __forceinline__ void return_token(const UcclEpNormalReturn& p, const Rows& rows, const PlacedCall& call,
                                             const Team& team, u32 at) {
  ReturnSlots back = return_slots_of(p, rows, call, at);
  if (back.first == 0) return;
  if (p.metadata == 0) {
    return_row(p, team, at, back.to);
  } else if (p.sends_each != 0) {
    return_each(p, team, at, back.first);
  } else {
    return_sum(p, team, at, back.to);
  }
}

// Whether a token has a slot for each of its choices, instead of each of its ranks.
__device__ __forceinline__ bool has_each(const UcclEpNormalReturn& p) { return p.metadata != 0 && p.sends_each != 0; }

// The copy of the `i`th slot: of a token, or of one of its choices.
template <typename Rows, typename RowAt>
__device__ __forceinline__ RowCopy nth_slot_copy(const UcclEpNormalReturn& p, const Rows& rows, const PlacedCall& call,
                                                 u32 i, RowAt row_at) {
  u32 at = row_at(has_each(p) ? i / p.top_k : i);
  ReturnSlots back = return_slots_of(p, rows, call, at);
  if (back.first == 0 || !has_each(p)) return {0, back.to, back.rank};
  u32 choice = i % p.top_k;
  if (row_of_nth_choice(p, at, choice) == NO_ROW) return {0, 0, 0};
  return {0, back.first + static_cast<u64>(choice) * p.slots * p.slot_stride, back.rank};
}

// Whether the caller's input has as many rows as the dispatch made.
__device__ __forceinline__ bool has_rows(const UcclEpNormalReturn& p, WaitState& w) {
  u32 rows = reinterpret_cast<const u32*>(p.starts)[p.group.ranks];
  if (p.spread != 0) rows = (p.group.ranks - 1) * p.spread + p.slots;
  if (p.metadata != 0) rows = reinterpret_cast<const u32*>(p.ends)[p.local_experts - 1];
  return has_room(p.group, p.call, rows, p.len, w);
}

__device__ __forceinline__ void normal_return(const UcclEpNormalReturn& p, WaitState& w) {
  const UcclEpGroup& g = p.group;
  if (!begin_send(g, p.call, w)) return;
  if (is_spare_sender()) write_headers(g, p.call, w.call, nullptr);
  if (!has_rows(p, w)) return;
  u32 total = reinterpret_cast<const u32*>(p.starts)[g.ranks];
  Team team = team_for(total);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) return_token(p, OneReturn{}, w.call, team, at);
  auto of = [&](u32 i) { return nth_slot_copy(p, OneReturn{}, w.call, i, [](u32 at) { return at; }); };
  u32 slots = has_each(p) ? total * p.top_k : total;
  end_send(g, p.call, w, [&] { send_rows_far(g, w, of, slots, p.slot_stride); });
}

// A returned row, and its weights.
struct ReturnedRow {
  u64 row;
  u64 weights;
};

// The row that a rank has sent to the `nth` slot of a token.
__device__ __forceinline__ ReturnedRow row_at(const UcclEpNormalSum& p, const PlacedCall& call, u32 token, u32 rank,
                                              u32 nth) {
  u64 slot = static_cast<u64>(nth) * p.slots + token;
  u64 row = place_of_rows_from(p.group, call, rank) + slot * p.slot_stride;
  return {row, row + p.weights_at};
}

// A token's routing, loaded before its rows have come: a lane has a choice.
struct TokenRouting {
  RanksOfToken ranks;
  u32 choice;
};

// All loads are in flight at once: none depends on another.
__device__ __forceinline__ TokenRouting routing_of(const UcclEpNormalSum& p, u32 token) {
  const UcclEpRoutes& r = p.routes;
  u32 lane = lane_of_thread();
  TokenRouting routing;
  routing.ranks = ranks_of_token(r.masks, token);
  bool is_choice = p.order != UCCL_EP_BY_RANK && lane < r.top_k;
  routing.choice =
      is_choice ? reinterpret_cast<const u32*>(r.places)[static_cast<u64>(token) * r.top_k + lane] : NO_EXPERT;
  return routing;
}

// A rank's row for a token: its slot is the number of the token's ranks before it.
__device__ __forceinline__ ReturnedRow row_of(const UcclEpNormalSum& p, const PlacedCall& call,
                                              const TokenRouting& routing, u32 token, u32 rank) {
  return row_at(p, call, token, rank, routing.ranks.before(rank));
}

// Finds a token's returned rows in this rank's window.
struct WindowRowSource {
  __device__ __forceinline__ ReturnedRow operator()(const UcclEpNormalSum& p, const PlacedCall& call,
                                                    const TokenRouting& routing, u32 token, u32 rank) const {
    return row_of(p, call, routing, token, rank);
  }
};

// The rows of a token's sum, and their weights. A lane has those of its ranks, or of a choice.
struct SumInputs {
  Targets rows[TARGET_SETS];
  u64 weights[TARGET_SETS];
  bool is_there;  // whether the lane's choice has a row, be it its rank's last choice or not
};

// A token's rows by rank: those of a part of its ranks.
template <typename RowOf>
__device__ __forceinline__ SumInputs rows_by_rank(const UcclEpNormalSum& p, const WaitState& w,
                                                  const TokenRouting& routing, u32 token, u32 part, RowOf of) {
  SumInputs inputs = {};
#pragma unroll
  for (u32 set = 0; set < TARGET_SETS; set++) {
    u32 rank = routing.ranks.of_lane(part, set);
    bool is_there = rank != NO_RANK && !has_no_row(w, rank);
    ReturnedRow back = {0, 0};
    if (is_there) back = of(p, w.call, routing, token, rank);
    inputs.rows[set] = {back.row, __ballot_sync(ALL, is_there)};
    inputs.weights[set] = back.weights;
  }
  return inputs;
}

// A token's rows by the last of each rank's choices, or of each choice: a lane has a choice.
template <typename RowOf>
__device__ __forceinline__ SumInputs rows_by_choice(const UcclEpNormalSum& p, const WaitState& w,
                                                    const TokenRouting& routing, u32 token, RowOf of) {
  u32 lane = lane_of_thread(), expert = expert_of(routing.choice);
  u32 rank = expert == NO_EXPERT ? NO_RANK : expert / p.routes.local_experts;
  u32 same = __match_any_sync(ALL, rank);
  bool is_there = rank < p.group.ranks && !has_no_row(w, rank);
  bool is_each = p.order == UCCL_EP_EACH_CHOICE, is_last = same >> lane == 1;
  // A choice that repeats an expert has no row.
  if (is_each && (__match_any_sync(ALL, expert) & lanes_before()) != 0) is_there = false;
  ReturnedRow back = {0, 0};
  if (is_there) back = is_each ? row_at(p, w.call, token, rank, lane) : of(p, w.call, routing, token, rank);
  SumInputs inputs = {};
  inputs.rows[0] = {back.row, __ballot_sync(ALL, is_there && (is_each || is_last))};
  inputs.weights[0] = back.weights;
  inputs.is_there = is_there;
  return inputs;
}

// Sums a token's returned weights: those of all ranks, or of each choice's rank. One warp.
__device__ __forceinline__ void sum_weights(const UcclEpNormalSum& p, u32 token, const SumInputs& inputs) {
  u32 lane = lane_of_thread();
  float sum = 0.0f;
  if (p.order == UCCL_EP_BY_CHOICE) {
    if (inputs.is_there) sum = reinterpret_cast<const float*>(inputs.weights[0])[lane];
  } else {
#pragma unroll
    for (u32 set = 0; set < TARGET_SETS; set++) {
      for_each({inputs.weights[set], inputs.rows[set].has}, [&](u64 weights) {
        if (lane < p.routes.top_k) sum = __fadd_rn(sum, reinterpret_cast<const float*>(weights)[lane]);
      });
    }
  }
  if (lane < p.routes.top_k) reinterpret_cast<float*>(p.weights)[static_cast<u64>(token) * p.routes.top_k + lane] = sum;
}

// Sums any number of rows, beginning with a token's biases. `rest` adds the rows that no lane has.
template <typename Rest>
__device__ __forceinline__ void sum_from_biases(const UcclEpNormalSum& p, const Team& team, const SumInputs& inputs,
                                                u64 row_at, Rest rest) {
  auto begin = [&](Sums(&sums)[SUM_WIDTH], u32 first, u32 end) {
#pragma unroll
    for (u32 nth = 0; nth < 2; nth++) {
      if (p.bias[nth] == 0) continue;
      Vector bias[SUM_WIDTH] = {};
      load_vectors(bias, p.bias[nth] + row_at, first, end);
#pragma unroll
      for (u32 i = 0; i < SUM_WIDTH; i++) add(sums[i], bias[i]);
    }
  };
  sum_all<SUM_WIDTH>(team, inputs.rows, p.out + row_at, p.row_len / 16, begin, rest);
}

// Sums a token's rows, which `of` finds, beginning with its biases.
template <typename RowOf>
__device__ __forceinline__ void sum_rows(const UcclEpNormalSum& p, const WaitState& w, const Team& team,
                                         const TokenRouting& routing, u32 token, RowOf of) {
  bool by_rank = p.order == UCCL_EP_BY_RANK;
  SumInputs inputs = by_rank ? rows_by_rank(p, w, routing, token, 0, of) : rows_by_choice(p, w, routing, token, of);
  // Only tokens without choices have more ranks than a warp has lanes.
  u32 parts = by_rank ? routing.ranks.parts() : 1;
  u64 row_at = token * static_cast<u64>(p.row_len);
  RowPair pair = first_two(inputs.rows);
  if ((pair.count == 1 || pair.count == 2) && p.bias[0] == 0 && p.bias[1] == 0 && parts == 1) {
    sum_pair<PAIR_WIDTH>(team, pair, p.out + row_at, p.row_len / 16);
  } else {
    sum_from_biases(p, team, inputs, row_at, [&](Sums(&sums)[SUM_WIDTH], u32 first, u32 end) {
#pragma unroll 1
      for (u32 part = 1; part < parts; part++) {
        SumInputs more = rows_by_rank(p, w, routing, token, part, of);
        add_rows(sums, more.rows[0], first, end);
      }
    });
  }
  if (p.weights != 0 && team.warp == 0) sum_weights(p, token, inputs);
}

__device__ __forceinline__ void normal_sum(const UcclEpNormalSum& p, WaitState& w) {
  if (!begin_block(p.group, p.call, STEP_RECEIVE, w)) return;
  bool is_empty = p.round_tokens != 0 && p.routes.tokens == 0;
  if (is_empty) leave_knowing(p.round_tokens, p.group, w);
  if (!wait_for_data(p.group, p.call, 0, w)) return;
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) {
    sum_rows(p, w, team, routing_of(p, token), token, WindowRowSource{});
  }
  if (!is_last_block(p.group, STEP_RECEIVE, w)) return;
  if (is_empty) let_idle_in(p.group, w);
  set_taken(p.group, p.call, w);
}
