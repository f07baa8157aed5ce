// Normal mode: tokens go to the ranks of their experts, once to each.
#pragma once

#include "ep_dispatch.cuh"
#include "ep_layout.cuh"

// A record's last word is its token and which of the token's ranks the receiver is: the row that comes back has this place.
constexpr u32 TOKEN_BITS = 16;
// Parts of an origin.
constexpr u32 ORIGIN_RANK = UCCL_EP_MOST_RANKS;

// How many of a token's ranks are before one.
__device__ __forceinline__ u32 ranks_before(u64 mask, u32 rank) {
  u64 before = mask & ((1ull << rank) - 1);
  return __popc(static_cast<u32>(before)) + __popc(static_cast<u32>(before >> 32));
}

__device__ __forceinline__ void send_scales(const UcclEpNormalSend& p, const Team& team, u32 token,
                                            const Targets (&to)[2]) {
  const UcclEpArea& area = p.send.area;
  const u32* scales = reinterpret_cast<const u32*>(p.scales) + token * p.scales_token;
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < area.scales; first += team.lanes()) {
    u32 word = first + lane_of_thread();
    bool is_inside = word < area.scales;
    u32 scale = is_inside ? scales[word * p.scales_word] : 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      for_each(to[half], [&](u64 record) {
        if (is_inside) *reinterpret_cast<u32*>(record + area.scales_at + 4ull * word) = scale;
      });
    }
  }
}

// What goes with a token: its choices, their weights, its number and its receiver's place among its ranks. One warp does it.
__device__ __forceinline__ void send_weights(const UcclEpNormalSend& p, u32 token, const Targets (&to)[2]) {
  const UcclEpSend& send = p.send;
  u32 lane = lane_of_thread();
  u32 choice = NO_EXPERT;
  float weight = 0.0f;
  if (lane < send.routes.top_k) {
    u64 at = static_cast<u64>(token) * send.routes.top_k + lane;
    choice = reinterpret_cast<const u32*>(send.routes.places)[at];
    if (p.weights != 0) weight = reinterpret_cast<const float*>(p.weights)[at];
  }
  u64 mask = reinterpret_cast<const u64*>(send.routes.masks)[token];
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    for_each(to[half], [&](u64 record) {
      if (lane < send.routes.top_k) {
        *reinterpret_cast<u32*>(record + send.area.choices_at + 4ull * lane) = choice;
        *reinterpret_cast<float*>(record + send.area.places_at + 4ull * lane) = weight;
      }
    });
    if ((to[half].has >> lane & 1) != 0) {
      u32 nth = ranks_before(mask, half * LANES + lane);
      *reinterpret_cast<u32*>(to[half].mine + send.area.token_at) = nth << TOKEN_BITS | token;
    }
  }
}

__device__ __forceinline__ void normal_send(const UcclEpNormalSend& p, Waiting& w) {
  const UcclEpSend& send = p.send;
  if (!begin_send(send.group, send.call, w)) return;
  if (is_spare_block()) send_routed_counts(send, w.call);
  Team team = team_for(send.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < send.routes.tokens; token += team.step) {
    Targets to[2];
    records_of(send, w.call, token, to);
    copy_to_all(team, to, send.rows + token * send.row_stride, send.area.payload / 16);
    send_scales(p, team, token, to);
    if (team.warp == 0) send_weights(p, token, to);
  }
  end_send(send.group, send.call, w, [&] { send_areas(send, w); });
}

// What a block knows of the rows that arrive.
struct Rows {
  Waiting waiting;
  u32 starts[UCCL_EP_MOST_RANKS + 1];
};

// How many tokens chose one of this rank's experts.
__device__ __forceinline__ u32 tokens_of(const UcclEpGroup& g, const UcclEpPlaced& call, u64 area_len, u32 expert) {
  u32 tokens = 0;
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) {
    if (is_masked(call, rank)) continue;
    tokens += reinterpret_cast<const u32*>(g.windows[g.rank] + call.place + rank * area_len)[expert];
  }
  return tokens;
}

// Waits for all ranks, and tells the host how much arrives. One block.
__device__ __forceinline__ void count(const UcclEpCount& p, Rows& s) {
  const UcclEpGroup& g = p.group;
  if (!wait_for_data(g, p.call, 0, s.waiting)) return;
  if (!count_records(g, p.call, p.slots, s.waiting, s.starts)) return;
  UcclEpTold* told = reinterpret_cast<UcclEpTold*>(p.told);
  if (threadIdx.x < g.ranks) told->from[threadIdx.x] = s.starts[threadIdx.x + 1] - s.starts[threadIdx.x];
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    told->per_expert[expert] = tokens_of(g, s.waiting.call, p.area_len, expert);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.told, p.ticket);
}

