// Low latency dispatch: tokens go to the ranks of their experts.
#pragma once

#include "../chunks.cuh"
#include "../numerics.cuh"
#include "../records.cuh"
#include "handle.cuh"
#include "small_batch.cuh"

// Lanes that share a group of 128 channels, with 16 each.
constexpr u32 GROUP_LANES = 8;
constexpr u32 GROUP = 128;
// Channels that share a scale in NVFP4.
constexpr u32 NARROW_GROUP = 16;
// Channels that a warp quantises at a time.
constexpr u32 WARP_CHANNELS = 512;

// Quantises a row once and writes it to each record.
__device__ __forceinline__ void send_quantised(const UcclEpSend& p, const Team& team, u64 row, const Targets (&to)[2]) {
  u32 lane = lane_of_thread();
#pragma unroll 1
  for (u32 first = team.warp * WARP_CHANNELS; first < p.area.payload; first += team.warps * WARP_CHANNELS) {
    u32 channel = first + lane * (GROUP / GROUP_LANES);
    bool is_inside = channel < p.area.payload;
    Vector a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
    if (is_inside) {
      a = load_vector(row + 2ull * channel);
      b = load_vector(row + 2ull * channel + 16);
    }
    u32 amax = amax_of(amax_of(0, a), b);
#pragma unroll
    for (u32 other = 1; other < GROUP_LANES; other *= 2) {
      amax = max(amax, __shfl_xor_sync(ALL, amax, static_cast<int>(other)));
    }
    Scale s = scale_of(amax, p.format != UCCL_EP_FORMAT_FP8);
    Vector out = {
        e4m3_pair(a.x, s.scale) | e4m3_pair(a.y, s.scale) << 16,
        e4m3_pair(a.z, s.scale) | e4m3_pair(a.w, s.scale) << 16,
        e4m3_pair(b.x, s.scale) | e4m3_pair(b.y, s.scale) << 16,
        e4m3_pair(b.z, s.scale) | e4m3_pair(b.w, s.scale) << 16,
    };
    u32 word = __float_as_uint(s.inverse);
    // The index of the group's scale; or, where four groups share a word, of the word.
    u32 word_at = channel / GROUP;
    bool has_word = is_inside && lane % GROUP_LANES == 0;
    if (p.format == UCCL_EP_FORMAT_FP8_EXPONENT) {
      u32 byte = word >> 23;
      u32 shared = 0;
#pragma unroll
      for (u32 i = 0; i < 4; i++) shared |= __shfl_sync(ALL, byte, static_cast<int>(i * GROUP_LANES)) << (8 * i);
      word = shared;
      word_at = first / WARP_CHANNELS;
      has_word = lane == 0;
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      for_each(to[half], [&](u64 record) {
        if (is_inside) store_vector(record + channel, out);
        if (has_word) {
          *reinterpret_cast<u32*>(record + p.area.scales_at + 4ull * word_at) = word;
        }
      });
    }
  }
}

// As `send_quantised`, to NVFP4: a lane's sixteen channels share a scale, and the scales of four
// lanes share a word.
__device__ __forceinline__ void send_nvfp4(const UcclEpSend& p, const Team& team, u64 row, const Targets (&to)[2]) {
  u32 lane = lane_of_thread(), hidden = 2 * p.area.payload;
  bool is_in_memory = p.global_scale_at != 0;
  float global_scale = is_in_memory ? *reinterpret_cast<const float*>(p.global_scale_at) : p.global_scale;
#pragma unroll 1
  for (u32 first = team.warp * WARP_CHANNELS; first < hidden; first += team.warps * WARP_CHANNELS) {
    u32 channel = first + lane * NARROW_GROUP;
    bool is_inside = channel < hidden;
    Vector a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
    if (is_inside) {
      a = load_vector(row + 2ull * channel);
      b = load_vector(row + 2ull * channel + 16);
    }
    NarrowScale s = narrow_scale_of(amax_of(amax_of(0, a), b), global_scale);
    u64 out = static_cast<u64>(e2m1_of(b, s.factor)) << 32 | e2m1_of(a, s.factor);
    u32 word = s.byte << (8 * (lane % 4));
    word |= __shfl_xor_sync(ALL, word, 1);
    word |= __shfl_xor_sync(ALL, word, 2);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      for_each(to[half], [&](u64 record) {
        if (!is_inside) return;
        *reinterpret_cast<u64*>(record + channel / 2) = out;
        if (lane % 4 == 0) {
          *reinterpret_cast<u32*>(record + p.area.scales_at + channel / NARROW_GROUP) = word;
        }
      });
    }
  }
}

