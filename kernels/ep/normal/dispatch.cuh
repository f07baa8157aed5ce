// Normal-mode dispatch: a token goes once to each rank that has one of its experts.
#pragma once

#include "../chunks.cuh"
#include "../records.cuh"
#include "../scan.cuh"
#include "idle.cuh"

// A record's last word is the token's number, of TOKEN_BITS, and the receiver's index among the
// token's ranks: the slot of the row that comes back.

// A record's last word: the token's number, and the number of its ranks before the record's.
__device__ __forceinline__ u32 token_sent(u32 token, u32 ranks_before) { return ranks_before << TOKEN_BITS | token; }

// The number of words that go with a token, one behind the other: its choices with their places,
// their weights, and the last word.
__device__ __forceinline__ u32 words_with(u32 top_k) { return 2 * top_k + 1; }

// A token of this rank, in the caller's memory.
struct OwnToken {
  const UcclEpNormalSend& p;
  u32 number;

  __device__ __forceinline__ bool is_zero_copy() const { return false; }
  __device__ __forceinline__ u64 row() const { return p.send.rows + number * p.send.row_stride; }
  __device__ __forceinline__ u32 scale(u32 word) const {
    return reinterpret_cast<const u32*>(p.scales)[number * p.scales_token + word * p.scales_word];
  }
  __device__ __forceinline__ RanksOfToken ranks() const { return ranks_of_token(p.send.routes.masks, number); }
  // The `nth` word that goes with it.
  __device__ __forceinline__ u32 word(u32 nth) const {
    const UcclEpRoutes& r = p.send.routes;
    if (nth < r.top_k) return choice_sent(r, p.send.group.ranks, number, nth);
    if (nth == 2 * r.top_k) return token_sent(number, ranks().before(p.send.group.rank));
    if (p.weights == 0) return __float_as_uint(0.0f);
    return reinterpret_cast<const u32*>(p.weights)[static_cast<u64>(number) * r.top_k + nth - r.top_k];
  }
};

// Data that goes with a row, loaded while the row's first vectors are in flight: a lane's first
// scales, and its first word.
struct TokenExtras {
  static constexpr u32 SCALES = 2;

  u32 scales[SCALES];
  u32 word;
};

template <typename Token>
__device__ __forceinline__ TokenExtras load_extras(const Token& token, const Team& team, u32 scales, u32 top_k) {
  TokenExtras extras;
#pragma unroll
  for (u32 nth = 0; nth < TokenExtras::SCALES; nth++) {
    u32 word = team.lane() + nth * team.lanes();
    extras.scales[nth] = word < scales ? token.scale(word) : 0;
  }
  extras.word = lane_of_thread() < words_with(top_k) ? token.word(lane_of_thread()) : 0;
  return extras;
}

// Stores a row's `count` scales by `store(word, scale)`, which is also called for words behind the
// last.
template <typename Token, typename Store>
__device__ __forceinline__ void store_scales(const Token& token, const TokenExtras& extras, const Team& team, u32 count,
                                             Store store) {
  u32 nth = 0;
#pragma unroll 1
  for (u32 first = team.warp * LANES; first < count; first += team.lanes(), nth++) {
    u32 word = first + lane_of_thread(), scale = nth == 0 ? extras.scales[0] : extras.scales[1];
    if (nth >= TokenExtras::SCALES && word < count) scale = token.scale(word);
    store(word, scale);
  }
}

// The `nth` word that goes with a token. All lanes take part.
template <typename Token>
__device__ __forceinline__ u32 word_with(const Token& token, const TokenExtras& extras, u32 nth, u32 top_k) {
  u32 word = __shfl_sync(ALL, extras.word, static_cast<int>(nth % LANES));
  return nth >= LANES && nth < words_with(top_k) ? token.word(nth) : word;
}

// Stores the words that go with a token, to a part of its ranks. One warp.
__device__ __forceinline__ void send_words(const OwnToken& token, const TokenExtras& extras, const RanksOfToken& ranks,
                                           u32 part, const Targets (&to)[TARGET_SETS]) {
  const UcclEpSend& send = token.p.send;
  u32 top_k = send.routes.top_k, count = words_with(top_k);
#pragma unroll 1
  for (u32 first = 0; first < count; first += LANES) {
    u32 nth = first + lane_of_thread(), word = word_with(token, extras, nth, top_k);
#pragma unroll
    for (u32 set = 0; set < TARGET_SETS; set++) {
#pragma unroll 1
      for (u32 left = to[set].has; left != 0; left &= left - 1) {
        int lane = __ffs(static_cast<int>(left)) - 1;
        u64 record = __shfl_sync(ALL, to[set].mine, lane);
        // The last word is another for each receiver.
        if (nth + 1 == count) word = token_sent(token.number, ranks.before_lane(part, set, static_cast<u32>(lane)));
        if (nth < count) *reinterpret_cast<u32*>(record + send.area.choices_at + 4ull * nth) = word;
      }
    }
  }
}

