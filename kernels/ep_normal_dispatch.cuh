// Normal mode: tokens go to the ranks of their experts, once to each.
#pragma once

#include "ep_dispatch.cuh"
#include "ep_layout.cuh"
#include "ep_scan.cuh"

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

// What goes with a token: its choices and their places, their weights, its number and its receiver's place among its ranks. One warp does it.
__device__ __forceinline__ void send_weights(const UcclEpNormalSend& p, u32 token, const Targets (&to)[2]) {
  const UcclEpSend& send = p.send;
  u32 lane = lane_of_thread();
  u32 choice = NO_EXPERT;
  float weight = 0.0f;
  if (lane < send.routes.top_k) {
    u64 at = static_cast<u64>(token) * send.routes.top_k + lane;
    choice = reinterpret_cast<const u32*>(send.routes.places)[at];
    if (choice != NO_EXPERT) {
      u32 ranks = send.group.ranks;
      choice += before_chunk(send.routes, ranks, token, ranks + expert_of(choice)) << EXPERT_BITS;
    }
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

// What a block knows of what arrives.
struct Rows {
  Waiting waiting;
  u32 starts[UCCL_EP_MOST_RANKS + 1];
  u32 before[UCCL_EP_MOST_EXPERTS];      // by rank and local expert: tokens of earlier ranks that chose the expert
  u32 counts[UCCL_EP_MOST_EXPERTS];      // by local expert: tokens that chose it
  u32 firsts[UCCL_EP_MOST_EXPERTS + 1];  // by local expert: its first row, where rows are by expert
  u32 sums[UCCL_EP_THREADS];
};

// Counts the tokens that chose each of this rank's experts.
__device__ __forceinline__ void count_by_expert(const UcclEpGroup& g, u64 area_len, u32 local, Rows& s) {
  const UcclEpPlaced& call = s.waiting.call;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * local; i += blockDim.x) {
    u64 counts = g.windows[g.rank] + call.place + i / local * area_len;
    s.before[i] = is_masked(call, i / local) ? 0 : reinterpret_cast<const u32*>(counts)[i % local];
  }
  __syncthreads();
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < local; expert += blockDim.x) {
    u32 before = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) {
      u32 count = s.before[rank * local + expert];
      s.before[rank * local + expert] = before;
      before += count;
    }
    s.counts[expert] = before;
  }
  __syncthreads();
}

// Where the rows of experts begin.
__device__ __forceinline__ void place_experts(const UcclEpNormalReceive& p, Rows& s) {
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    s.firsts[expert] = (s.counts[expert] + p.alignment - 1) / p.alignment * p.alignment;
  }
  __syncthreads();
  scan(s.firsts, p.local_experts, s.sums);
}

// Waits for all ranks, and tells the host how much arrives. One block.
__device__ __forceinline__ void count(const UcclEpCount& p, Rows& s) {
  const UcclEpGroup& g = p.group;
  if (!begin_receive(g, p.call, 0, s.waiting)) return;
  if (!count_records(g, p.call, p.slots, s.waiting, s.starts)) return;
  count_by_expert(g, p.area_len, p.local_experts, s);
  UcclEpTold* told = reinterpret_cast<UcclEpTold*>(p.told);
  if (threadIdx.x < g.ranks) told->from[threadIdx.x] = s.starts[threadIdx.x + 1] - s.starts[threadIdx.x];
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    told->per_expert[expert] = s.counts[expert];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.told, p.ticket);
}

// Whether there is room for all rows, or tokens.
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
    reinterpret_cast<u32*>(p.per_expert)[expert] = s.counts[expert];
    if (p.ends != 0) reinterpret_cast<u32*>(p.ends)[expert] = s.firsts[expert] + s.counts[expert];
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

// A record that has arrived: from which rank, and how many came before it.
struct Arrival {
  u64 record;
  u32 from;
  u32 at;
};

// A lane's choice of a token's: which of this rank's experts it is, and its place among the sender's tokens; or NO_EXPERT.
struct Chosen {
  u32 local;
  u32 place;
};

