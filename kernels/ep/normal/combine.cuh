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

// Sums rows to a row at `to`, beginning with the values that `begin(sums, first, end)` adds.
template <u32 N, u32 SETS, typename Begin>
__device__ __forceinline__ void sum_all(const Team& team, const Targets (&rows)[SETS], u64 to, u32 count, Begin begin) {
  Slice slice = slice_of(team, count);
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += N * LANES) {
    Sums sums[N] = {};
    begin(sums, first, slice.end);
#pragma unroll
    for (u32 set = 0; set < SETS; set++) add_rows(sums, rows[set], first, slice.end);
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
  sum_all<SENT_SUM_WIDTH>(team, rows, to, p.row_len / 16, [](Sums(&)[SENT_SUM_WIDTH], u32, u32) {});
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

// A token's routing, loaded before its rows have come: a lane has two ranks and a choice.
struct TokenRouting {
  u64 mask;  // the token's ranks
  Slot slots[2];
  u32 choice;

  // The token's place at any rank. All lanes take part.
  __device__ __forceinline__ int place_in_rank(u32 rank) const {
    int lane = static_cast<int>(rank % LANES);
    int low = __shfl_sync(ALL, slots[0].place(), lane), high = __shfl_sync(ALL, slots[1].place(), lane);
    return rank < LANES ? low : high;
  }
};

// All loads are in flight at once: none depends on another.
__device__ __forceinline__ TokenRouting routing_of(const UcclEpNormalSum& p, u32 token) {
  const UcclEpRoutes& r = p.routes;
  u32 lane = lane_of_thread(), ranks = p.group.ranks;
  TokenRouting routing;
  routing.mask = reinterpret_cast<const u64*>(r.masks)[token];
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 rank = half * LANES + lane;
    routing.slots[half] = rank < ranks ? slot_at(r, ranks, token, rank) : Slot{-1, 0};
  }
  bool is_choice = p.order != UCCL_EP_BY_RANK && lane < r.top_k;
  routing.choice =
      is_choice ? reinterpret_cast<const u32*>(r.places)[static_cast<u64>(token) * r.top_k + lane] : NO_EXPERT;
  return routing;
}

// A rank's row for a token: its slot is the number of the token's ranks before it.
__device__ __forceinline__ ReturnedRow row_of(const UcclEpNormalSum& p, const PlacedCall& call,
                                              const TokenRouting& routing, u32 token, u32 rank) {
  return row_at(p, call, token, rank, ranks_before(routing.mask, rank));
}

// Finds a token's returned rows in this rank's window.
struct WindowRowSource {
  __device__ __forceinline__ ReturnedRow operator()(const UcclEpNormalSum& p, const PlacedCall& call,
                                                    const TokenRouting& routing, u32 token, u32 rank) const {
    return row_of(p, call, routing, token, rank);
  }
};

// The same, except for this rank's own row, which is not copied.
struct OwnRowSource {
  const UcclEpNormalReturn& from;
  u64 at;  // the own row's number

  __device__ __forceinline__ ReturnedRow operator()(const UcclEpNormalSum& p, const PlacedCall& call,
                                                    const TokenRouting& routing, u32 token, u32 rank) const {
    if (rank != p.group.rank || from.metadata != 0) return row_of(p, call, routing, token, rank);
    // Indices from a corrupted table reach no other memory.
    if (at >= from.len) return row_of(p, call, routing, token, rank);
    return {from.rows + at * from.row_stride, from.weights + at * from.top_k * sizeof(float)};
  }
};

// The rows of a token's sum, and their weights. A lane has those of two ranks, or of a choice.
struct SumInputs {
  Targets rows[2];
  u64 weights[2];
  bool is_there;  // whether the lane's choice has a row, be it its rank's last choice or not
};

// A token's rows by rank: a lane has those of two ranks.
template <typename RowOf>
__device__ __forceinline__ SumInputs rows_by_rank(const UcclEpNormalSum& p, const WaitState& w,
                                                  const TokenRouting& routing, u32 token, RowOf of) {
  SumInputs inputs = {};
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 rank = half * LANES + lane_of_thread();
    bool is_there = (routing.mask >> rank & 1) != 0 && !has_no_row(w, rank);
    ReturnedRow back = {0, 0};
    if (is_there) back = of(p, w.call, routing, token, rank);
    inputs.rows[half] = {back.row, __ballot_sync(ALL, is_there)};
    inputs.weights[half] = back.weights;
  }
  return inputs;
}