// Writes a token to its records at a part of its ranks, without that at `left_out`.
__device__ __forceinline__ void send_records(const UcclEpNormalSend& p, const PlacedCall& call, const Team& team,
                                             const OwnToken& token, u32 part, u32 left_out) {
  const UcclEpArea& area = p.send.area;
  Targets to[TARGET_SETS];
  TokenExtras extras;
  RanksOfToken ranks;
  copy_to_all<LONG_ROUND>(team, to, token.row(), area.payload / 16, [&] {
    records_of(p.send, call, token.number, part, to, left_out);
    extras = load_extras(token, team, area.scales, p.send.routes.top_k);
    ranks = token.ranks();
  });
  store_scales(token, extras, team, area.scales, [&](u32 word, u32 scale) {
#pragma unroll
    for (u32 set = 0; set < TARGET_SETS; set++) {
      for_each(to[set], [&](u64 record) {
        if (word < area.scales) *reinterpret_cast<u32*>(record + area.scales_at + 4ull * word) = scale;
      });
    }
  });
  if (team.warp == 0) send_words(token, extras, ranks, part, to);
}

// Writes a token to its records, without that at `left_out`.
__device__ __forceinline__ void send_record(const UcclEpNormalSend& p, const PlacedCall& call, const Team& team,
                                            u32 number, u32 left_out = NO_RANK) {
  OwnToken token = {p, number};
  if constexpr (IS_WIDE) {
    u32 parts = token.ranks().parts();
#pragma unroll 1
    for (u32 part = 0; part < parts; part++) send_records(p, call, team, token, part, left_out);
  } else {
    send_records(p, call, team, token, 0, left_out);
  }
}

// Whether a round has no tokens of this rank.
__device__ __forceinline__ bool is_empty_round(const UcclEpNormalSend& p) {
  return p.round_tokens != 0 && p.send.routes.tokens == 0;
}

__device__ __forceinline__ void normal_send(const UcclEpNormalSend& p, WaitState& w) {
  const UcclEpSend& send = p.send;
  if (!begin_block(send.group, send.call, STEP_SEND, w)) return;
  if (is_silent(p.round_tokens, send.group, send.routes.tokens)) {
    if (is_last_block(send.group, STEP_SEND, w)) take_place(send.group, send.call, w.call);
    return;
  }
  if (!wait_for_room(send.group, send.call, w)) return;
  bool is_empty = is_empty_round(p);
  if (is_empty) leave_knowing(p.round_tokens, send.group, w);
  if (is_spare_sender()) send_routed_counts(send, w.call, is_empty);
  Team team = team_for(send.routes.tokens);
#pragma unroll 1
  for (u32 token = team.first; token < send.routes.tokens; token += team.step) {
    send_record(p, w.call, team, token);
  }
  end_send(send.group, send.call, w, [&] { send_areas(send, w); });
}

// A rank's flag for the tokens of a chunk, or for a piece of them.
__device__ __forceinline__ ReadyFlag flag_for(const UcclEpSend& p, const PlacedCall& call, u32 flag, u32 rank,
                                              const Chunk& chunk) {
  const UcclEpGroup& g = p.group;
  if (rank == g.rank || is_masked(call, rank)) return {0, 0};
  u32 first = 0, count = 0;
#pragma unroll 1
  for (u32 token = chunk.begin; token < chunk.end; token++) {
    int place = slot_at(p.routes, g.ranks, token, rank).place();
    if (place < 0) continue;
    if (count == 0) first = static_cast<u32>(place);
    count++;
  }
  return {flags_of(g, call, rank, g.rank) + sizeof(u64) * flag, chunk_flag(call.number, first, count)};
}

// Sends other ranks their tokens, chunk by chunk.
__device__ __forceinline__ void send_tokens(const UcclEpNormalSend& p, const PlacedCall& call, const Share& share,
                                            FlagQueue& out) {
  const UcclEpSend& send = p.send;
  const UcclEpGroup& g = send.group;
  Chunking chunking = chunking_of(send.routes.tokens);
  send_chunks(out, chunking.flags, share, [&](u32 flag, u32 nth) {
    Chunk chunk = chunk_of(chunking, flag, send.routes.tokens);
#pragma unroll 1
    for (u32 token = chunk.begin; token < chunk.end; token++) {
      // This rank takes its own tokens from the caller's memory.
      send_record(p, call, chunk.team, token, g.rank);
    }
    hand_over_flags(out, nth, g.ranks, [&](u32 rank) { return flag_for(send, call, flag, rank, chunk); });
  });
}