__device__ __forceinline__ Chosen choice_here(const UcclEpNormalReceive& p, const Arrival& a) {
  u32 lane = lane_of_thread(), word = NO_EXPERT;
  if (lane < p.top_k) word = *reinterpret_cast<const u32*>(a.record + p.area.choices_at + 4ull * lane);
  u32 local = expert_of(word) - p.group.rank * p.local_experts;
  bool is_here = word != NO_EXPERT && local < p.local_experts;
  return {is_here ? local : NO_EXPERT, word >> EXPERT_BITS};
}

constexpr u32 NO_ROW = 0xffffffff;

// The row of a lane's choice, where rows are by expert; or NO_ROW.
__device__ __forceinline__ u32 row_of_choice(const UcclEpNormalReceive& p, const Rows& s, const Arrival& a) {
  Chosen chosen = choice_here(p, a);
  if (chosen.local == NO_EXPERT) return NO_ROW;
  u32 row = s.firsts[chosen.local] + s.before[a.from * p.local_experts + chosen.local] + chosen.place;
  // A peer whose counts are not those of its records gets no further than this.
  return row < p.len ? row : NO_ROW;
}

__device__ __forceinline__ float weight_of(const UcclEpNormalReceive& p, const Arrival& a) {
  return reinterpret_cast<const float*>(a.record + p.area.places_at)[lane_of_thread()];
}

// Tells where a token is from. One lane does it.
__device__ __forceinline__ u32 tell_origin(const UcclEpNormalReceive& p, const Arrival& a) {
  u32 word = *reinterpret_cast<const u32*>(a.record + p.area.token_at), token = word & ((1u << TOKEN_BITS) - 1);
  reinterpret_cast<u32*>(p.src_info)[a.at] = token;
  reinterpret_cast<u32*>(p.origin)[a.at] = a.from * ORIGIN_RANK + (word >> TOKEN_BITS);
  return token;
}

// What came with a token, whose row is its number. One warp does it.
__device__ __forceinline__ void take_choices(const UcclEpNormalReceive& p, const Arrival& a) {
  u32 lane = lane_of_thread();
  if (lane < p.top_k) {
    u64 at = static_cast<u64>(a.at) * p.top_k + lane;
    Chosen chosen = choice_here(p, a);
    bool is_here = chosen.local != NO_EXPERT;
    put_choice(p, at, is_here ? static_cast<int>(chosen.local) : -1);
    if (p.weights != 0) {
      reinterpret_cast<float*>(p.weights)[at] = is_here || p.zeroes_foreign == 0 ? weight_of(p, a) : 0.0f;
    }
  }
  if (lane == 0 && p.origin != 0) tell_origin(p, a);
}

// What came with a token, of which each lane's choice has a row. One warp does it.
__device__ __forceinline__ void take_choices_by_expert(const UcclEpNormalReceive& p, const Arrival& a, u32 row) {
  u32 lane = lane_of_thread(), here = __ballot_sync(ALL, row != NO_ROW);
  if (row != NO_ROW && p.weights != 0) reinterpret_cast<float*>(p.weights)[row] = weight_of(p, a);
  if (p.origin == 0) return;
  u32* told = reinterpret_cast<u32*>(p.metadata) + static_cast<u64>(a.at) * (2 + p.top_k);
  if (lane < p.top_k) told[2 + lane] = row;
  if (lane == 0) {
    told[0] = a.from * p.slots + tell_origin(p, a);
    told[1] = a.from * p.top_k + LANES - 1 - static_cast<u32>(__clz(static_cast<int>(here)));
  }
}

// Copies the scales of a record to its rows.
__device__ __forceinline__ void take_scales(const UcclEpNormalReceive& p, const Team& team, u64 record,
                                            const Targets& rows) {
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < p.area.scales; first += team.lanes()) {
    u32 word = first + lane_of_thread();
    bool is_inside = word < p.area.scales;
    u32 scale = is_inside ? *reinterpret_cast<const u32*>(record + p.area.scales_at + 4ull * word) : 0;
    for_each(rows, [&](u64 row) {
      if (is_inside) *reinterpret_cast<u32*>(row + 4 * (word * p.scales_word)) = scale;
    });
  }
}

