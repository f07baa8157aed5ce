// A combine of few rows, in parts: what a rank gives back for a token goes in pieces, each of which is a slice of all its rows and has a
// mark. Those of the first tokens go first, and sums are made as they come. In a combine of one launch, rows of this rank's own tokens stay
// where they are, and their marks, of which each choice has one, name them. Ranks that tell their tokens' weights get one part of a sum, in f32,
// instead of many rows: it has the slots of the first two.
#pragma once

#include "ep_combine.cuh"

struct ReturningParts {
  Returning rows;
  Taken taken;
};

// A row that stays: which one, behind the call's number in a mark.
constexpr u32 STAYS_MASK = (1u << MARK_CALL) - 1;

// Whether own rows can stay: there is a mark for each choice.
__device__ __forceinline__ bool can_stay(u32 slots, u32 top_k) { return slots * top_k <= UCCL_EP_PARTS; }

// Names the rows of this rank's own tokens.
__device__ __forceinline__ void let_stay(const UcclEpReturn& p, const Returning& s) {
  const UcclEpGroup& g = p.group;
  u64 call = s.waiting.call.number, marks = marks_of(g, g.rank, g.rank, call);
  u32 first = s.starts[g.rank], rows = records_of_rank(s, g.rank) * p.top_k;
#pragma unroll 1
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) {
    Made made = made_of(p, first + i / p.top_k, i % p.top_k);
    if (made.is_there) store_relaxed(marks + sizeof(u64) * made.slot(p), call << MARK_CALL | made.row);
  }
}

// Vectors of two rows that a lane copies at a time.
constexpr u32 PAIR_ROUND = 4;

// Copies a slice of some rows: a lane has where one begins and where it goes.
__device__ __forceinline__ void copy_rows(const Slice& slice, const Going& mine, u32 has) {
#pragma unroll 1
  for (u32 left = has; left != 0;) {
    int one = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    int other = left != 0 ? __ffs(static_cast<int>(left)) - 1 : one;
    bool has_other = left != 0;
    left &= left - 1;
    u64 from[2] = {__shfl_sync(ALL, mine.from, one), __shfl_sync(ALL, mine.from, other)};
    u64 to[2] = {__shfl_sync(ALL, mine.to, one), __shfl_sync(ALL, mine.to, other)};
#pragma unroll 1
    for (u32 first = slice.begin; first < slice.end; first += PAIR_ROUND * LANES) {
      Vector v[2][PAIR_ROUND];
      load_vectors(v[0], from[0], first, slice.end);
      if (has_other) load_vectors(v[1], from[1], first, slice.end);
      store_vectors(to[0], v[0], first, slice.end);
      if (has_other) store_vectors(to[1], v[1], first, slice.end);
    }
  }
}

// What a mark says of a piece: that it is of rows, or of their sum.
constexpr u32 OF_ROWS = 1;
constexpr u32 OF_SUM = 2;

// Where a rank finds the weights of another's tokens.
__device__ __forceinline__ u64 weights_of(const UcclEpReturn& p, const UcclEpPlaced& call, u32 at, u32 of) {
  return p.group.windows[at] + call.place + p.weights_at + sizeof(float) * of * p.slots * p.top_k;
}

// Tells all ranks the weights of this one's tokens.
__device__ __forceinline__ void tell_weights(const UcclEpCombine& p, const UcclEpPlaced& call) {
  const UcclEpGroup& g = p.sum.group;
  u32 count = min(p.sum.routes.tokens, p.give_back.slots) * p.give_back.top_k;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * count; i += blockDim.x) {
    u32 rank = i / count, at = i % count;
    if (is_masked(call, rank)) continue;
    u64 to = weights_of(p.give_back, call, rank, g.rank);
    reinterpret_cast<float*>(to)[at] = reinterpret_cast<const float*>(p.sum.weights)[at];
  }
}

// What a rank gives back for a token: a lane has a row, or none, and its weight, if the rank has told that.
struct Given {
  u32 rank;
  u32 token;
  Going row;
  bool has_weight;
  float weight;
};

