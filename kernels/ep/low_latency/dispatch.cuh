// Low latency dispatch: tokens go to the ranks of their experts.
#pragma once

#include "../chunks.cuh"
#include "handle.cuh"
#include "send.cuh"

// State of a block that receives.
struct ReceiveState {
  WaitState wait;
  u32 starts[STARTS];               // by rank: records before its first
  u32 begins[UCCL_EP_MAX_EXPERTS];  // by rank and local expert: the row of its first token
};

// Reads the ranks' counts by expert, which are there.
__device__ __forceinline__ void load_counts(const UcclEpLowLatencyReceive& p, ReceiveState& s) {
  const UcclEpGroup& g = p.group;
  u32 local = p.local_experts;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * local; i += blockDim.x) {
    u32 rank = i / local;
    u64 area = s.wait.call.staged + rank * p.area.len;
    s.begins[i] = is_masked(s.wait.call, rank) ? 0 : reinterpret_cast<const u32*>(area)[i % local];
  }
}

// Waits for the tagged words with the ranks' counts, each thread for those that it reads. The first
// block adds to `waits` as `wait_for_data` does. Headers take longer, and only the last block waits
// for them.
__device__ __forceinline__ bool wait_for_counts(const UcclEpLowLatencyReceive& p, ReceiveState& s) {
  const UcclEpGroup& g = p.group;
  WaitState& w = s.wait;
  if (is_spare_block() && !wait_for_data(g, p.call, 0, w)) return false;
  u32 local = p.local_experts, words = local + 1;
  u64 call = w.call.number;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * words; i += blockDim.x) {
    u32 rank = i / words, nth = i % words, count = 0;
    bool is_of_records = nth == local;
    if (!is_masked(w.call, rank)) {
      u64 word = tagged_words_of(g, w.call, g.rank, rank) + sizeof(u64) * nth, seen;
      bool is_timed = is_of_records && p.waits != 0 && blockIdx.x == 0 && load_relaxed(word) >> FLAG_CALL != call;
      u64 began = is_timed ? now_ns() : 0;
      if (wait_for_tagged_word(g, w, rank, word, seen)) count = value_of_tagged(seen);
      if (is_timed) reinterpret_cast<u64*>(p.waits)[rank] += since(began);
    }
    if (!is_of_records) {
      s.begins[rank * local + nth] = count;
      continue;
    }
    if (count > p.slots) set_excess_fault(p.call, w, rank, p.slots, count);
    s.starts[rank + 1] = count;
  }
  return add_starts(g, p.call, w, s.starts);
}

// Waits for the ranks' counts, which come with their headers.
__device__ __forceinline__ bool wait_for_headers(const UcclEpLowLatencyReceive& p, ReceiveState& s) {
  if (!wait_for_data(p.group, p.call, p.waits, s.wait, {p.area.len, p.local_experts})) return false;
  load_counts(p, s);
  return count_records(p.group, p.call, p.slots, s.wait, s.starts);
}

// Waits for the counts, and finds where each rank's rows begin. The first block writes the caller's
// tables.
__device__ __forceinline__ bool count_received(const UcclEpLowLatencyReceive& p, ReceiveState& s) {
  const UcclEpGroup& g = p.group;
  u32 local = p.local_experts;
  if (!(p.in_chunks != 0 ? wait_for_counts(p, s) : wait_for_headers(p, s))) return false;
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < local; expert += blockDim.x) {
    u32 begin = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) {
      u32 count = s.begins[rank * local + expert];
      s.begins[rank * local + expert] = begin;
      if (blockIdx.x == 0) {
        reinterpret_cast<u64*>(p.layout_range)[expert * g.ranks + rank] = static_cast<u64>(begin) << 32 | count;
      }
      begin += count;
    }
    if (blockIdx.x == 0) {
      reinterpret_cast<u32*>(p.count)[expert] = begin;
      if (p.stats != 0) reinterpret_cast<u32*>(p.stats)[expert] += begin;
    }
  }
  if (blockIdx.x == 0) for_starts(g.ranks, [&](u32 rank) { store_start(p.records, rank, s.starts[rank]); });
  __syncthreads();
  return true;
}

// Where a row's scales go.
struct ScalesPlace {
  u64 first;
  u64 stride;  // words from one scale word to the next
};

__device__ __forceinline__ ScalesPlace place_of_scales(const UcclEpLowLatencyReceive& p, u32 expert, u32 row) {
  if (p.tile_rows == 0) {
    return {p.scales + 4 * (row * p.scales_row + expert * p.scales_expert), p.scales_word};
  }
  // Tiles of 128 rows and a word; see ScalesOut::Tiled in dispatch/memory.rs.
  constexpr u32 TILE = 128;
  u32 nth = row - expert * p.expert_rows;
  u64 tile = (static_cast<u64>(expert) * p.tile_rows + nth / TILE) * p.area.scales;
  return {p.scales + 4 * (tile * TILE + nth % 32 * 4 + nth % TILE / 32), TILE};
}

// A word of a record's scales, or 0 behind the last.
__device__ __forceinline__ u32 scale_of_record(const UcclEpLowLatencyReceive& p, u64 record, u32 word) {
  return word < p.area.scales ? *reinterpret_cast<const u32*>(record + p.area.scales_at + 4ull * word) : 0;
}

