// Calls of several rounds, for ranks with more tokens than the buffer has room for. Each round is a
// call of its own, with the next of each rank's tokens, behind one call that sends counts alone: of
// all tokens. So rows go to their places at once. The host knows the number of rounds.
#pragma once

#include "combine.cuh"

// Where the tokens of a round go.
struct Round {
  const UcclEpRound& round;

  // As those of OneRound. Until the rows are taken out, `firsts` has the first of each rank.
  __device__ __forceinline__ u32 first_of(const UcclEpNormalReceive&, const NormalReceiveState& s, u32 rank) const {
    return s.firsts[rank];
  }
  __device__ __forceinline__ u32 first_of_expert(const UcclEpNormalReceive& p, const NormalReceiveState& s, u32 rank,
                                                 u32 local) const {
    return s.before[rank * p.local_experts + local];
  }
  __device__ __forceinline__ u32 token(u32 nth) const { return round.first_token + nth; }
  __device__ __forceinline__ u32 most(const UcclEpNormalReceive&) const { return round.most; }

  // By rank: received tokens before those of this round, and of the next; by rank and expert: the
  // row of the first token.
  __device__ __forceinline__ u32* firsts() const { return reinterpret_cast<u32*>(round.firsts); }
  __device__ __forceinline__ u32* next_firsts() const { return reinterpret_cast<u32*>(round.next_firsts); }
  __device__ __forceinline__ u32* expert_rows() const { return reinterpret_cast<u32*>(round.expert_rows); }
  __device__ __forceinline__ u32* next_expert_rows() const { return reinterpret_cast<u32*>(round.next_expert_rows); }
  // By rank: received tokens before its first; and then all.
  __device__ __forceinline__ const u32* starts() const { return reinterpret_cast<const u32*>(round.starts); }
};

// The rows that go back in a round: as OneReturn.
struct RoundReturn {
  const UcclEpRound& round;

  __device__ __forceinline__ RankTokens from(const UcclEpNormalReturn& p, u32 rank) const {
    u32 all = reinterpret_cast<const u32*>(p.starts)[p.group.ranks];
    u32 end = min(reinterpret_cast<const u32*>(round.next_firsts)[rank], all), first = min(first_of(p, rank), end);
    return {first, min(end - first, p.slots)};
  }
  __device__ __forceinline__ u32 first_of(const UcclEpNormalReturn&, u32 rank) const {
    return reinterpret_cast<const u32*>(round.firsts)[rank];
  }
  __device__ __forceinline__ u32 slot(u32 token) const { return token - round.first_token; }
  // As those of OneReturn. Rows go back to the ranks that have tokens in the round.
  __device__ __forceinline__ bool begin(const UcclEpNormalReturn& p, WaitState& w) const {
    const UcclEpGroup& g = p.group;
    if (!begin_block(g, p.call, STEP_SEND, w)) return false;
    // Also where none is known.
    if (most_in_rounds(round.tokens, g) > round.first_token && !wait_for_room(g, p.call, w)) return false;
    leave_without_tokens(round.tokens, round.first_token, g, w);
    return true;
  }
  __device__ __forceinline__ void begin_sums(const UcclEpNormalSum& p, WaitState& w) const {
    let_idle_in(p.group, w);
    if (p.routes.tokens == 0) leave_knowing(round.tokens, p.group, w);
  }
  __device__ __forceinline__ void end(const UcclEpNormalSum& p, WaitState& w) const { let_idle_in(p.group, w); }
};

// Writes the table of the ranks' tokens, which rounds read: see idle.cuh.
__device__ __forceinline__ void write_round_tokens(const UcclEpNormalTotals& p, const WaitState& w) {
  const UcclEpGroup& g = p.send.group;
  u32* table = reinterpret_cast<u32*>(p.round_tokens);
  auto tokens_of = [&](u32 rank) {
    bool is_known = g.masks_late == 0 && !is_masked(w.call, rank);
    return is_known ? static_cast<u32>(w.extras[1][rank]) : UNKNOWN_TOKENS;
  };
  if (threadIdx.x < g.ranks) table[threadIdx.x] = tokens_of(threadIdx.x);
  if (threadIdx.x != 0) return;
  u32 most = 0;
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) most = max(most, tokens_of(rank));
  table[g.ranks] = most;
}