// A token's rows by the last of each rank's choices, or of each choice: a lane has a choice.
template <typename RowOf>
__device__ __forceinline__ SumInputs rows_by_choice(const UcclEpNormalSum& p, const WaitState& w,
                                                    const TokenRouting& routing, u32 token, RowOf of) {
  u32 lane = lane_of_thread(), expert = expert_of(routing.choice);
  u32 rank = expert == NO_EXPERT ? UCCL_EP_MAX_RANKS : expert / p.routes.local_experts;
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
    for (u32 half = 0; half < 2; half++) {
      for_each({inputs.weights[half], inputs.rows[half].has}, [&](u64 weights) {
        if (lane < p.routes.top_k) sum = __fadd_rn(sum, reinterpret_cast<const float*>(weights)[lane]);
      });
    }
  }
  if (lane < p.routes.top_k) reinterpret_cast<float*>(p.weights)[static_cast<u64>(token) * p.routes.top_k + lane] = sum;
}

// Sums any number of rows, beginning with a token's biases.
__device__ __forceinline__ void sum_from_biases(const UcclEpNormalSum& p, const Team& team, const SumInputs& inputs,
                                                u64 row_at) {
  sum_all<SUM_WIDTH>(team, inputs.rows, p.out + row_at, p.row_len / 16,
                     [&](Sums(&sums)[SUM_WIDTH], u32 first, u32 end) {
#pragma unroll
                       for (u32 nth = 0; nth < 2; nth++) {
                         if (p.bias[nth] == 0) continue;
                         Vector bias[SUM_WIDTH] = {};
                         load_vectors(bias, p.bias[nth] + row_at, first, end);
#pragma unroll
                         for (u32 i = 0; i < SUM_WIDTH; i++) add(sums[i], bias[i]);
                       }
                     });
}

// Sums a token's rows, which `of` finds, beginning with its biases.
template <typename RowOf>
__device__ __forceinline__ void sum_rows(const UcclEpNormalSum& p, const WaitState& w, const Team& team,
                                         const TokenRouting& routing, u32 token, RowOf of) {
  bool by_rank = p.order == UCCL_EP_BY_RANK;
  SumInputs inputs = by_rank ? rows_by_rank(p, w, routing, token, of) : rows_by_choice(p, w, routing, token, of);
  u64 row_at = token * static_cast<u64>(p.row_len);
  RowPair pair = first_two(inputs.rows);
  if ((pair.count == 1 || pair.count == 2) && p.bias[0] == 0 && p.bias[1] == 0) {
    sum_pair<PAIR_WIDTH>(team, pair, p.out + row_at, p.row_len / 16);
  } else {
    sum_from_biases(p, team, inputs, row_at);
  }
  if (p.weights != 0 && team.warp == 0) sum_weights(p, token, inputs);
}

__device__ __forceinline__ void normal_sum(const UcclEpNormalSum& p, WaitState& w) {
  if (!begin_receive(p.group, p.call, 0, w)) return;
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) {
    sum_rows(p, w, team, routing_of(p, token), token, WindowRowSource{});
  }
  if (is_last_block(p.group, STEP_RECEIVE, w)) set_taken(p.group, p.call, w);
}

// The number of ranks that rows go back to. This rank's own rows are not copied, unless they are
// summed.
__device__ __forceinline__ u32 ranks_of(const UcclEpNormalReturn& p) {
  return p.metadata != 0 ? p.group.ranks : p.group.ranks - 1;
}

// The number of chunks to send: those of the rank that has the most, times the ranks.
template <typename Rows>
__device__ __forceinline__ u32 chunks_of(const UcclEpNormalReturn& p, const Rows& rows) {
  u32 most = 0;
#pragma unroll 1
  for (u32 rank = 0; rank < p.group.ranks; rank++) most = max(most, chunking_of(rows.from(p, rank).count).flags);
  return most * ranks_of(p);
}

// Sends rows back, chunk by chunk; ranks take turns.
template <typename Rows>
__device__ __forceinline__ void return_chunks(const UcclEpNormalReturn& p, const Rows& of, const PlacedCall& call,
                                              const Share& share, FlagQueue& out) {
  const UcclEpGroup& g = p.group;
  u32 ranks = ranks_of(p);
  send_chunks(out, chunks_of(p, of), share, [&](u32 chunk, u32 nth) {
    u32 flag = chunk / ranks, rank = (g.rank + 1 + chunk % ranks) % g.ranks;
    RankTokens received = of.from(p, rank);
    Chunking chunking = chunking_of(received.count);
    bool has = flag < chunking.flags && !is_masked(call, rank);
    Chunk rows = chunk_of(chunking, flag, has ? received.count : 0);
#pragma unroll 1
    for (u32 at = rows.begin; at < rows.end; at++) return_token(p, of, call, rows.team, received.first + at);
    hand_over_flags(out, nth, has ? 1 : 0, [&](u32) -> ReadyFlag {
      u64 word = flags_of(g, call, rank, g.rank) + sizeof(u64) * flag;
      return {word, chunk_flag(call.number, rows.begin, rows.end - rows.begin)};
    });
  });
}

