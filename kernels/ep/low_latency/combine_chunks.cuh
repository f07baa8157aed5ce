// Combine of a small batch, in pieces. The rows that a rank returns for a token are cut into
// pieces: a piece is a slice of all these rows, and has a flag. Pieces of the first tokens go
// first, and sums are made as they come. In a combine of one launch, rows of this rank's own tokens
// are not copied: each choice has a flag, which names its row. A rank that sends its tokens'
// weights gets from each peer one partial sum instead of several rows, in the slots of the
// first two. The first tagged word of a rank says whether it sends weights; the other tagged words
// are the weights.
#pragma once

#include "combine.cuh"

struct ChunkReturnState {
  ReturnState rows;
  TakenWords taken;
  ReadyFlag flags[2][UCCL_EP_THREADS / LANES];  // of the warps' last pieces, in turn
};

// The bits of an own row's flag that have the row's number.
constexpr u32 OWN_ROW_MASK = (1u << FLAG_CALL) - 1;

// Whether own rows need no copy: each choice has a flag.
__device__ __forceinline__ bool can_skip_own_copies(u32 slots, u32 top_k) { return slots * top_k <= UCCL_EP_CHUNKS; }

// Names the rows of this rank's own tokens in their flags.
__device__ __forceinline__ void publish_own_rows(const UcclEpLowLatencyReturn& p, const ReturnState& s) {
  const UcclEpGroup& g = p.group;
  u64 call = s.wait.call.number, flags = flags_of(g, s.wait.call, g.rank, g.rank);
  u32 first = s.starts[g.rank], rows = records_of_rank(s, g.rank) * p.top_k;
#pragma unroll 1
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) {
    ExpertRow expert_row = expert_row_of(p, first + i / p.top_k, i % p.top_k);
    if (expert_row.is_there) store_relaxed(flags + sizeof(u64) * expert_row.slot(p), tagged_word(call, expert_row.row));
  }
}

// Vectors of each of two rows that a lane copies at a time.
constexpr u32 PAIR_ROUND = 4;

// Copies a slice of some rows: a lane has the source and destination of one.
__device__ __forceinline__ void copy_rows(const Slice& slice, const RowCopy& mine, u32 has) {
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

// The count in a piece's flag: the piece is of rows, or of their sum.
constexpr u32 OF_ROWS = 1;
constexpr u32 OF_SUM = 2;

// The address, in the window of `at`, of the weight that rank `of` sends for one of its choices.
__device__ __forceinline__ u64 weight_of(const UcclEpLowLatencyReturn& p, const PlacedCall& call, u32 at, u32 of,
                                         u32 choice) {
  return tagged_words_of(p.group, call, at, of) + sizeof(u64) * (1 + choice);
}

// A tagged word with a weight has in its upper half the call's number within its slot, in 31 bits:
// the next call with the same bits comes days later. Its top bit is set, which no count in the same
// words has.
constexpr u32 WEIGHT_CALL = 32;
constexpr u64 OF_WEIGHT = 0x80000000;

__device__ __forceinline__ u64 nth_of_slot(u64 call) { return (call / UCCL_EP_SLOTS & (OF_WEIGHT - 1)) | OF_WEIGHT; }
__device__ __forceinline__ u64 tagged_weight(u64 call, float weight) {
  return nth_of_slot(call) << WEIGHT_CALL | __float_as_uint(weight);
}
__device__ __forceinline__ bool is_weight(u64 word, u64 call) { return word >> WEIGHT_CALL == nth_of_slot(call); }

// Sends all ranks the weights of this rank's tokens, or a word that it sends none.
__device__ __forceinline__ void send_weights(const UcclEpLowLatencyReturn& p, const UcclEpLowLatencySum* sum,
                                             const PlacedCall& call) {
  const UcclEpGroup& g = p.group;
  bool sends_weights = p.sums != 0 && sum != nullptr;
  u32 count = sends_weights ? min(sum->routes.tokens, p.slots) * p.top_k : 0;
#pragma unroll 1
  for (u32 rank = threadIdx.x; rank < g.ranks; rank += blockDim.x) {
    if (!is_masked(call, rank))
      store_relaxed(tagged_words_of(g, call, rank, g.rank), tagged_word(call.number, sends_weights ? 1 : 0));
  }
#pragma unroll 1
  for (u32 choice = threadIdx.x; choice < count; choice += blockDim.x) {
    u64 word = tagged_weight(call.number, reinterpret_cast<const float*>(sum->weights)[choice]);
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) {
      if (!is_masked(call, rank)) store_relaxed(weight_of(p, call, rank, g.rank, choice), word);
    }
  }
}

