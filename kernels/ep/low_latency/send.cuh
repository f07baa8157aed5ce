// The send of a low latency dispatch: tokens, quantised on the way, go to the ranks of their experts.
#pragma once

#include "../numerics.cuh"
#include "../records.cuh"

// Lanes that share a group of 128 channels, with 16 each.
constexpr u32 GROUP_LANES = 8;
constexpr u32 GROUP = 128;
// Channels that share a scale in NVFP4.
constexpr u32 NARROW_GROUP = 16;
// Channels that a warp quantises at a time.
constexpr u32 WARP_CHANNELS = 512;

// Quantises a row once and writes it to each record.
__device__ __forceinline__ void send_quantised(const UcclEpSend& p, const Team& team, u64 row,
                                               const Targets (&to)[TARGET_SETS]) {
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
    for (u32 set = 0; set < TARGET_SETS; set++) {
      for_each(to[set], [&](u64 record) {
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
__device__ __forceinline__ void send_nvfp4(const UcclEpSend& p, const Team& team, u64 row,
                                           const Targets (&to)[TARGET_SETS]) {
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
    for (u32 set = 0; set < TARGET_SETS; set++) {
      for_each(to[set], [&](u64 record) {
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
                                             const Targets (&to)[TARGET_SETS]) {
  u32 k = lane_of_thread();
#pragma unroll
  for (u32 set = 0; set < TARGET_SETS; set++) {
    for_each(to[set], [&](u64 record) {
      if (k < p.routes.top_k) {
        *reinterpret_cast<u32*>(record + p.area.choices_at + 4ull * k) = choice;
        *reinterpret_cast<u32*>(record + p.area.places_at + 4ull * k) = place;
      }
      if (k == 0) *reinterpret_cast<u32*>(record + p.area.token_at) = token;
    });
  }
}

__device__ __forceinline__ void send_token(const UcclEpSend& p, const Team& team, u32 token,
                                           const Targets (&to)[TARGET_SETS]) {
  u64 row = p.rows + token * p.row_stride;
  if (p.format == UCCL_EP_FORMAT_BYTES) {
    copy_to_all<ROUND>(team, to, row, p.area.payload / 16);
  } else if (p.format == UCCL_EP_FORMAT_NVFP4) {
    send_nvfp4(p, team, row, to);
  } else {
    send_quantised(p, team, row, to);
  }
}

// Sends tokens that an earlier launch has routed.
__device__ __forceinline__ void send_routed(const UcclEpSend& p, const PlacedCall& call) {
  if (is_spare_block()) send_routed_counts(p, call);
  Team team = team_for(p.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < p.routes.tokens; token += team.step) {
    // A token of low latency mode has no more ranks than choices: the lanes have all at once.
    Targets to[TARGET_SETS];
    records_of(p, call, token, 0, to);
    send_token(p, team, token, to);
    if (team.warp != 0) continue;
    u32 lane = lane_of_thread(),
        choice = lane < p.routes.top_k ? choice_sent(p.routes, p.group.ranks, token, lane) : NO_EXPERT;
    send_choices(p, token, expert_of(choice), place_of(choice), to);
  }
}

// The send of a call whose records have no flags, and whose tokens an earlier launch has routed.
__device__ __forceinline__ void send_all_routed(const UcclEpSend& p, WaitState& w) {
  if (!begin_send(p.group, p.call, w)) return;
  send_routed(p, w.call);
  end_send(p.group, p.call, w, [&] { send_areas(p, w); });
}