// What is the `turn`th to go back, of so many ranks in turn. `sums`: whether this rank knows what others have told.
__device__ __forceinline__ Given given_at(const UcclEpReturn& p, const Returning& s, u32 ranks, bool sums, u32 turn) {
  const UcclEpGroup& g = p.group;
  u32 rank = (g.rank + 1 + turn % ranks) % g.ranks, at = s.starts[rank] + turn / ranks;
  Given given = {rank, 0, {0, 0, 0}, sums && s.waiting.told[0][rank] != 0, 0.0f};
  if (at >= s.starts[rank + 1]) return given;
  given.token = token_of_record(record_of(p.records, p.top_k, at)[0]);
  if (lane_of_thread() >= p.top_k) return given;
  Made made = made_of(p, at, lane_of_thread());
  given.row = going_to(p, s.waiting.call, rank, made);
  if (given.row.to != 0 && given.has_weight) {
    u64 weights = weights_of(p, s.waiting.call, g.rank, rank);
    given.weight = reinterpret_cast<const float*>(weights)[made.token * p.top_k + made.choice];
  }
  return given;
}

// Sends a slice of the weighted sum of what a rank gives back for a token: to the slots of its first two rows.
__device__ __forceinline__ void send_sum(const Slice& slice, const Given& given, u32 has) {
  u64 lower = __shfl_sync(ALL, given.row.to, 0), upper = __shfl_sync(ALL, given.row.to, 1);
  sum_each<PART_ROUND>({given.row.from, given.weight, given.rank, has, 1, 0}, slice, [&](u32 at, const Sums& sums) {
    store_vector(lower + 16ull * at, half_of(sums, false));
    store_vector(upper + 16ull * at, half_of(sums, true));
  });
}

// Sends rows back, piece by piece, and those for so many ranks in turn. Each warp waits until what it has sent is there, and sets the mark.
__device__ __forceinline__ void return_pieces(const UcclEpReturn& p, const Returning& s, u32 ranks, bool sums) {
  const UcclEpGroup& g = p.group;
  u64 call = s.waiting.call.number;
  u32 most = 0, step = gridDim.x * warps_of_block(), first = blockIdx.x + warp_of_thread() * gridDim.x;
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) most = max(most, records_of_rank(s, rank));
  Given next = given_at(p, s, ranks, sums, first / p.pieces);
#pragma unroll 1
  for (u32 part = first; part < most * ranks * p.pieces; part += step) {
    u32 piece = part % p.pieces;
    Given given = next;
    // It is on its way while this one is sent.
    next = given_at(p, s, ranks, sums, (part + step) / p.pieces);
    u32 has = __ballot_sync(ALL, given.row.to != 0);
    if (has == 0) continue;
    Slice slice = slice_of({0, 0, piece, p.pieces}, p.row_len / 16);
    // A table that the caller has spoilt may have rows that are none between others.
    bool is_summed = given.has_weight && has > 1 && (has & (has + 1)) == 0;
    if (is_summed) {
      send_sum(slice, given, has);
    } else {
      copy_rows(slice, given.row, has);
    }
    __syncwarp();
    if (lane_of_thread() != 0) continue;
    __threadfence_system();
    u64 mark = marks_of(g, given.rank, g.rank, call) + sizeof(u64) * (given.token * p.pieces + piece);
    store_relaxed(mark, mark_of_part(call, 0, is_summed ? OF_SUM : OF_ROWS));
  }
}

// Begins a block that sends rows back, and tells of the call. `whole`: all of a call of one launch; or null.
__device__ __forceinline__ bool begin_return(const UcclEpReturn& p, const UcclEpCombine* whole, ReturningParts& s) {
  load_starts(p, s.rows);
  if (!begin_at_once(p.group, p.call, whole != nullptr, s.rows.waiting, s.taken)) return false;
  if (is_spare_block()) {
    send_header(p.group, p.call, s.rows.waiting.call);
    if (whole != nullptr && p.weights_at != 0) tell_weights(*whole, s.rows.waiting.call);
    tell_arrived(p.group, p.call, s.rows.waiting);
  }
  return true;
}