// Writes the counts of the whole call to the caller's tables, and where the first round's rows go.
__device__ __forceinline__ void write_totals(const UcclEpNormalTotals& p, const NormalReceiveState& s) {
  u32 ranks = p.send.group.ranks, local = p.send.routes.local_experts;
  for_starts(ranks, [&](u32 rank) { reinterpret_cast<u32*>(p.starts)[rank] = s.starts[rank]; });
  if (threadIdx.x < ranks) reinterpret_cast<u32*>(p.firsts)[threadIdx.x] = s.starts[threadIdx.x];
  write_round_tokens(p, s.wait);
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < local; expert += blockDim.x) {
    reinterpret_cast<u32*>(p.per_expert)[expert] = s.counts[expert];
    if (p.alignment != 0) reinterpret_cast<u32*>(p.ends)[expert] = s.firsts[expert] + s.counts[expert];
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; p.alignment != 0 && i < ranks * local; i += blockDim.x) {
    reinterpret_cast<u32*>(p.expert_rows)[i] = s.firsts[i % local] + s.before[i];
  }
}

// Finds the first row of each expert, from the experts' counts.
__device__ __forceinline__ void place_all(u32 local, u32 alignment, NormalReceiveState& s) {
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < local; expert += blockDim.x) {
    s.firsts[expert] = (s.counts[expert] + alignment - 1) / alignment * alignment;
  }
  __syncthreads();
  scan(s.firsts, local, s.sums);
}

// The call with the counts of all rounds, or the rest of it if an earlier launch has begun it. One
// block.
__device__ __forceinline__ void normal_totals(const UcclEpNormalTotals& p, NormalReceiveState& s) {
  const UcclEpSend& send = p.send;
  const UcclEpGroup& g = send.group;
  u32 local = send.routes.local_experts, last = local - 1;
  if (!begin_block(g, send.call, p.begins != 0 ? STEP_SEND : STEP_RECEIVE, s.wait)) return;
  if (p.begins != 0 && !send_only_counts(send, s.wait)) return;
  if (!wait_for_data(g, send.call, 0, s.wait, {send.area.len, local})) return;
  if (!count_received(g, send.call, p.most, s.wait, s.starts)) return;
  count_by_expert(g, send.area.len, local, s);
  if (p.alignment != 0) place_all(local, p.alignment, s);
  u32 rows = p.alignment != 0 ? s.firsts[last] + s.counts[last] : s.starts[g.ranks];
  if (!has_room(g, send.call, rows, p.len, s.wait)) return;
  if (!has_room(g, send.call, s.starts[g.ranks], p.tokens, s.wait)) return;
  write_totals(p, s);
  set_taken(g, send.call, s.wait);
}

// Writes the counts in a handle's tables to the host's mailbox. One block.
__device__ __forceinline__ void normal_recount(const UcclEpNormalRecount& p, NormalReceiveState& s) {
  for_starts(p.group.ranks, [&](u32 rank) { s.starts[rank] = reinterpret_cast<const u32*>(p.starts)[rank]; });
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    s.counts[expert] = reinterpret_cast<const u32*>(p.per_expert)[expert];
  }
  __syncthreads();
  write_mailbox(p.group, p.local_experts, s, p.mailbox, p.ticket, false, 0);
}

// Sets a fault if a rank sends more tokens in the rounds up to this one than it has announced. All
// threads.
__device__ __forceinline__ bool are_announced(const UcclEpNormalReceive& p, const Round& of, NormalReceiveState& s) {
  u32 rank = threadIdx.x;
  if (rank < p.group.ranks) {
    u32 count = s.starts[rank + 1] - s.starts[rank], end = of.starts()[rank + 1];
    u32 first = of.firsts()[rank], room = end - min(first, end);
    if (count > room) set_excess_fault(p.call, s.wait, rank, room, count);
  }
  return is_sound(p.group, p.call, s.wait);
}

