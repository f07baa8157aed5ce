// Low latency dispatch of a small batch: a block finds the places of its tokens itself, and each record
// may have a flag; then one launch sends and receives.
#pragma once

#include "dispatch.cuh"
#include "small_batch.cuh"

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

struct SendState {
  WaitState wait;
  TakenWords taken;
  SmallBatch small_batch;
};

// Sets the flags of the records, if there are any, of a block's tokens, which the block has sent.
// One warp.
__device__ __forceinline__ void set_record_flags(const UcclEpSend& p, const PlacedCall& call,
                                                 const SmallBatch& small_batch, const BlockTokens& block_tokens) {
  const UcclEpGroup& g = p.group;
  u64 ranks[BLOCK_TOKENS] = {}, all = 0;
#pragma unroll
  for (u32 nth = 0; nth < BLOCK_TOKENS; nth++) {
    if (nth < block_tokens.count) ranks[nth] = small_batch.masks[block_tokens.token(nth)] & ~call.masked.words[0];
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
  Targets to[TARGET_SETS];
  records_at(p, s.wait.call, to, rank_of_lane,
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