// The terms of a token's sum, when a piece of each has come: a lane has those of a choice. All lanes of a warp come here. `stays`: the own
// rows that stay; or null.
__device__ __forceinline__ bool wait_for_terms(const UcclEpSum& p, const UcclEpReturn* stays, Waiting& w, u32 token, u32 piece,
                                               Terms& terms) {
  const UcclEpGroup& g = p.group;
  terms = terms_of(p, w.call, token);
  u32 lane = lane_of_thread(), rank = terms.rank;
  bool has = rank != NO_RANK, is_own = stays != nullptr && rank == g.rank;
  u32 nth = is_own ? lane * p.slots + token : token * p.pieces + piece;
  u64 mark = marks_of(g, g.rank, rank, w.call.number) + sizeof(u64) * nth, seen;
  if (!wait_for_parts(g, w, has, rank, mark, seen)) return false;
  if (is_own) terms.row = stays->rows + (static_cast<u32>(seen) & STAYS_MASK) * stays->row_stride;
  // A part has the slots of its rank's first two choices, and counts as two terms.
  bool is_part = has && !is_own && count_of_mark(seen) == OF_SUM;
  bool is_first = __popc(__match_any_sync(ALL, rank) & lanes_before()) < 2;
  terms.has = __ballot_sync(ALL, has && (!is_part || is_first));
  terms.halves = __ballot_sync(ALL, is_part && is_first);
  terms = in_order(terms);
  return true;
}

// Makes the sums, each by several warps: of a token's pieces, each is cut into as many slices as there are warps for.
__device__ __forceinline__ void sum_pieces(const UcclEpSum& p, const UcclEpReturn* stays, Waiting& w) {
  u32 warps = gridDim.x * warps_of_block(), pieces = p.routes.tokens * p.pieces, vectors = p.row_len / 16;
  u32 most = (vectors + p.pieces * LANES - 1) / (p.pieces * LANES);
  u32 slices = pieces == 0 ? 1 : min(max(warps / pieces, 1u), most);
#pragma unroll 1
  for (u32 i = blockIdx.x * warps_of_block() + warp_of_thread(); i < pieces * slices; i += warps) {
    u32 token = i / (p.pieces * slices), piece = i / slices % p.pieces;
    Terms terms;
    if (!wait_for_terms(p, stays, w, token, piece, terms)) break;
    Slice whole = slice_of({0, 0, piece, p.pieces}, vectors), slice = slice_of({0, 0, i % slices, slices}, whole.end - whole.begin);
    sum_terms(terms, p.out + token * static_cast<u64>(p.row_len), {whole.begin + slice.begin, whole.begin + slice.end});
  }
}

// Waits until ranks' headers are there, in the first block, which compares them for all.
__device__ __forceinline__ bool compare_first(const UcclEpSum& p, Waiting& w) {
  return blockIdx.x != 0 || wait_for_data(p.group, p.call, p.waits, w);
}

__device__ __forceinline__ void combine_send(const UcclEpReturn& p, ReturningParts& s) {
  if (p.pieces == 0) {
    return_whole(p, s.rows);
  } else if (begin_return(p, nullptr, s)) {
    return_pieces(p, s.rows, p.group.ranks, false);
  }
}

__device__ __forceinline__ void combine_receive(const UcclEpSum& p, Waiting& w) {
  if (!begin_block(p.group, p.call, STEP_RECEIVE, w)) return;
  if (p.pieces == 0) {
    sum_whole(p, w);
  } else if (compare_first(p, w)) {
    sum_pieces(p, nullptr, w);
    if (is_sound(p.group, p.call, w) && is_last_block(p.group, STEP_RECEIVE, w)) tell_taken(p.group, p.call, w);
  }
}

// Sends rows back and sums in one launch, in parts.
__device__ __forceinline__ void combine(const UcclEpCombine& p, ReturningParts& s) {
  const UcclEpReturn& back = p.give_back;
  if (!begin_return(back, &p, s)) return;
  bool stays = can_stay(back.slots, back.top_k), sums = back.weights_at != 0;
  if (stays) let_stay(back, s.rows);
  // Weights come with the headers: all blocks wait for them, and before they send.
  if (sums && !wait_for_data(back.group, back.call, p.sum.waits, s.rows.waiting)) return;
  u32 ranks = stays ? back.group.ranks - 1 : back.group.ranks;
  if (ranks > 0) return_pieces(back, s.rows, ranks, sums);
  if (!sums && !compare_first(p.sum, s.rows.waiting)) return;
  sum_pieces(p.sum, stays ? &back : nullptr, s.rows.waiting);
  is_sound(back.group, back.call, s.rows.waiting);
}