// Finds where the rows of a round go, and where those of the next one begin.
__device__ __forceinline__ bool place_round(const UcclEpNormalReceive& p, const Round& of, NormalReceiveState& s) {
  const UcclEpGroup& g = p.group;
  if (!count_received(g, p.call, p.slots, s.wait, s.starts) || !are_announced(p, of, s)) return false;
  bool is_first = blockIdx.x == 0 && p.origin != 0;
  if (threadIdx.x < g.ranks) {
    u32 first = s.firsts[threadIdx.x] = of.firsts()[threadIdx.x];
    if (is_first) of.next_firsts()[threadIdx.x] = first + s.starts[threadIdx.x + 1] - s.starts[threadIdx.x];
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; p.alignment != 0 && i < g.ranks * p.local_experts; i += blockDim.x) {
    u32 rank = i / p.local_experts, row = s.before[i] = of.expert_rows()[i];
    if (!is_first) continue;
    u64 counts = s.wait.call.staged + rank * p.area.len;
    u32 count = is_masked(s.wait.call, rank) ? 0 : reinterpret_cast<const u32*>(counts)[i % p.local_experts];
    of.next_expert_rows()[i] = row + count;
  }
  __syncthreads();
  return true;
}

// Sets the rows of tokens to 0 that were counted and did not come, because their rank was left out
// after the counts: without choices and without a source. `tokens` has the end of each rank's rows.
__device__ __forceinline__ void blank_missing(const UcclEpNormalReceive& p, const NormalReceiveState& s) {
  Team team = {blockIdx.x + warp_of_thread() * gridDim.x, warps_of_block() * gridDim.x, 0, 1};
  u32 lane = lane_of_thread();
#pragma unroll 1
  for (u32 rank = 0; rank < p.group.ranks; rank++) {
#pragma unroll 1
    for (u32 row = s.tokens[rank] + team.first; row < s.starts[rank + 1]; row += team.step) {
      zero_row(p, team, row);
      u64 at = static_cast<u64>(row) * p.top_k + lane;
      if (lane < p.top_k) put_choice(p, at, -1);
      if (lane < p.top_k && p.weights != 0) reinterpret_cast<float*>(p.weights)[at] = 0.0f;
      if (lane != 0 || p.origin == 0) continue;
      reinterpret_cast<u32*>(p.src_info)[row] = NO_ROW;
      reinterpret_cast<u32*>(p.origin)[row] = NO_ROW;
    }
  }
}

// Fills the rows that no rank has sent: as `fill_rest`, in the last round. All threads.
UCCL_COLD void fill_behind_rounds(const UcclEpNormalReceive& p, Round of, NormalReceiveState& s) {
  if (of.round.is_last == 0) return;
  // Other warps may still take rows out.
  __syncthreads();
  u32 rank = threadIdx.x;
  if (rank < p.group.ranks) s.tokens[rank] = of.firsts()[rank] + s.starts[rank + 1] - s.starts[rank];
  __syncthreads();
  for_starts(p.group.ranks, [&](u32 rank) { s.starts[rank] = of.starts()[rank]; });
#pragma unroll 1
  for (u32 expert = threadIdx.x; expert < p.local_experts; expert += blockDim.x) {
    s.counts[expert] = reinterpret_cast<const u32*>(of.round.per_expert)[expert];
  }
  __syncthreads();
  if (p.alignment != 0) place_all(p.local_experts, p.alignment, s);
  fill_rest(p, s, p.len);
  if (p.group.masks_late != 0 && p.alignment == 0) blank_missing(p, s);
}