// A token's rows that go back to a rank: a row for each lane, or none, with the tagged word of its
// weight and the weight.
struct TokenReturn {
  u32 rank;
  u32 token;
  RowCopy row;
  u64 weight_at;
  u64 weight;
};

// The `turn`th token that goes back; so many ranks take turns.
__device__ __forceinline__ TokenReturn token_return_at(const UcclEpLowLatencyReturn& p, const ReturnState& s, u32 ranks,
                                                       u32 turn) {
  const UcclEpGroup& g = p.group;
  u32 rank = (g.rank + 1 + turn % ranks) % g.ranks, at = s.starts[rank] + turn / ranks;
  TokenReturn token_return = {rank, 0, {0, 0, 0}, 0, 0};
  if (at >= s.starts[rank + 1]) return token_return;
  token_return.token = token_of_record(record_of(p.records, p.top_k, at)[0]);
  if (lane_of_thread() >= p.top_k) return token_return;
  ExpertRow expert_row = expert_row_of(p, at, lane_of_thread());
  token_return.row = row_copy(p, s.wait.call, rank, expert_row);
  if (token_return.row.to == 0 || p.sums == 0) return token_return;
  token_return.weight_at = weight_of(p, s.wait.call, g.rank, rank, expert_row.token * p.top_k + expert_row.choice);
  token_return.weight = load_relaxed(token_return.weight_at);
  return token_return;
}

// Waits until a rank has said whether it sends weights, and sets `sends_weights`. `weight_ranks`
// has a bit for each rank known to send them. All lanes of a warp take part.
__device__ __forceinline__ bool wait_for_weight_word(const UcclEpLowLatencyReturn& p, WaitState& w, u32 rank,
                                                     u64& weight_ranks, bool& sends_weights) {
  u64 seen;
  sends_weights = (weight_ranks >> rank & 1) != 0;
  if (sends_weights) return true;
  if (!wait_for_flags(p.group, w, true, rank, tagged_words_of(p.group, w.call, p.group.rank, rank), seen)) return false;
  sends_weights = value_of_tagged(seen) != 0;
  if (sends_weights) weight_ranks |= 1ull << rank;
  return true;
}

// Waits until the weights of a token's rows are there. All lanes of a warp take part.
__device__ __forceinline__ bool wait_for_weights(const UcclEpLowLatencyReturn& p, WaitState& w,
                                                 TokenReturn& token_return) {
  u64 call = w.call.number;
  auto has_come = [&](u64 word) { return is_weight(word, call); };
  WordWait weight = {token_return.weight_at, flag_of(call), token_return.rank, UCCL_EP_DATA, NO_CALL};
  bool waits = token_return.weight_at != 0 && !has_come(token_return.weight);
  return __all_sync(ALL, !waits || wait_for_word(p.group, w, weight, token_return.weight, has_come) == ARRIVED);
}

// Rows that a lane loads at a time to sum them for another rank, and vectors of each row.
constexpr u32 SENT_ROUND = 3;
constexpr u32 SENT_WIDTH = 2;

// Sends a slice of this rank's partial sum of a token, to the slots of its first two rows.
__device__ __forceinline__ void send_sum(const Slice& slice, const TokenReturn& token_return, u32 has) {
  u64 upper = __shfl_sync(ALL, token_return.row.to, 0), lower = __shfl_sync(ALL, token_return.row.to, 1);
  Terms terms = {
      token_return.row.from, __uint_as_float(static_cast<u32>(token_return.weight)), token_return.rank, has, 1, 0};
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end; first += SENT_WIDTH * LANES) {
    Sums partial[SENT_WIDTH] = {};
    add_partial<SENT_ROUND>(terms, has, first, slice.end, partial);
#pragma unroll
    for (u32 j = 0; j < SENT_WIDTH; j++) {
      u32 at = first + lane_of_thread() + j * LANES;
      round_partial(partial[j]);
      if (at >= slice.end) continue;
      store_vector(upper + 16ull * at, upper_of(partial[j]));
      store_half(lower + 8ull * at, lower_of(partial[j]));
    }
  }
}

