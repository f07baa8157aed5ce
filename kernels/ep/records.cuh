// Records of a dispatch, in either mode: their addresses at the receivers, the counts that go with
// them, and the search for a record's sender.
#pragma once

#include "layout.cuh"

constexpr u32 NO_ROW = 0xffffffff;

// Bits of a token's number in a word.
constexpr u32 TOKEN_BITS = 16;
static_assert(UCCL_EP_MAX_TOKENS < 1u << TOKEN_BITS, "a token's number");

// Addresses of a token's records at ranks: `rank_of` returns a lane's rank of each set, and `slot_of`
// the token's slot at a rank, or -1.
template <typename RankOf, typename SlotOf>
__device__ __forceinline__ void records_at(const UcclEpSend& p, const PlacedCall& call, Targets (&to)[TARGET_SETS],
                                           RankOf rank_of, SlotOf slot_of) {
#pragma unroll
  for (u32 set = 0; set < TARGET_SETS; set++) {
    u32 rank = rank_of(set);
    bool is_rank = rank < p.group.ranks && !is_masked(call, rank);
    int slot = is_rank ? slot_of(rank) : -1;
    to[set].has = __ballot_sync(ALL, slot >= 0);
    to[set].mine = 0;
    if (slot >= 0) {
      u64 area = place_at_rank(call, rank) + p.group.rank * p.area.len;
      to[set].mine = area + p.area.first + static_cast<u64>(slot) * p.area.stride;
    }
  }
}

// A lane's rank of a set, of all ranks of a small group.
__device__ __forceinline__ u32 rank_of_lane(u32 set) { return set * LANES + lane_of_thread(); }

// Addresses of the records of a token that an earlier launch has routed, without that at
// `left_out`: in one word at all ranks, and otherwise at a part of the token's.
__device__ __forceinline__ void records_of(const UcclEpSend& p, const PlacedCall& call, u32 token, u32 part,
                                           Targets (&to)[TARGET_SETS], u32 left_out = NO_RANK) {
  auto rank_of = [&](u32 set) {
    if constexpr (IS_WIDE) {
      return ranks_of_token(p.routes.masks, token).of_lane(part, set);
    } else {
      // The slots tell in which ranks the token is: no load waits for the set.
      return rank_of_lane(set);
    }
  };
  records_at(p, call, to, rank_of,
             [&](u32 rank) { return rank == left_out ? -1 : slot_at(p.routes, p.group.ranks, token, rank).place(); });
}

// Sends each rank its counts; null: zeros. One block.
__device__ __forceinline__ void send_counts(const UcclEpSend& p, const PlacedCall& call, const u32* per_expert,
                                            const u32* per_rank) {
  const UcclEpGroup& g = p.group;
  u32 local = p.routes.local_experts;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * local; i += blockDim.x) {
    if (is_masked(call, i / local)) continue;
    u64 area = window_of(g, i / local) + call.place + g.rank * p.area.len;
    reinterpret_cast<u32*>(area)[i % local] = per_expert != nullptr ? per_expert[i] : 0;
  }
  write_headers(g, p.call, call, per_rank);
}

// Sends the counts of tokens that an earlier launch has routed; without tokens there may be none.
__device__ __forceinline__ void send_routed_counts(const UcclEpSend& p, const PlacedCall& call, bool is_empty = false) {
  if (is_empty) {
    send_counts(p, call, nullptr, nullptr);
    return;
  }
  send_counts(p, call, reinterpret_cast<const u32*>(p.routes.experts), reinterpret_cast<const u32*>(p.routes.counts));
}

// Sends far ranks their areas. The headers have the numbers of records.
__device__ __forceinline__ void send_areas(const UcclEpSend& p, WaitState& w) {
  const UcclEpGroup& g = p.group;
  u32 rank = threadIdx.x;
  if (rank - lane_of_thread() >= g.ranks) return;
  bool has = rank < g.ranks && is_far(g, rank) && !is_masked(w.call, rank);
  u64 area = has ? window_of(g, rank) + w.call.place + g.rank * p.area.len : 0;
  u64 header = has ? header_of(g, rank, g.rank, w.call.number) : 0;
  u64 records = has ? reinterpret_cast<const u64*>(header)[p.call.agreed] : 0;
  send_far(g, w, has, rank, area, p.area.first + records * p.area.stride);
}

// Sets a fault: a rank announces more records than it may.
__device__ __forceinline__ void set_excess_fault(const UcclEpCall& c, WaitState& w, u32 rank, u64 most, u64 count) {
  w.expected[rank] = most;
  w.seen[rank] = count;
  set_fault(w, UCCL_EP_DISAGREE, c.agreed, rank);
}

// Turns the ranks' counts of records into the records before each rank's first; `starts[rank + 1]`
// has a rank's count.
__device__ __forceinline__ bool add_starts(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w, u32* starts) {
  if (!is_sound(g, c, w)) return false;
  if (threadIdx.x == 0) {
    starts[0] = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) starts[rank + 1] += starts[rank];
  }
  __syncthreads();
  return true;
}

// Finds the records that each rank has sent, of `slots` at most, and those before its first. The
// block has the headers.
__device__ __forceinline__ bool count_records(const UcclEpGroup& g, const UcclEpCall& c, u32 slots, WaitState& w,
                                              u32* starts) {
  if (threadIdx.x < g.ranks) {
    bool is_there = !is_masked(w.call, threadIdx.x);
    u64 count = is_there ? w.extras[0][threadIdx.x] : 0, tokens = is_there ? w.extras[1][threadIdx.x] : 0;
    u64 most = min(tokens, static_cast<u64>(slots));
    if (count > most) set_excess_fault(c, w, threadIdx.x, most, count);
    starts[threadIdx.x + 1] = static_cast<u32>(count);
  }
  return add_starts(g, c, w, starts);
}

// The sender of the `at`th record that arrives.
__device__ __forceinline__ u32 sender_of(const u32* starts, u32 ranks, u32 at) {
  u32 sender = 0;
  auto count = [&](u32 first) {
    u32 rank = first + lane_of_thread();
    sender += __popc(__ballot_sync(ALL, rank < ranks && starts[rank + 1] <= at));
  };
  if constexpr (IS_WIDE) {
#pragma unroll 1
    for (u32 first = 0; first < ranks; first += LANES) count(first);
  } else {
#pragma unroll
    for (u32 half = 0; half < 2; half++) count(half * LANES);
  }
  return sender;
}

// Fetches the records of a block's teams, where windows are in host memory: a team reads a record
// in many pieces, and each read would cross the bus.
__device__ __forceinline__ void fetch_records(const UcclEpGroup& g, const PlacedCall& call, const UcclEpArea& area,
                                              const u32* starts, const Team& team) {
  if (g.via_host == 0) return;
#pragma unroll 1
  for (u32 at = team.first; at < starts[g.ranks]; at += team.step) {
    u32 from = sender_of(starts, g.ranks, at);
    if (from == g.rank) continue;
    u64 record = area.first + static_cast<u64>(at - starts[from]) * area.stride;
    u64 address = window_of(g, g.rank) + call.place + from * area.len + record;
    copy<LONG_ROUND>(team, staging_address(g, address), address, area.stride / 16);
  }
  __syncthreads();
}