// A round of a dispatch, in one launch.
__device__ __forceinline__ void normal_dispatch_round(const UcclEpNormalDispatchRound& p, NormalReceiveState& s,
                                                      FlagQueue& out) {
  const UcclEpNormalReceive& receive = p.whole.receive;
  const UcclEpGroup& g = receive.group;
  const UcclEpCall& c = receive.call;
  Round of = {p.round};
  if (!begin_chunks(p.whole, s.wait)) return;
  Share share = senders(SENDERS);
  if (g.ranks > 1 && has_block(share)) send_tokens(p.whole.send, s.wait.call, share, out);
  let_idle_in(g, s.wait);
  leave_without_tokens(p.round.tokens, p.round.first_token, g, s.wait);
  if (!wait_for_data(g, c, 0, s.wait) || !place_round(receive, of, s)) return;
  read_tokens(receive, s);
  take_chunks(p.whole, s, of);
  fill_behind_rounds(receive, of, s);
  if (!is_sound(g, c, s.wait) || !is_last_block(g, STEP_RECEIVE, s.wait)) return;
  take_place(g, c, s.wait.call);
  end_shares(g, s.wait.call);
  let_idle_in(g, s.wait);
  set_taken(g, c, s.wait);
}

// The receive of a round that an earlier launch has sent.
__device__ __forceinline__ void normal_receive_round(const UcclEpNormalReceiveRound& p, NormalReceiveState& s) {
  const UcclEpNormalReceive& receive = p.receive;
  const UcclEpGroup& g = receive.group;
  Round of = {p.round};
  if (!begin_block(g, receive.call, STEP_RECEIVE, s.wait)) return;
  leave_without_tokens(p.round.tokens, p.round.first_token, g, s.wait);
  if (!wait_for_data(g, receive.call, 0, s.wait, {receive.area.len, receive.local_experts})) return;
  if (!place_round(receive, of, s)) return;
  u32 total = s.starts[g.ranks];
  Team team = team_for(total);
  fetch_records(g, s.wait.call, receive.area, s.starts, team);
#pragma unroll 1
  for (u32 at = team.first; at < total; at += team.step) {
    u32 from = sender_of(s.starts, g.ranks, at);
    take_record(receive, s, of, team, from, at - s.starts[from]);
  }
  fill_behind_rounds(receive, of, s);
  if (!is_last_block(g, STEP_RECEIVE, s.wait)) return;
  let_idle_in(g, s.wait);
  set_taken(g, receive.call, s.wait);
}

// State of a block that sends the rows of a round back.
struct ReturnRoundState {
  WaitState wait;
  u32 starts[RANKS + 1];  // the round's rows before those of each rank, and all
};

// The row of a round's token: each lane may ask for another.
struct RowOfRound {
  const UcclEpNormalReturn& back;
  const RoundReturn& of;
  const u32* starts;

  __device__ __forceinline__ u32 operator()(u32 nth) const {
    u32 rank = 0;
#pragma unroll 1
    while (rank + 1 < back.group.ranks && starts[rank + 1] <= nth) rank++;
    return of.first_of(back, rank) + nth - starts[rank];
  }
};

// The rows of a round go back; another launch sums them.
__device__ __forceinline__ void normal_return_round(const UcclEpNormalReturnRound& p, ReturnRoundState& s) {
  const UcclEpNormalReturn& back = p.send;
  const UcclEpGroup& g = back.group;
  RoundReturn of = {p.round};
  if (!of.begin(back, s.wait)) return;
  if (is_spare_sender()) write_headers(g, back.call, s.wait.call, nullptr);
  if (!has_rows(back, s.wait)) return;
  if (threadIdx.x < g.ranks) s.starts[threadIdx.x + 1] = of.from(back, threadIdx.x).count;
  if (!add_starts(g, back.call, s.wait, s.starts)) return;
  RowOfRound row = {back, of, s.starts};
  u32 total = s.starts[g.ranks];
  Team team = team_for(total);
#pragma unroll 1
  for (u32 nth = team.first; nth < total; nth += team.step) return_token(back, of, s.wait.call, team, row(nth));
  u32 slots = has_each(back) ? total * back.top_k : total;
  auto copy = [&](u32 i) { return nth_slot_copy(back, of, s.wait.call, i, row); };
  end_send(g, back.call, s.wait, [&] { send_rows_far(g, s.wait, copy, slots, back.slot_stride); });
}