// Sends a token's choices and their places among the tokens of their experts (a choice for each
// lane), and its number.
__device__ __forceinline__ void send_choices(const UcclEpSend& p, u32 token, u32 choice, u32 place,
                                             const Targets (&to)[2]) {
  u32 k = lane_of_thread();
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    for_each(to[half], [&](u64 record) {
      if (k < p.routes.top_k) {
        *reinterpret_cast<u32*>(record + p.area.choices_at + 4ull * k) = choice;
        *reinterpret_cast<u32*>(record + p.area.places_at + 4ull * k) = place;
      }
      if (k == 0) *reinterpret_cast<u32*>(record + p.area.token_at) = token;
    });
  }
}

// Sends each rank its counts as tagged words, where records have flags: the tokens of each of its
// experts, and its records. One block.
__device__ __forceinline__ void send_tagged_counts(const UcclEpSend& p, const PlacedCall& call, const u32* per_expert,
                                                   const u32* per_rank) {
  const UcclEpGroup& g = p.group;
  u32 local = p.routes.local_experts, words = local + 1;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * words; i += blockDim.x) {
    u32 to = i / words, nth = i % words;
    if (is_masked(call, to)) continue;
    u32 count = nth < local ? per_expert[to * local + nth] : per_rank[to];
    store_relaxed(tagged_words_of(g, call, to, g.rank) + sizeof(u64) * nth, tagged_word(call.number, count));
  }
}

__device__ __forceinline__ void send_token(const UcclEpSend& p, const Team& team, u32 token, const Targets (&to)[2]) {
  u64 row = p.rows + token * p.row_stride;
  if (p.format == UCCL_EP_FORMAT_BYTES) {
    copy_to_all<ROUND>(team, to, row, p.area.payload / 16);
  } else if (p.format == UCCL_EP_FORMAT_NVFP4) {
    send_nvfp4(p, team, row, to);
  } else {
    send_quantised(p, team, row, to);
  }
}

struct SendState {
  WaitState wait;
  TakenWords taken;
  SmallBatch small_batch;
};

// Sends tokens that an earlier launch has routed.
__device__ __forceinline__ void send_routed(const UcclEpSend& p, const PlacedCall& call) {
  if (is_spare_block()) send_routed_counts(p, call);
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) {
    Targets to[2];
    records_of(p, call, token, to);
    send_token(p, team, token, to);
    if (team.warp != 0) continue;
    u32 lane = lane_of_thread(),
        choice = lane < p.routes.top_k ? choice_sent(p.routes, p.group.ranks, token, lane) : NO_EXPERT;
    send_choices(p, token, expert_of(choice), place_of(choice), to);
  }
}

// Sets the flags of the records, if there are any, of a block's tokens, which the block has sent.
// One warp.
__device__ __forceinline__ void set_record_flags(const UcclEpSend& p, const PlacedCall& call,
                                                 const SmallBatch& small_batch, const BlockTokens& block_tokens) {
  const UcclEpGroup& g = p.group;
  u64 ranks[BLOCK_TOKENS] = {}, all = 0;
#pragma unroll
  for (u32 nth = 0; nth < BLOCK_TOKENS; nth++) {
    if (nth < block_tokens.count) ranks[nth] = small_batch.masks[block_tokens.token(nth)] & ~call.masked;
    all |= ranks[nth];
  }
  if (all == 0) return;
  __threadfence_system();
#pragma unroll
  for (u32 i = 0; i < 2 * BLOCK_TOKENS; i++) {
    u32 nth = i / 2, rank = i % 2 * LANES + lane_of_thread();
    if ((ranks[nth] >> rank & 1) == 0) continue;
    u64 flag = flags_of(g, call, rank, g.rank) + sizeof(u64) * small_batch.slots[nth][rank];
    store_relaxed(flag, chunk_flag(call.number, 0, 1));
  }
}

// Sets the flags of the tokens that the block has sent last. All its threads take part.
__device__ __forceinline__ void set_sent_flags(const UcclEpSend& p, const SendState& s,
                                               const BlockTokens& block_tokens) {
  if (p.in_chunks == 0 || block_tokens.count == 0) return;
  __syncthreads();
  if (warp_of_thread() == 0) set_record_flags(p, s.wait.call, s.small_batch, block_tokens);
}

