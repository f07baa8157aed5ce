// Normal-mode combine in one launch: rows go back chunk by chunk, and a token is summed as soon as its rows
// have come.
#pragma once

#include "combine.cuh"

static_assert(!IS_WIDE, "a lane has two ranks of the group");

// The routing of a token whose rows come in chunks: a lane has its places at two ranks too.
struct ChunkRouting : TokenRouting {
  Slot slots[TARGET_SETS];

  // The token's place at any rank. All lanes take part.
  __device__ __forceinline__ int place_in_rank(u32 rank) const {
    int lane = static_cast<int>(rank % LANES);
    int low = __shfl_sync(ALL, slots[0].place(), lane), high = __shfl_sync(ALL, slots[1].place(), lane);
    return rank < LANES ? low : high;
  }
};

// All loads are in flight at once: none depends on another.
__device__ __forceinline__ ChunkRouting chunk_routing_of(const UcclEpNormalSum& p, u32 token) {
  u32 ranks = p.group.ranks;
  ChunkRouting routing;
  static_cast<TokenRouting&>(routing) = routing_of(p, token);
#pragma unroll
  for (u32 set = 0; set < TARGET_SETS; set++) {
    u32 rank = rank_of_lane(set);
    routing.slots[set] = rank < ranks ? slot_at(p.routes, ranks, token, rank) : Slot{-1, 0};
  }
  return routing;
}

// Finds a token's returned rows as WindowRowSource does, except for this rank's own row, which is not
// copied.
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
  u32 counts[RANKS];  // this rank's tokens by rank
};

// Waits until all of a token's rows are there: a lane polls a piece of a rank's row.
__device__ __forceinline__ bool wait_for_rows(const UcclEpNormalCombine& p, CombineState& s,
                                              const ChunkRouting& routing) {
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
  ChunkRouting next;
  share_out(
      sum.group, s.wait.call, tokens * pieces, [&](u32 i) { next = chunk_routing_of(sum, i / pieces); },
      [&](u32 i, auto look_ahead) {
        ChunkRouting routing = next;
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
  if (!rows.begin(back, w)) return;
  if (is_spare_sender()) {
    write_headers(g, back.call, w.call, nullptr);
    set_arrived(g, back.call, w);
  }
  if (!has_rows(back, w)) return;
  Share share = senders(SENDERS);
  if (ranks_of(back) > 0 && has_block(share)) return_chunks(back, rows, w.call, share, s.out);
  rows.begin_sums(p.sum, w);
  if (!wait_for_data(g, back.call, 0, w)) return;
  sum_chunks(p, s, rows);
  if (!is_sound(g, back.call, w) || !is_last_block(g, STEP_RECEIVE, w)) return;
  end_shares(g, w.call);
  take_place(g, back.call, w.call);
  rows.end(p.sum, w);
  set_taken(g, back.call, w);
}