// More tokens than any rank has: where the host decides on rounds.
constexpr u32 ANY_TOKENS = 0xffffffff;

// The most experts of a rank: a wide group has more ranks than fit into a word.
constexpr u32 MAX_LOCAL_EXPERTS = IS_WIDE ? UCCL_EP_MAX_EXPERTS / (UCCL_EP_NARROW_RANKS + 1) : UCCL_EP_MAX_EXPERTS;
// In a round there is a first row for each rank.
constexpr u32 MAX_FIRSTS = (MAX_LOCAL_EXPERTS > RANKS ? MAX_LOCAL_EXPERTS : RANKS) + 1;

// State of a block that receives.
struct NormalReceiveState {
  WaitState wait;
  u32 starts[RANKS + 1];
  u32 before[UCCL_EP_MAX_EXPERTS];  // by rank and local expert: tokens of earlier ranks that chose the expert
  u32 counts[MAX_LOCAL_EXPERTS];    // by local expert: tokens that chose it
  u32 firsts[MAX_FIRSTS];           // by local expert: its first row, where rows are by expert
  u32 tokens[RANKS];                // of each rank, for all receivers
  u32 flags;                        // of all ranks, counting for each as many as the rank with the most tokens has
  u32 sums[UCCL_EP_THREADS];
};

// Counts the tokens that chose each of this rank's experts.
__device__ __forceinline__ void count_by_expert(const UcclEpGroup& g, u64 area_len, u32 local, NormalReceiveState& s) {
  const PlacedCall& call = s.wait.call;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * local; i += blockDim.x) {
    u64 counts = s.wait.call.staged + i / local * area_len;
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

// Finds the first row of each expert.
__device__ __forceinline__ void place_experts(const UcclEpNormalReceive& p, NormalReceiveState& s) {
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    s.firsts[expert] = (s.counts[expert] + p.alignment - 1) / p.alignment * p.alignment;
  }
  __syncthreads();
  scan(s.firsts, p.local_experts, s.sums);
}

// Sends far ranks their counts, without records. One block.
__device__ __forceinline__ void send_counts_far(const UcclEpSend& p, WaitState& w) {
  const UcclEpGroup& g = p.group;
  u32 rank = threadIdx.x;
  __threadfence_system();
  if (rank - lane_of_thread() >= g.ranks) return;
  bool has = rank < g.ranks && is_far(g, rank) && !is_masked(w.call, rank);
  send_far(g, w, has, rank, has ? window_of(g, rank) + w.call.place + g.rank * p.area.len : 0, p.area.first);
}

// Sends a call's counts once the call has room; a later launch sends its rows. One block.
__device__ __forceinline__ bool send_only_counts(const UcclEpSend& p, WaitState& w) {
  if (!wait_for_room(p.group, p.call, w)) return false;
  send_routed_counts(p, w.call);
  take_place(p.group, p.call, w.call);
  if (has_far(p.group)) send_counts_far(p, w);
  set_arrived(p.group, p.call, w);
  return true;
}

// Sets a fault: a rank has more tokens than any may have. One thread.
UCCL_COLD void set_tokens_fault(const UcclEpCall& c, WaitState& w, u32 rank, u64 most, u64 tokens) {
  w.expected[rank] = most;
  w.seen[rank] = tokens;
  set_fault(w, UCCL_EP_DISAGREE, c.agreed + 1, rank);
}

// As `count_records`; sets a fault if a rank has more tokens than any may have.
__device__ __forceinline__ bool count_received(const UcclEpGroup& g, const UcclEpCall& c, u32 most, WaitState& w,
                                               u32* starts) {
  u32 rank = threadIdx.x;
  if (rank < g.ranks && !is_masked(w.call, rank) && w.extras[1][rank] > most)
    set_tokens_fault(c, w, rank, most, w.extras[1][rank]);
  return count_records(g, c, most, w, starts);
}

// The most tokens of any rank. The block has the headers.
__device__ __forceinline__ u32 most_tokens(const UcclEpGroup& g, const WaitState& w) {
  u64 most = 0;
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) {
    if (!is_masked(w.call, rank)) most = max(most, w.extras[1][rank]);
  }
  return static_cast<u32>(min(most, static_cast<u64>(ANY_TOKENS)));
}