// Sends a piece of a token's rows. Returns its flag, or none: there was no row, or a wait has
// failed. All lanes of a warp take part.
__device__ __forceinline__ ReadyFlag send_piece(const UcclEpLowLatencyReturn& p, WaitState& w,
                                                TokenReturn& token_return, u32 piece, u64& weight_ranks) {
  u32 has = __ballot_sync(ALL, token_return.row.to != 0);
  // A corrupted table may have gaps between rows.
  bool is_summed = p.sums != 0 && __popc(has) > 1 && (has & (has + 1)) == 0;
  if (has == 0 || (is_summed && !wait_for_weight_word(p, w, token_return.rank, weight_ranks, is_summed))) return {0, 0};
  if (is_summed && !wait_for_weights(p, w, token_return)) return {0, 0};
  Slice slice = slice_of({0, 0, piece, p.pieces}, p.row_len / 16);
  if (is_summed) {
    send_sum(slice, token_return, has);
  } else {
    copy_rows(slice, token_return.row, has);
  }
  u64 call = w.call.number, flags = flags_of(p.group, w.call, token_return.rank, p.group.rank);
  return {flags + sizeof(u64) * (token_return.token * p.pieces + piece),
          chunk_flag(call, 0, is_summed ? OF_SUM : OF_ROWS)};
}

// Sets the flags of pieces that the block has sent: one for each lane, or none. A fence for each
// warp would take longer: fences of a block run one after the other.
__device__ __forceinline__ void set_flags(const ReadyFlag& flag) {
  if (!__any_sync(ALL, flag.word != 0)) return;
  __threadfence_system();
  if (flag.word != 0) store_relaxed(flag.word, flag.value);
}

// Sends rows back, piece by piece; so many ranks take turns. The first warp waits until the pieces
// of all warps are there, and sets the flags.
__device__ __forceinline__ void return_pieces(const UcclEpLowLatencyReturn& p, ChunkReturnState& state, u32 ranks) {
  const UcclEpGroup& g = p.group;
  ReturnState& s = state.rows;
  u64 weight_ranks = 0;
  u32 most = 0, warps = warps_of_block(), warp = warp_of_thread();
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) most = max(most, records_of_rank(s, rank));
  u32 count = most * ranks * p.pieces, turn = 0;
#pragma unroll 1
  for (u32 first = block_number(); first < count; first += gridDim.x * warps) {
    u32 item = first + warp * gridDim.x;
    ReadyFlag flag = {0, 0};
    if (item < count) {
      TokenReturn token_return = token_return_at(p, s, ranks, item / p.pieces);
      flag = send_piece(p, s.wait, token_return, item % p.pieces, weight_ranks);
    }
    if (lane_of_thread() == 0) state.flags[turn][warp] = flag;
    __syncthreads();
    if (warp == 0) set_flags(lane_of_thread() < warps ? state.flags[turn][lane_of_thread()] : ReadyFlag{0, 0});
    turn ^= 1;
  }
}

// Begins a block that sends rows back. The spare block sends weights and headers, and sets
// `arrived`. `sum`: the sum in the same launch; or null.
__device__ __forceinline__ bool begin_return(const UcclEpLowLatencyReturn& p, const UcclEpLowLatencySum* sum,
                                             ChunkReturnState& s) {
  load_starts(p, s.rows);
  if (!begin_at_once(p.group, p.call, sum != nullptr, s.rows.wait, s.taken)) return false;
  if (is_spare_block()) {
    send_weights(p, sum, s.rows.wait.call);
    write_headers(p.group, p.call, s.rows.wait.call, nullptr);
    set_arrived(p.group, p.call, s.rows.wait);
  }
  return true;
}

// The terms of a token's sum in order, with a choice for each lane. Instead of an own row that was
// not copied, a lane has the address of its flag.
__device__ __forceinline__ Terms terms_in_chunks(const UcclEpLowLatencySum& p, bool skips_own, const WaitState& w,
                                                 u32 token) {
  const UcclEpGroup& g = p.group;
  Terms terms = terms_of(p, w, token);
  if (skips_own && terms.rank == g.rank) {
    terms.row = flags_of(g, w.call, g.rank, g.rank) + sizeof(u64) * (lane_of_thread() * p.slots + token);
  }
  return in_order(terms);
}

