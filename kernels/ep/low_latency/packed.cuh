// Combine with rows that are packed as LogFMT-10 in transit.
//
// A row has 256 bytes for each group of 128 values, and behind them the bounds of each group. Eight
// lanes share a group, with sixteen values each; word `w` of a lane is at `32 * w + 4 * lane`, so
// that the lanes' words fill a sector.
#pragma once

#include "combine.cuh"
#include "logfmt.cuh"

constexpr u32 GROUP_PLACE = 2 * GROUP;

// Packs a row and writes it to its destination.
__device__ __forceinline__ void send_packed(const Team& team, const RowCopy& row, u32 row_len) {
  u32 lane = lane_of_thread(), hidden = row_len / 2;
#pragma unroll 1
  for (u32 first = team.warp * WARP_CHANNELS; first < hidden; first += team.warps * WARP_CHANNELS) {
    u32 channel = first + lane * (GROUP / GROUP_LANES), group = channel / GROUP;
    // All lanes of a group are inside, or none is.
    bool is_inside = channel < hidden;
    Vector a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
    if (is_inside) {
      a = load_vector(row.from + 2ull * channel);
      b = load_vector(row.from + 2ull * channel + 16);
    }
    LaneValues values = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    u32 largest = 0, smallest = 0x7fff;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
      largest = max(largest, bf16_of(values, i) & 0x7fff);
      smallest = min(smallest, bf16_of(values, i) & 0x7fff);
    }
#pragma unroll
    for (u32 other = 1; other < GROUP_LANES; other *= 2) {
      largest = max(largest, __shfl_xor_sync(ALL, largest, static_cast<int>(other)));
      smallest = min(smallest, __shfl_xor_sync(ALL, smallest, static_cast<int>(other)));
    }
    if (!is_inside) continue;
    u64 place = row.to + group * GROUP_PLACE + 4 * (lane % GROUP_LANES);
    auto put = [&](u32 word, u32 bits) { *reinterpret_cast<u32*>(place + 32 * word) = bits; };
    if (is_packed(largest, smallest)) {
      pack(log_codes(largest, smallest), values, put);
    } else {
#pragma unroll
      for (u32 word = 0; word < 8; word++) put(word, values.words[word]);
    }
    if (lane % GROUP_LANES == 0) *reinterpret_cast<u32*>(row.to + row_len + 4 * group) = largest | smallest << 16;
  }
}

__device__ __forceinline__ void low_latency_return_packed(const UcclEpLowLatencyReturn& p, ReturnState& s) {
  send_rows(p, s, [&](const Team& team, const RowCopy& row) { send_packed(team, row, p.row_len); });
}

// Adds a lane's values of a row.
__device__ __forceinline__ void add_row(Sums (&sums)[2], u64 row, u32 row_len, u32 group, float weight) {
  u32 bounds = *reinterpret_cast<const u32*>(row + row_len + 4 * group);
  u64 place = row + group * GROUP_PLACE + 4 * (lane_of_thread() % GROUP_LANES);
  u32 largest = bounds & 0xffff, smallest = bounds >> 16;
  bool is_short = is_packed(largest, smallest);
  LaneValues in;
#pragma unroll
  for (u32 word = 0; word < 8; word++) {
    bool is_there = word < PACKED_WORDS || !is_short;
    in.words[word] = is_there ? *reinterpret_cast<const u32*>(place + 32 * word) : 0;
  }
  if (is_short) {
    add_packed(sums, log_codes(largest, smallest), in, weight);
  } else {
    add_plain(sums, in, weight);
  }
}

// Sums the rows of a token's choices.
__device__ __forceinline__ void sum_packed(const UcclEpLowLatencySum& p, const WaitState& w, const Team& team,
                                           u32 token) {
  Terms terms = in_order(terms_of(p, w, token));
  u32 lane = lane_of_thread(), hidden = p.row_len / 2, count = __popc(terms.has);
#pragma unroll 1
  for (u32 first = team.warp * WARP_CHANNELS; first < hidden; first += team.warps * WARP_CHANNELS) {
    u32 channel = first + lane * (GROUP / GROUP_LANES);
    Sums sums[2] = {}, partial[2] = {};
    auto end_partials = [&] {
#pragma unroll
      for (u32 i = 0; i < 2; i++) end_partial(sums[i], partial[i]);
    };
#pragma unroll 1
    for (u32 nth = 0; nth < count; nth++) {
      u64 row = __shfl_sync(ALL, terms.row, static_cast<int>(nth));
      float weight = __shfl_sync(ALL, terms.weight, static_cast<int>(nth));
      if ((terms.begins >> nth & 1) != 0) end_partials();
      if (channel < hidden) add_row(partial, row, p.row_len, channel / GROUP, weight);
    }
    end_partials();
    if (channel >= hidden) continue;
    u64 out = p.out + token * static_cast<u64>(p.row_len) + 2ull * channel;
    store_vector(out, rounded(sums[0]));
    store_vector(out + 16, rounded(sums[1]));
  }
}

// Several blocks share each of a few tokens, with neighbouring channels in different blocks: a
// multiprocessor takes longer to unpack a row than to load it.
__device__ __forceinline__ Team team_for_packed(u32 tokens) {
  u32 blocks = gridDim.x / max(tokens, 1u), block = block_number();
  if (blocks <= 1) return team_for(tokens);
  return {block / blocks, gridDim.x / blocks, warp_of_thread() * blocks + block % blocks, warps_of_block() * blocks};
}

__device__ __forceinline__ void low_latency_sum_packed(const UcclEpLowLatencySum& p, WaitState& w) {
  if (!begin_block(p.group, p.call, STEP_RECEIVE, w)) return;
  sum_tokens(p, w, team_for_packed(p.routes.tokens),
             [&](const Team& team, u32 token) { sum_packed(p, w, team, token); });
}