// Copies a record to the rows of its experts. Loads that do not depend on these rows come first.
__device__ __forceinline__ void receive_record(const UcclEpLowLatencyReceive& p, const ReceiveState& s,
                                               const Team& team, u32 at) {
  const UcclEpGroup& g = p.group;
  u32 from = sender_of(s.starts, g.ranks, at), lane = lane_of_thread();
  u64 area = s.wait.call.staged + from * p.area.len;
  u64 record = area + p.area.first + static_cast<u64>(at - s.starts[from]) * p.area.stride;
  Slice slice = slice_of(team, p.area.payload / 16);
  Vector v[ROUND];
  load_vectors(v, record, slice.begin, slice.end);
  u32 scale = scale_of_record(p, record, team.lane());
  u32 token = *reinterpret_cast<const u32*>(record + p.area.token_at);
  // A lane has a choice, and its row if the expert is here.
  u32 expert = NO_EXPERT, row = 0;
  if (lane < p.top_k) {
    u32 choice = *reinterpret_cast<const u32*>(record + p.area.choices_at + 4ull * lane);
    u32 place = *reinterpret_cast<const u32*>(record + p.area.places_at + 4ull * lane);
    u32 local = choice - g.rank * p.local_experts;
    if (choice != NO_EXPERT && local < p.local_experts) {
      u32 nth = s.begins[from * p.local_experts + local] + place;
      // Bounds the rows of a peer with counts that contradict its records.
      if (nth < p.expert_rows) {
        expert = local;
        row = local * p.expert_rows + nth;
      }
    }
  }
  Targets rows = {p.rows + row * p.row_stride, __ballot_sync(ALL, expert != NO_EXPERT)};
#pragma unroll 1
  for (u32 first = slice.begin; first < slice.end;) {
    for_each(rows, [&](u64 to) { store_vectors(to, v, first, slice.end); });
    first += ROUND * LANES;
    load_vectors(v, record, first, slice.end);
  }
  ScalesPlace scales_of_row = place_of_scales(p, expert, row);
  Targets scales = {scales_of_row.first, rows.has};
#pragma unroll 1
  for (u32 word = team.lane(); word - lane < p.area.scales;) {
    for_each(scales, [&](u64 out) {
      if (word < p.area.scales) *reinterpret_cast<u32*>(out + 4 * (word * scales_of_row.stride)) = scale;
    });
    word += team.lanes();
    scale = scale_of_record(p, record, word);
  }
  if (team.warp != 0) return;
  if (expert != NO_EXPERT) reinterpret_cast<u32*>(p.src_info)[row] = token;
  store_record(p.records, p.top_k, at, token, expert != NO_EXPERT ? row : NO_ROW);
}

// Waits until a record is there, where records have flags. All lanes of a warp take part.
__device__ __forceinline__ bool wait_for_record(const UcclEpLowLatencyReceive& p, ReceiveState& s, u32 at) {
  const UcclEpGroup& g = p.group;
  if (p.in_chunks == 0) return true;
  u32 from = sender_of(s.starts, g.ranks, at);
  u64 flag = flags_of(g, s.wait.call, g.rank, from) + sizeof(u64) * (at - s.starts[from]), seen;
  return wait_for_flags(g, s.wait, lane_of_thread() == 0, from, flag, seen);
}

// The blocks that take out so many records. The first `senders` blocks send, and are late: they
// take none if each record can have a block without them. The last block waits for headers, and
// takes none if there are others.
__device__ __forceinline__ Share takers(const UcclEpLowLatencyReceive& p, u32 records, u32 senders) {
  u32 end = p.in_chunks != 0 && gridDim.x > 1 ? gridDim.x - 1 : gridDim.x,
      first = records + senders <= end ? senders : 0;
  return {block_number() - first, end - first};
}

// Takes out the records, in a block that has the counts. `acks_later`: whether the call is
// acknowledged when the next one begins.
__device__ __forceinline__ void take_records(const UcclEpLowLatencyReceive& p, u32 senders, bool acks_later,
                                             ReceiveState& s) {
  u32 total = s.starts[p.group.ranks];
  Share share = takers(p, total, senders);
  // A record may have more rows than a block writes at once. With windows in host memory, each
  // block fetches its records whole.
  Team team = team_for(total, share, p.group.via_host != 0 ? 1 : 2);
  fetch_records(p.group, s.wait.call, p.area, s.starts, team);
  u32 end = has_block(share) ? total : 0;
#pragma unroll 1
  for (u32 at = team.first; at < end && wait_for_record(p, s, at); at += team.step) receive_record(p, s, team, at);
  if (p.in_chunks != 0 && !is_sound(p.group, p.call, s.wait)) return;
  if (!acks_later && is_last_block(p.group, STEP_RECEIVE, s.wait)) set_taken(p.group, p.call, s.wait);
}

__device__ __forceinline__ void low_latency_receive(const UcclEpLowLatencyReceive& p, ReceiveState& s) {
  if (!begin_block(p.group, p.call, STEP_RECEIVE, s.wait)) return;
  if (count_received(p, s)) take_records(p, 0, false, s);
}