// Copies a record to its row, or to those of its experts.
__device__ __forceinline__ void take_record(const UcclEpNormalReceive& p, const Rows& s, const Team& team, u32 at) {
  const UcclEpGroup& g = p.group;
  u32 from = sender_of(s.starts, g.ranks, at);
  u64 area = g.windows[g.rank] + s.waiting.call.place + from * p.area.len;
  Arrival a = {area + p.area.first + static_cast<u64>(at - s.starts[from]) * p.area.stride, from, at};
  bool by_expert = p.alignment != 0;
  u32 row = by_expert ? row_of_choice(p, s, a) : at;
  u32 has = by_expert ? __ballot_sync(ALL, row != NO_ROW) : 1;
  Targets to[1] = {{p.rows + row * p.row_stride, has}};
  copy_to_all(team, to, a.record, p.area.payload / 16);
  take_scales(p, team, a.record, {p.scales + 4 * (row * p.scales_row), has});
  if (team.warp != 0) return;
  if (by_expert) {
    take_choices_by_expert(p, a, row);
  } else {
    take_choices(p, a);
  }
}

// Sets a row to 0.
__device__ __forceinline__ void zero_row(const UcclEpNormalReceive& p, const Team& team, u32 row) {
#pragma unroll 1
  for (u32 at = team.lane(); at < p.area.payload / 16; at += team.lanes()) {
    store_vector(p.rows + row * p.row_stride + 16ull * at, {0, 0, 0, 0});
  }
  u32* scales = reinterpret_cast<u32*>(p.scales) + row * p.scales_row;
#pragma unroll 1
  for (u32 word = team.lane(); word < p.area.scales; word += team.lanes()) scales[word * p.scales_word] = 0;
  if (team.lane() == 0 && p.weights != 0) reinterpret_cast<float*>(p.weights)[row] = 0.0f;
}

// Sets rows to 0 that lie between those of experts. Teams take turns.
__device__ __forceinline__ void zero_gaps(const UcclEpNormalReceive& p, const Rows& s, const Team& team) {
  u32 turn = team.first;
#pragma unroll 1
  for (u32 expert = 0; expert < p.local_experts; expert++) {
    u32 first = s.firsts[expert] + s.counts[expert], end = min(s.firsts[expert + 1], p.len);
    u32 rows = max(first, end) - first;
#pragma unroll 1
    for (u32 nth = turn; nth < rows; nth += team.step) zero_row(p, team, first + nth);
    turn = (turn + team.step - rows % team.step) % team.step;
  }
}

__device__ __forceinline__ void normal_receive(const UcclEpNormalReceive& p, Rows& s) {
  const UcclEpGroup& g = p.group;
  if (!begin_receive(g, p.call, 0, s.waiting)) return;
  if (!count_records(g, p.call, p.slots, s.waiting, s.starts)) return;
  u32 total = s.starts[g.ranks], rows = total;
  bool by_expert = p.alignment != 0;
  if (by_expert || blockIdx.x == 0) count_by_expert(g, p.area.len, p.local_experts, s);
  if (by_expert) {
    place_experts(p, s);
    rows = s.firsts[p.local_experts - 1] + s.counts[p.local_experts - 1];
  }
  if (!has_room(g, p.call, rows, p.len, s.waiting)) return;
  if (!has_room(g, p.call, total, p.tokens, s.waiting)) return;
  tell_rows(p, s);
  Team team = team_for(total);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) take_record(p, s, team, at);
  if (p.zeroes_gaps != 0) zero_gaps(p, s, team);
  // Rows that nothing arrives for chose no expert.
#pragma unroll 1
  for (u32 row = total + blockIdx.x; row < p.len && p.choices != 0; row += gridDim.x) {
    if (threadIdx.x < p.top_k) put_choice(p, static_cast<u64>(row) * p.top_k + threadIdx.x, -1);
  }
  if (is_last_block(g, STEP_RECEIVE, s.waiting)) tell_taken(g, p.call, s.waiting);
}