// Whether there is a row for each token that arrives.
__device__ __forceinline__ bool has_room(const UcclEpGroup& g, const UcclEpCall& c, u32 rows, u32 len, Waiting& w) {
  if (threadIdx.x == 0 && rows > len) {
    w.expected[g.rank] = rows;
    w.seen[g.rank] = len;
    note_fault(w, UCCL_EP_NO_ROOM, 0, g.rank);
  }
  return is_sound(g, c, w);
}

// The first block tells the caller what arrives.
__device__ __forceinline__ void tell_rows(const UcclEpNormalReceive& p, const Rows& s) {
  const UcclEpGroup& g = p.group;
  if (blockIdx.x != 0 || p.origin == 0) return;
  if (threadIdx.x <= g.ranks) reinterpret_cast<u32*>(p.starts)[threadIdx.x] = s.starts[threadIdx.x];
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    reinterpret_cast<u32*>(p.per_expert)[expert] = tokens_of(g, s.waiting.call, p.area.len, expert);
  }
}

__device__ __forceinline__ void put_choice(const UcclEpNormalReceive& p, u64 at, int choice) {
  if (p.choices == 0) return;
  if (p.is_64 != 0) {
    reinterpret_cast<long long*>(p.choices)[at] = choice;
  } else {
    reinterpret_cast<int*>(p.choices)[at] = choice;
  }
}

// What came with a token. One warp does it.
__device__ __forceinline__ void take_weights(const UcclEpNormalReceive& p, u64 record, u32 from, u32 row) {
  u32 lane = lane_of_thread();
  if (lane < p.top_k) {
    u64 at = static_cast<u64>(row) * p.top_k + lane;
    u32 choice = *reinterpret_cast<const u32*>(record + p.area.choices_at + 4ull * lane);
    u32 local = choice - p.group.rank * p.local_experts;
    bool is_here = choice != NO_EXPERT && local < p.local_experts;
    put_choice(p, at, is_here ? static_cast<int>(local) : -1);
    if (p.weights != 0) {
      float weight = *reinterpret_cast<const float*>(record + p.area.places_at + 4ull * lane);
      reinterpret_cast<float*>(p.weights)[at] = is_here || p.zeroes_foreign == 0 ? weight : 0.0f;
    }
  }
  if (lane == 0 && p.origin != 0) {
    u32 word = *reinterpret_cast<const u32*>(record + p.area.token_at);
    reinterpret_cast<u32*>(p.src_info)[row] = word & ((1u << TOKEN_BITS) - 1);
    reinterpret_cast<u32*>(p.origin)[row] = from * ORIGIN_RANK + (word >> TOKEN_BITS);
  }
}

// Copies a record to its row.
__device__ __forceinline__ void take_record(const UcclEpNormalReceive& p, const Rows& s, const Team& team, u32 row) {
  const UcclEpGroup& g = p.group;
  u32 from = sender_of(s.starts, g.ranks, row);
  u64 area = g.windows[g.rank] + s.waiting.call.place + from * p.area.len;
  u64 record = area + p.area.first + static_cast<u64>(row - s.starts[from]) * p.area.stride;
  Targets to[1] = {{p.rows + row * p.row_stride, 1}};
  copy_to_all(team, to, record, p.area.payload / 16);
  u32* scales = reinterpret_cast<u32*>(p.scales) + row * p.scales_row;
#pragma unroll 1
  for (u32 word = team.lane(); word < p.area.scales; word += team.lanes()) {
    scales[word * p.scales_word] = *reinterpret_cast<const u32*>(record + p.area.scales_at + 4ull * word);
  }
  if (team.warp == 0) take_weights(p, record, from, row);
}

__device__ __forceinline__ void normal_receive(const UcclEpNormalReceive& p, Rows& s) {
  const UcclEpGroup& g = p.group;
  if (!wait_for_data(g, p.call, 0, s.waiting)) return;
  if (!count_records(g, p.call, p.slots, s.waiting, s.starts)) return;
  u32 total = s.starts[g.ranks];
  if (!has_room(g, p.call, total, p.len, s.waiting)) return;
  tell_rows(p, s);
  Team team = team_for(total);
#pragma unroll 1
  for (u32 row = team.first; row < total; row += team.step) take_record(p, s, team, row);
  // Rows that nothing arrives for chose no expert.
#pragma unroll 1
  for (u32 row = total + blockIdx.x; row < p.len; row += gridDim.x) {
    if (threadIdx.x < p.top_k) put_choice(p, static_cast<u64>(row) * p.top_k + threadIdx.x, -1);
  }
  if (is_last_block(g, STEP_RECEIVE, s.waiting)) tell_taken(g, p.call, s.waiting);
}