// Finds the own rows that were not copied: lanes in `own` have the address of a flag. All lanes of
// a warp take part.
__device__ __forceinline__ bool find_own(const UcclEpLowLatencyReturn& p, WaitState& w, u32 own, Terms& terms) {
  bool has = (own >> lane_of_thread() & 1) != 0;
  u64 seen;
  if (!wait_for_flags(p.group, w, has, p.group.rank, terms.row, seen)) return false;
  if (has) terms.row = p.rows + (static_cast<u32>(seen) & OWN_ROW_MASK) * p.row_stride;
  return true;
}

// Waits until a piece of each term has come, except `own`. A partial sum has the slots of its
// rank's first two choices, and counts as two terms. All lanes of a warp take part.
__device__ __forceinline__ bool wait_for_terms(const UcclEpLowLatencySum& p, WaitState& w, u32 token, u32 piece,
                                               u32 own, Terms& terms) {
  const UcclEpGroup& g = p.group;
  u32 lane = lane_of_thread();
  bool is_there = (terms.has >> lane & 1) != 0, has = is_there && (own >> lane & 1) == 0;
  u64 flag = flags_of(g, w.call, g.rank, terms.rank) + sizeof(u64) * (token * p.pieces + piece), seen;
  if (!wait_for_flags(g, w, has, terms.rank, flag, seen)) return false;
  bool is_partial = has && count_of_flag(seen) == OF_SUM;
  bool is_first = __popc(__match_any_sync(ALL, terms.rank) & lanes_before()) < 2;
  terms.has = __ballot_sync(ALL, is_there && (!is_partial || is_first));
  terms.partials = __ballot_sync(ALL, is_partial && is_first);
  return true;
}

// Vectors of a piece that a warp sums together.
constexpr u32 PIECE_STEP = PIECE_WIDTH * LANES;

__device__ __forceinline__ u32 warps_of_launch() { return gridDim.x * warps_of_block(); }

// The number of slices of a piece; a warp sums one at a time.
__device__ __forceinline__ u32 slices_of_piece(const UcclEpLowLatencySum& p) {
  u32 most = (p.row_len / 16 + p.pieces * LANES - 1) / (p.pieces * LANES);
  return min(max(warps_of_launch() / max(p.routes.tokens * p.pieces, 1u), 1u), most);
}

// The first blocks may have one more piece to send, so they have the last slices, or none.
__device__ __forceinline__ u32 first_slice() {
  return (gridDim.x - 1 - block_number()) * warps_of_block() + warp_of_thread();
}

// Some vectors of a token's sum.
struct SumSlice {
  u32 token;
  u32 piece;
  Slice slice;
};

__device__ __forceinline__ SumSlice sum_slice_of(const UcclEpLowLatencySum& p, u32 slices, u32 i) {
  u32 nth = i / slices, piece = nth % p.pieces;
  Slice whole = slice_of({0, 0, piece, p.pieces}, p.row_len / 16);
  Slice slice = slice_of({0, 0, i % slices, slices}, whole.end - whole.begin);
  return {nth / p.pieces, piece, {whole.begin + slice.begin, whole.begin + slice.end}};
}

// The terms of a sum, and the partial sum of own rows that were not copied.
struct SumState {
  Terms terms;
  KnownPartial<PIECE_WIDTH> own;
};

__device__ __forceinline__ void add_own(SumState& s, u32 first, u32 end) {
  s.own = {s.own.terms, {}};
  add_partial<PARTIAL_ROUND>(s.terms, s.own.terms, first, end, s.own.of);
#pragma unroll
  for (u32 j = 0; j < PIECE_WIDTH; j++) round_partial(s.own.of[j]);
}