// Writes the receive counts to the host's mailbox, whether this launch takes the rows out, and the
// most tokens of any rank. One block.
__device__ __forceinline__ void write_mailbox(const UcclEpGroup& g, u32 local, const NormalReceiveState& s, u64 to,
                                              u64 ticket, bool is_taken, u32 most) {
  UcclEpHostMailbox* mailbox = reinterpret_cast<UcclEpHostMailbox*>(to);
  if (threadIdx.x < g.ranks) mailbox->from[threadIdx.x] = s.starts[threadIdx.x + 1] - s.starts[threadIdx.x];
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < local; expert += blockDim.x) mailbox->per_expert[expert] = s.counts[expert];
  if (threadIdx.x == 0) mailbox->is_taken = is_taken;
  if (threadIdx.x == 0) mailbox->most_tokens = most;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release(to, ticket);
}

// Waits for all ranks, and writes the receive counts to the host's mailbox. One block.
__device__ __forceinline__ void normal_count(const UcclEpNormalCount& p, NormalReceiveState& s) {
  const UcclEpSend& send = p.send;
  const UcclEpGroup& g = send.group;
  u32 local = send.routes.local_experts;
  if (!begin_block(g, send.call, p.begins != 0 ? STEP_SEND : STEP_RECEIVE, s.wait)) return;
  if (p.begins != 0 && !send_only_counts(send, s.wait)) return;
  if (!wait_for_data(g, send.call, 0, s.wait, {send.area.len, local})) return;
  if (!count_received(g, send.call, ANY_TOKENS, s.wait, s.starts)) return;
  count_by_expert(g, send.area.len, local, s);
  write_mailbox(g, local, s, p.mailbox, p.ticket, false, most_tokens(g, s.wait));
}

// Whether all rows, or tokens, fit; else sets a fault.
__device__ __forceinline__ bool has_room(const UcclEpGroup& g, const UcclEpCall& c, u32 rows, u32 len, WaitState& w) {
  if (threadIdx.x == 0 && rows > len) {
    w.expected[g.rank] = rows;
    w.seen[g.rank] = len;
    set_fault(w, UCCL_EP_NO_ROOM, 0, g.rank);
  }
  return is_sound(g, c, w);
}