// State of a block that sends back and sums.
struct CombineState {
  WaitState wait;
  FlagQueue out;
  u32 counts[UCCL_EP_MAX_RANKS];  // this rank's tokens by rank
};

// Waits until all of a token's rows are there: a lane polls a piece of a rank's row.
__device__ __forceinline__ bool wait_for_rows(const UcclEpNormalCombine& p, CombineState& s,
                                              const TokenRouting& routing) {
  const UcclEpGroup& g = p.sum.group;
  WaitState& w = s.wait;
#pragma unroll 1
  for (u32 first = 0; first < g.ranks * MAX_PIECES; first += LANES) {
    u32 rank = (first + lane_of_thread()) / MAX_PIECES, piece = (first + lane_of_thread()) % MAX_PIECES;
    int place = routing.place_in_rank(rank);
    bool comes = rank < g.ranks && place >= 0 && !has_no_row(w, rank);
    bool is_own_row = rank == g.rank && p.send.metadata == 0;
    u64 word = 0, seen;
    if (comes && !is_own_row) {
      Chunking chunking = chunking_of(s.counts[rank]);
      u32 flag = static_cast<u32>(place) / chunking.rows * chunking.pieces + piece;
      if (piece < chunking.pieces) word = flags_of(g, w.call, g.rank, rank) + sizeof(u64) * flag;
    }
    if (!wait_for_flags(g, w, word != 0, rank, word, seen)) return false;
  }
  return true;
}

// Sums tokens as their rows come. A warp loads the routing of its next token while it sums one.
template <typename Rows>
__device__ __forceinline__ void sum_chunks(const UcclEpNormalCombine& p, CombineState& s, const Rows& rows) {
  const UcclEpNormalSum& sum = p.sum;
  const UcclEpNormalReturn& back = p.send;
  u32 me = sum.group.rank, tokens = sum.routes.tokens;
  // Several warps share each of a few tokens. A sum has no flag, so many pieces cost nothing.
  u32 pieces = pieces_of(tokens, UCCL_EP_CHUNKS);
  u32 first = rows.first_of(back, me);
  TokenRouting next;
  share_out(
      sum.group, s.wait.call, tokens * pieces, [&](u32 i) { next = routing_of(sum, i / pieces); },
      [&](u32 i, auto look_ahead) {
        TokenRouting routing = next;
        if (!wait_for_rows(p, s, routing)) return false;
        look_ahead();
        OwnRowSource of = {back, static_cast<u64>(first) + static_cast<u32>(routing.place_in_rank(me))};
        sum_rows(sum, s.wait, {0, 0, i % pieces, pieces}, routing, i / pieces, of);
        return true;
      });
}

// Sends back and sums in one launch, chunk by chunk.
template <typename Rows>
__device__ __forceinline__ void normal_combine(const UcclEpNormalCombine& p, CombineState& s, const Rows& rows) {
  const UcclEpNormalReturn& back = p.send;
  const UcclEpGroup& g = back.group;
  WaitState& w = s.wait;
  if (threadIdx.x < g.ranks) s.counts[threadIdx.x] = reinterpret_cast<const u32*>(p.sum.routes.counts)[threadIdx.x];
  if (!begin_send(g, back.call, w)) return;
  if (is_spare_sender()) {
    write_headers(g, back.call, w.call, nullptr);
    set_arrived(g, back.call, w);
  }
  if (!has_rows(back, w)) return;
  Share share = senders(SENDERS);
  if (ranks_of(back) > 0 && has_block(share)) return_chunks(back, rows, w.call, share, s.out);
  if (!wait_for_data(g, back.call, 0, w)) return;
  sum_chunks(p, s, rows);
  if (!is_sound(g, back.call, w) || !is_last_block(g, STEP_RECEIVE, w)) return;
  end_shares(g, w.call);
  take_place(g, back.call, w.call);
  set_taken(g, back.call, w);
}