// Begins a sum with this rank's own rows. `own_rows`: the call that has those rows, if they were
// not copied; or null. All lanes of a warp take part.
__device__ __forceinline__ bool begin_sum(const UcclEpLowLatencySum& p, const UcclEpLowLatencyReturn* own_rows,
                                          WaitState& w, const SumSlice& sum_slice, SumState& s) {
  s.terms = terms_in_chunks(p, own_rows != nullptr, w, sum_slice.token);
  s.own.terms = __ballot_sync(ALL, own_rows != nullptr && s.terms.rank == p.group.rank) & s.terms.has;
  if (s.own.terms != 0 && !find_own(*own_rows, w, s.own.terms, s.terms)) return false;
  add_own(s, sum_slice.slice.begin, sum_slice.slice.end);
  return true;
}

// Ends a sum once the pieces of other ranks have come.
__device__ __forceinline__ bool end_sum(const UcclEpLowLatencySum& p, WaitState& w, const SumSlice& sum_slice,
                                        SumState& s) {
  if (!wait_for_terms(p, w, sum_slice.token, sum_slice.piece, s.own.terms, s.terms)) return false;
#pragma unroll 1
  for (u32 first = sum_slice.slice.begin; first < sum_slice.slice.end; first += PIECE_STEP) {
    if (first != sum_slice.slice.begin) add_own(s, first, sum_slice.slice.end);
    sum_vectors<PARTIAL_ROUND>(s.terms, s.own, first, sum_slice.slice.end, [&](u32 at, const Sums& sums) {
      store_vector(p.out + sum_slice.token * static_cast<u64>(p.row_len) + 16ull * at, rounded(sums));
    });
  }
  return true;
}

// Makes the sums. Own rows are added while the pieces of other ranks are on their way.
__device__ __forceinline__ void sum_pieces(const UcclEpLowLatencySum& p, const UcclEpLowLatencyReturn* own_rows,
                                           WaitState& w) {
  u32 slices = slices_of_piece(p);
#pragma unroll 1
  for (u32 i = first_slice(); i < p.routes.tokens * p.pieces * slices; i += warps_of_launch()) {
    SumSlice sum_slice = sum_slice_of(p, slices, i);
    SumState sum;
    if (!begin_sum(p, own_rows, w, sum_slice, sum) || !end_sum(p, w, sum_slice, sum)) break;
  }
}

// In the first block: waits for the ranks' headers, compares them for all blocks, and measures the
// ranks' delays.
__device__ __forceinline__ bool compare_first(const UcclEpLowLatencySum& p, WaitState& w) {
  return blockIdx.x != 0 || wait_for_data(p.group, p.call, p.waits, w);
}

__device__ __forceinline__ void low_latency_return(const UcclEpLowLatencyReturn& p, ChunkReturnState& s) {
  if (p.pieces == 0) {
    return_whole(p, s.rows);
  } else if (begin_return(p, nullptr, s)) {
    return_pieces(p, s, p.group.ranks);
  }
}

__device__ __forceinline__ void low_latency_sum(const UcclEpLowLatencySum& p, WaitState& w) {
  if (!begin_block(p.group, p.call, STEP_RECEIVE, w)) return;
  if (p.pieces == 0) {
    sum_whole(p, w);
  } else if (compare_first(p, w)) {
    sum_pieces(p, nullptr, w);
    if (is_sound(p.group, p.call, w) && is_last_block(p.group, STEP_RECEIVE, w)) set_taken(p.group, p.call, w);
  }
}

// Sends rows back and sums in one launch, in pieces.
__device__ __forceinline__ void low_latency_combine(const UcclEpLowLatencyCombine& p, ChunkReturnState& s) {
  const UcclEpLowLatencyReturn& back = p.send;
  if (!begin_return(back, &p.sum, s)) return;
  bool skips_own = can_skip_own_copies(back.slots, back.top_k);
  if (skips_own) publish_own_rows(back, s.rows);
  u32 ranks = skips_own ? back.group.ranks - 1 : back.group.ranks;
  // Delays of ranks are measured before any other wait for them.
  bool is_timed = p.sum.waits != 0;
  if (is_timed && !compare_first(p.sum, s.rows.wait)) return;
  if (ranks > 0) return_pieces(back, s, ranks);
  if (!is_timed && !compare_first(p.sum, s.rows.wait)) return;
  sum_pieces(p.sum, skips_own ? &back : nullptr, s.rows.wait);
  is_sound(back.group, back.call, s.rows.wait);
}