// In the first block: writes the received counts to the caller's tables.
__device__ __forceinline__ void write_tables(const UcclEpNormalReceive& p, const NormalReceiveState& s) {
  const UcclEpGroup& g = p.group;
  if (blockIdx.x != 0 || p.origin == 0) return;
  for_starts(g.ranks, [&](u32 rank) { reinterpret_cast<u32*>(p.starts)[rank] = s.starts[rank]; });
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

// The first row of a rank's tokens.
__device__ __forceinline__ u32 first_row(u32 spread, const u32* starts, u32 rank) {
  return spread != 0 ? rank * spread : starts[rank];
}

// Where the tokens of a call go that has one round. A call of several has another such type: see
// rounds.cuh.
struct OneRound {
  // The first row of a rank's tokens.
  __device__ __forceinline__ u32 first_of(const UcclEpNormalReceive& p, const NormalReceiveState& s, u32 rank) const {
    return first_row(p.spread, s.starts, rank);
  }
  // The row of a rank's first token for an expert.
  __device__ __forceinline__ u32 first_of_expert(const UcclEpNormalReceive& p, const NormalReceiveState& s, u32 rank,
                                                 u32 local) const {
    return s.firsts[local] + s.before[rank * p.local_experts + local];
  }
  // The number at its rank of the `nth` token that the rank has sent.
  __device__ __forceinline__ u32 token(u32 nth) const { return nth; }
  // The most tokens of any rank in the call.
  __device__ __forceinline__ u32 most(const UcclEpNormalReceive& p) const { return p.slots; }
};

// A received token: a record in this rank's window.
struct Record {
  const UcclEpNormalReceive& p;
  u64 address;

  // Whether the caller reads the row here, without a copy.
  __device__ __forceinline__ bool is_zero_copy() const { return p.call.zero_copy != 0; }

  __device__ __forceinline__ u64 row() const { return address; }
  __device__ __forceinline__ u32 scale(u32 word) const { return word_at(p.area.scales_at + 4ull * word); }
  // The `nth` word that came with it.
  __device__ __forceinline__ u32 word(u32 nth) const { return word_at(p.area.choices_at + 4ull * nth); }
  __device__ __forceinline__ u32 word_at(u64 offset) const { return *reinterpret_cast<const u32*>(address + offset); }
};

// A received token: its sender, and its index.
struct Arrival {
  u32 from;
  u32 at;
};

// A choice of a received token: the local expert, and the token's place among the sender's tokens
// for it; or NO_EXPERT.
struct LocalChoice {
  u32 local;
  u32 place;
};

__device__ __forceinline__ LocalChoice choice_here(const UcclEpNormalReceive& p, u32 choice) {
  u32 local = expert_of(choice) - p.group.rank * p.local_experts;
  bool is_here = choice != NO_EXPERT && local < p.local_experts;
  return {is_here ? local : NO_EXPERT, place_of(choice)};
}

// The row of a lane's choice, where rows are by expert; or NO_ROW.
template <typename Rows>
__device__ __forceinline__ u32 row_of_choice(const UcclEpNormalReceive& p, const NormalReceiveState& s,
                                             const Rows& rows, u32 from, u32 choice) {
  LocalChoice local_choice = choice_here(p, choice);
  if (local_choice.local == NO_EXPERT) return NO_ROW;
  u32 row = rows.first_of_expert(p, s, from, local_choice.local) + local_choice.place;
  // Bounds the rows of a peer with counts that contradict its records.
  return row < p.len ? row : NO_ROW;
}

// Stores the origin of a token, from `sent`, its record's last word. Returns its number. One lane.
template <typename Rows>
__device__ __forceinline__ u32 store_origin(const UcclEpNormalReceive& p, const Rows& rows, const Arrival& a,
                                            u32 sent) {
  u32 token = rows.token(sent & ((1u << TOKEN_BITS) - 1));
  reinterpret_cast<u32*>(p.src_info)[a.at] = token;
  reinterpret_cast<u32*>(p.origin)[a.at] = a.from * UCCL_EP_ORIGIN_RANK + (sent >> TOKEN_BITS);
  return token;
}

// Per-lane metadata of a received token: a choice and its weight, and the record's last word.
struct TokenMetadata {
  u32 choice;
  float weight;
  u32 sent;
};

// Stores the choices and weights of a token that has its index for a row. One warp.
template <typename Rows>
__device__ __forceinline__ void take_choices(const UcclEpNormalReceive& p, const Rows& rows,
                                             const TokenMetadata& metadata, const Arrival& a) {
  u32 lane = lane_of_thread();
  if (lane < p.top_k) {
    u64 at = static_cast<u64>(a.at) * p.top_k + lane;
    LocalChoice local_choice = choice_here(p, metadata.choice);
    bool is_here = local_choice.local != NO_EXPERT;
    put_choice(p, at, is_here ? static_cast<int>(local_choice.local) : -1);
    if (p.weights != 0) {
      reinterpret_cast<float*>(p.weights)[at] = is_here || p.zero_foreign_weights == 0 ? metadata.weight : 0.0f;
    }
  }
  if (lane == 0 && p.origin != 0) store_origin(p, rows, a, metadata.sent);
}

// Stores the weight of each row. Lanes in `repeated` repeat an expert, and add their weights to its
// row, one after the other. All lanes of a warp take part.
__device__ __forceinline__ void put_weights(float* weights, float weight, u32 row, u32 repeated) {
  u32 lane = lane_of_thread();
  if (weights == nullptr) return;
  if (row != NO_ROW && (repeated >> lane & 1) == 0) weights[row] = weight;
#pragma unroll 1
  for (u32 left = repeated; left != 0; left &= left - 1) {
    __syncwarp();
    if ((left & (0u - left)) == 1u << lane) weights[row] = __fadd_rn(weights[row], weight);
  }
}

// Stores the weights and metadata of a token with a row for each choice. A choice that repeats an
// expert has none. One warp.
template <typename Rows>
__device__ __forceinline__ void take_choices_by_expert(const UcclEpNormalReceive& p, const Rows& rows,
                                                       const TokenMetadata& metadata, const Arrival& a, u32 row) {
  u32 lane = lane_of_thread(), here = __ballot_sync(ALL, row != NO_ROW), same = __match_any_sync(ALL, row);
  bool is_repeated = row != NO_ROW && (same & lanes_before()) != 0;
  put_weights(reinterpret_cast<float*>(p.weights), metadata.weight, row, __ballot_sync(ALL, is_repeated));
  if (is_repeated) row = NO_ROW;
  if (p.origin == 0) return;
  u32* entry = reinterpret_cast<u32*>(p.metadata) + static_cast<u64>(a.at) * (2 + p.top_k);
  if (lane < p.top_k) entry[2 + lane] = row;
  if (lane == 0) {
    entry[0] = a.from * rows.most(p) + store_origin(p, rows, a, metadata.sent);
    entry[1] = a.from * p.top_k + LANES - 1 - static_cast<u32>(__clz(static_cast<int>(here)));
  }
}

// Copies a token to its row, or to the rows of its experts.
template <typename Rows, typename Token>
__device__ __forceinline__ void take(const UcclEpNormalReceive& p, const NormalReceiveState& s, const Rows& rows,
                                     const Team& team, const Token& token, const Arrival& a) {
  bool by_expert = p.alignment != 0;
  u32 lane = lane_of_thread(), row = a.at;
  Targets to[1] = {{0, 1}};
  TokenExtras extras;
  auto find_out = [&] {
    extras = load_extras(token, team, p.area.scales, p.top_k);
    if (by_expert) {
      row = row_of_choice(p, s, rows, a.from, lane < p.top_k ? extras.word : NO_EXPERT);
      to[0].has = __ballot_sync(ALL, row != NO_ROW);
    }
    to[0].mine = p.rows + row * p.row_stride;
  };
  if (token.is_zero_copy()) {
    find_out();
  } else {
    copy_to_all<LONG_ROUND>(team, to, token.row(), p.area.payload / 16, find_out);
    store_scales(token, extras, team, p.area.scales, [&](u32 word, u32 scale) {
      for_each({p.scales + 4 * (row * p.scales_row), to[0].has}, [&](u64 row) {
        if (word < p.area.scales) *reinterpret_cast<u32*>(row + 4 * (word * p.scales_word)) = scale;
      });
    });
  }
  if (team.warp != 0) return;
  u32 weight = word_with(token, extras, p.top_k + lane, p.top_k), sent = word_with(token, extras, 2 * p.top_k, p.top_k);
  TokenMetadata metadata = {extras.word, __uint_as_float(weight), sent};
  if (by_expert) {
    take_choices_by_expert(p, rows, metadata, a, row);
  } else {
    take_choices(p, rows, metadata, a);
  }
}

// Copies the `nth` record that came from a rank.
template <typename Rows>
__device__ __forceinline__ void take_record(const UcclEpNormalReceive& p, const NormalReceiveState& s, const Rows& rows,
                                            const Team& team, u32 from, u32 nth) {
  u64 area = s.wait.call.staged + from * p.area.len;
  Record record = {p, area + p.area.first + static_cast<u64>(nth) * p.area.stride};
  take(p, s, rows, team, record, {from, rows.first_of(p, s, from) + nth});
}

// Takes out a chunk of another rank's tokens, or this warp's piece of it, once it is there.
template <typename Rows>
__device__ __forceinline__ bool take_chunk(const UcclEpNormalReceive& p, NormalReceiveState& s, const Rows& rows,
                                           u32 from, const Chunking& chunking, u32 flag) {
  const UcclEpGroup& g = p.group;
  // The words that go with rows come with the first piece, so each warp waits for all pieces.
  u32 lane = lane_of_thread(), first_piece = flag - flag % chunking.pieces;
  u64 flags = flags_of(g, s.wait.call, g.rank, from), seen;
  bool has = lane < chunking.pieces;
  if (!wait_for_flags(g, s.wait, has, from, flags + sizeof(u64) * (first_piece + lane), seen)) return false;
  seen = __shfl_sync(ALL, seen, 0);
  u32 first = first_of_flag(seen), count = s.starts[from + 1] - s.starts[from];
  // Bounds the records of a peer with flags that contradict its counts.
  u32 end = min(first + count_of_flag(seen), count);
  Team team = {0, 0, flag % chunking.pieces, chunking.pieces};
#pragma unroll 1
  for (u32 nth = first; nth < end; nth++) take_record(p, s, rows, team, from, nth);
  return true;
}

// Takes out a chunk of this rank's own tokens, or this warp's piece of it.
template <typename Rows>
__device__ __forceinline__ void take_own(const UcclEpNormalDispatch& p, const NormalReceiveState& s, const Rows& rows,
                                         const Chunking& chunking, u32 flag) {
  const UcclEpRoutes& r = p.send.send.routes;
  u32 me = p.receive.group.rank, ranks = p.receive.group.ranks;
  Chunk chunk = chunk_of(chunking, flag, r.tokens);
  // A lane finds the place of one token.
  u32 mine = chunk.begin + lane_of_thread();
  int places = mine < chunk.end ? slot_at(r, ranks, mine, me).place() : -1;
#pragma unroll 1
  for (u32 token = chunk.begin; token < chunk.end; token++) {
    int place = __shfl_sync(ALL, places, static_cast<int>(token - chunk.begin));
    if (place < 0) continue;
    u32 nth = static_cast<u32>(place);
    // The counts in the window may not be those that this rank wrote: rows beyond them have no
    // room.
    if (nth >= s.starts[me + 1] - s.starts[me]) continue;
    take(p.receive, s, rows, chunk.team, OwnToken{p.send, token}, {me, rows.first_of(p.receive, s, me) + nth});
  }
}

// Takes out all chunks of all ranks, with this rank's own. Warps claim chunks in order, and ranks
// take turns: own chunks are there while those of other ranks are on their way.
template <typename Rows>
__device__ __forceinline__ void take_chunks(const UcclEpNormalDispatch& p, NormalReceiveState& s, const Rows& rows) {
  const UcclEpGroup& g = p.receive.group;
  share_out(g, s.wait.call, s.flags, [&](u32 i) {
    u32 flag = i / g.ranks, from = (g.rank + i) % g.ranks;
    Chunking chunking = chunking_of(s.tokens[from]);
    if (flag >= chunking.flags) return true;
    if (from != g.rank) return take_chunk(p.receive, s, rows, from, chunking, flag);
    take_own(p, s, rows, chunking, flag);
    return true;
  });
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

// Sets the rows between those of experts to 0. Teams take turns.
__device__ __forceinline__ void zero_gaps(const UcclEpNormalReceive& p, const NormalReceiveState& s, const Team& team) {
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

// Finds where the received rows go. The counts are there. No rank has more than `most` tokens.
__device__ __forceinline__ bool place_rows(const UcclEpNormalReceive& p, u32 most, NormalReceiveState& s) {
  if (!count_received(p.group, p.call, most, s.wait, s.starts)) return false;
  bool by_expert = p.alignment != 0;
  if (by_expert || blockIdx.x == 0) count_by_expert(p.group, p.area.len, p.local_experts, s);
  if (by_expert) place_experts(p, s);
  return true;
}

// The number of rows of the received tokens, with gaps.
__device__ __forceinline__ u32 rows_placed(const UcclEpNormalReceive& p, const NormalReceiveState& s) {
  u32 last = p.local_experts - 1, ranks = p.group.ranks;
  if (p.alignment != 0) return s.firsts[last] + s.counts[last];
  return first_row(p.spread, s.starts, ranks - 1) + s.starts[ranks] - s.starts[ranks - 1];
}

// Whether the received rows fit: the same for all blocks.
__device__ __forceinline__ bool fits(const UcclEpNormalReceive& p, const NormalReceiveState& s) {
  return rows_placed(p, s) <= p.len && s.starts[p.group.ranks] <= p.tokens;
}

// Writes the caller's tables if the received rows fit; else sets a fault.
__device__ __forceinline__ bool admit_rows(const UcclEpNormalReceive& p, NormalReceiveState& s) {
  const UcclEpGroup& g = p.group;
  u32 total = s.starts[g.ranks];
  if (!has_room(g, p.call, rows_placed(p, s), p.len, s.wait)) return false;
  if (!has_room(g, p.call, total, p.tokens, s.wait)) return false;
  write_tables(p, s);
  return true;
}

// Fills the rows without a token: zeros between experts, and choices of -1 up to `end`. All warps.
__device__ __forceinline__ void fill_rest(const UcclEpNormalReceive& p, const NormalReceiveState& s, u32 end) {
  Team team = {blockIdx.x + warp_of_thread() * gridDim.x, warps_of_block() * gridDim.x, 0, 1};
  if (p.zero_gaps != 0) zero_gaps(p, s, team);
  if (p.choices == 0) return;
  // These rows have no expert.
  u32 ranks = p.group.ranks;
#pragma unroll 1
  for (u32 rank = 0; rank < ranks; rank++) {
    u32 first = first_row(p.spread, s.starts, rank) + s.starts[rank + 1] - s.starts[rank];
    u32 until = rank + 1 < ranks ? first_row(p.spread, s.starts, rank + 1) : end;
#pragma unroll 1
    for (u32 row = first + team.first; row < until; row += team.step) {
      if (lane_of_thread() < p.top_k) put_choice(p, static_cast<u64>(row) * p.top_k + lane_of_thread(), -1);
    }
  }
}

__device__ __forceinline__ void normal_receive(const UcclEpNormalReceive& p, NormalReceiveState& s) {
  const UcclEpGroup& g = p.group;
  if (!begin_receive(g, p.call, 0, s.wait, {p.area.len, p.local_experts}) || !place_rows(p, p.slots, s) ||
      !admit_rows(p, s))
    return;
  u32 total = s.starts[g.ranks];
  Team team = team_for(total);
  fetch_records(g, s.wait.call, p.area, s.starts, team);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) {
    u32 from = sender_of(s.starts, g.ranks, at);
    take_record(p, s, OneRound{}, team, from, at - s.starts[from]);
  }
  fill_rest(p, s, p.len);
  if (is_last_block(g, STEP_RECEIVE, s.wait)) set_taken(g, p.call, s.wait);
}

// Reads the number of tokens of each rank, for all receivers.
__device__ __forceinline__ void read_tokens(const UcclEpNormalReceive& p, NormalReceiveState& s) {
  const UcclEpGroup& g = p.group;
  if (threadIdx.x < g.ranks) {
    const u64* header = reinterpret_cast<const u64*>(staged_header(g, threadIdx.x, s.wait.call.number));
    bool is_there = !is_masked(s.wait.call, threadIdx.x);
    s.tokens[threadIdx.x] = is_there ? static_cast<u32>(min(header[p.call.agreed + 1], static_cast<u64>(p.slots))) : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 most = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) most = max(most, chunking_of(s.tokens[rank]).flags);
    s.flags = g.ranks * most;
  }
  __syncthreads();
}

// Begins a call that is sent in chunks: the spare block sends every rank its counts.
__device__ __forceinline__ bool begin_chunks(const UcclEpNormalDispatch& p, WaitState& w) {
  const UcclEpSend& send = p.send.send;
  bool begins = p.phases == UCCL_EP_PHASES_ALL;
  if (!begin_block(send.group, send.call, begins ? STEP_SEND : STEP_RECEIVE, w)) return false;
  if (!begins || is_silent(p.send.round_tokens, send.group, send.routes.tokens)) return true;
  if (!wait_for_room(send.group, send.call, w)) return false;
  if (is_spare_sender()) {
    bool is_empty = is_empty_round(p.send);
    if (is_empty) leave_knowing(p.send.round_tokens, send.group, w);
    send_routed_counts(send, w.call, is_empty);
    set_arrived(send.group, send.call, w);
  }
  return true;
}

// Whether this launch takes out the received rows. A host that learns the counts from this launch
// may have guessed too little room: then this launch takes nothing, and a later one has more room.
// Nor does it if a rank has too many tokens for one round: then all ranks send again, in rounds.
__device__ __forceinline__ bool takes_out(const UcclEpNormalDispatch& p, const NormalReceiveState& s) {
  if (p.mailbox == 0) return true;
  const UcclEpNormalReceive& receive = p.receive;
  u32 most = most_tokens(receive.group, s.wait);
  bool is_taken = fits(receive, s) && most <= receive.slots;
  if (blockIdx.x == 0) write_mailbox(receive.group, receive.local_experts, s, p.mailbox, p.ticket, is_taken, most);
  return is_taken;
}

// Takes out all rows of a call, if they fit.
__device__ __forceinline__ void take_all(const UcclEpNormalDispatch& p, NormalReceiveState& s) {
  if (!admit_rows(p.receive, s)) return;
  read_tokens(p.receive, s);
  take_chunks(p, s, OneRound{});
  // A caller that has guessed the room does not return the rows without a token.
  fill_rest(p.receive, s, p.mailbox == 0 ? p.receive.len : 0);
}

// Sends and takes out in one launch, chunk by chunk.
__device__ __forceinline__ void normal_dispatch(const UcclEpNormalDispatch& p, NormalReceiveState& s, FlagQueue& out) {
  const UcclEpGroup& g = p.receive.group;
  const UcclEpCall& c = p.receive.call;
  if (!begin_chunks(p, s.wait)) return;
  Share share = senders(c.zero_copy != 0 ? ZERO_COPY_SENDERS : SENDERS);
  bool sends = g.ranks > 1 && p.phases != UCCL_EP_PHASES_RECEIVE;
  if (sends && has_block(share)) send_tokens(p.send, s.wait.call, share, out);
  u32 most = p.mailbox != 0 ? ANY_TOKENS : p.receive.slots;
  if (!wait_for_data(g, c, 0, s.wait) || !place_rows(p.receive, most, s)) return;
  bool is_taken = takes_out(p, s);
  if (is_taken) take_all(p, s);
  if (!is_sound(g, c, s.wait) || !is_last_block(g, STEP_RECEIVE, s.wait)) return;
  if (p.phases == UCCL_EP_PHASES_ALL) take_place(g, c, s.wait.call);
  // Otherwise the call goes on: its rows stay in the window until a later launch takes them out.
  if (!is_taken) return;
  end_shares(g, s.wait.call);
  // A zero-copy call ends when the next one begins.
  if (c.zero_copy == 0) set_taken(g, c, s.wait);
}