// Sends one of the block's tokens.
__device__ __forceinline__ void send_block_tokens(const UcclEpSend& p, const SendState& s,
                                                  const BlockTokens& block_tokens) {
  u32 warps = warps_of_block() / block_tokens.count, nth = warp_of_thread() / warps, token = block_tokens.token(nth);
  Team team = {0, 0, warp_of_thread() % warps, warps};
  u64 mask = s.small_batch.masks[token];
  Targets to[2];
  records_at(p, s.wait.call, to,
             [&](u32 rank) { return mask >> rank & 1 ? static_cast<int>(s.small_batch.slots[nth][rank]) : -1; });
  send_token(p, team, token, to);
  if (team.warp != 0) return;
  u32 k = lane_of_thread(), choice = k < p.routes.top_k ? s.small_batch.choices[token * p.routes.top_k + k] : NO_CHOICE;
  bool is_expert = choice < INVALID_CHOICE;
  send_choices(p, token, is_expert ? expert_of_choice(choice) : NO_EXPERT,
               is_expert ? s.small_batch.places[nth][k] : NO_EXPERT, to);
}

// Sends a small number of tokens: a block has one or two at a time. The flags of its `last` tokens
// are not set yet. Returns false after a fault, such as an invalid choice.
__device__ __forceinline__ bool send_small_batch(const UcclEpSend& p, SendState& s, BlockTokens& last) {
  const PlacedCall& call = s.wait.call;
  if (is_spare_block()) {
    count_all(p.routes, p.group.ranks, s.small_batch);
    if (p.in_chunks == 0) {
      send_counts(p, call, s.small_batch.per_expert, s.small_batch.per_rank);
    } else {
      send_tagged_counts(p, call, s.small_batch.per_expert, s.small_batch.per_rank);
      write_headers(p.group, p.call, call, nullptr);
      set_arrived(p.group, p.call, s.wait);
    }
  }
#pragma unroll 1
  for (u32 first = block_number(); first < p.routes.tokens; first += BLOCK_TOKENS * gridDim.x) {
    set_sent_flags(p, s, last);
    last = block_tokens_at(p.routes, first);
    if (!place_tokens(p, last, s.small_batch, s.wait)) return false;
    send_block_tokens(p, s, last);
  }
  return true;
}

__device__ __forceinline__ void low_latency_send(const UcclEpSend& p, SendState& s) {
  if (p.is_small_batch != 0) load_choices(p.routes, p.group.ranks, s.small_batch);
  bool in_chunks = p.in_chunks != 0;
  if (in_chunks ? !begin_at_once(p.group, p.call, false, s.wait, s.taken) : !begin_send(p.group, p.call, s.wait))
    return;
  if (p.is_small_batch == 0) {
    send_routed(p, s.wait.call);
  } else {
    BlockTokens last = {0, 0};
    if (!send_small_batch(p, s, last)) return;
    set_sent_flags(p, s, last);
  }
  if (!in_chunks) end_send(p.group, p.call, s.wait, [&] { send_areas(p, s.wait); });
}

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
  if (blockIdx.x == 0 && threadIdx.x <= g.ranks) store_start(p.records, threadIdx.x, s.starts[threadIdx.x]);
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

struct DispatchState {
  SendState send;
  ReceiveState receive;
};

// Sends a small batch and receives in one launch, record by record.
__device__ __forceinline__ void low_latency_dispatch(const UcclEpLowLatencyDispatch& p, DispatchState& s) {
  const UcclEpSend& send = p.send;
  BlockTokens last = {0, 0};
  load_choices(send.routes, send.group.ranks, s.send.small_batch);
  if (!begin_at_once(send.group, send.call, true, s.send.wait, s.send.taken)) return;
  if (!send_small_batch(send, s.send, last)) return;
  // If more than half of the blocks send, a block reads the counts while its rows are on their way:
  // a fence ends no sooner if it begins earlier. Fewer rows arrive at once, and other blocks wait
  // for them.
  bool flags_late = 2 * send.routes.tokens > gridDim.x;
  if (!flags_late) set_sent_flags(send, s.send, last);
  pass_state(send.group, s.send.wait, s.receive.wait);
  if (!count_received(p.receive, s.receive)) return;
  if (flags_late) set_sent_flags(send, s.send, last);
  take_records(p.receive, send.routes.tokens, true, s.receive);
}
