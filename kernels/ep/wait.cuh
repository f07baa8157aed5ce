// Words between ranks in a call, as in the module `protocol` of uccl-ep: ready flags, and the code
// that waits for them and sets them.
#pragma once

#include "far.cuh"
#include "staging.cuh"

__device__ __forceinline__ u64 line_of(const UcclEpGroup& g, u32 at, u32 about, u32 line) {
  return window_of(g, at) + (about * UCCL_EP_LINES + line) * UCCL_EP_LINE;
}

__device__ __forceinline__ u32 slot_of(u64 call) { return static_cast<u32>(call % UCCL_EP_SLOTS); }

__device__ __forceinline__ u64 arrived_word(const UcclEpGroup& g, u32 at, u32 from, u64 call) {
  return line_of(g, at, from, 0) + 8 * slot_of(call);
}

__device__ __forceinline__ u64 taken_word(const UcclEpGroup& g, u32 at, u32 by, u64 call) {
  return line_of(g, at, by, 1) + 8 * slot_of(call);
}

__device__ __forceinline__ u64 fault_word(const UcclEpGroup& g, u32 at, u32 of) { return line_of(g, at, of, 2); }

__device__ __forceinline__ u64 header_of(const UcclEpGroup& g, u32 at, u32 of, u64 call) {
  return line_of(g, at, of, 3 + slot_of(call));
}

// Where blocks read a received header: in the staging copy, if there is one.
__device__ __forceinline__ u64 staged_header(const UcclEpGroup& g, u32 of, u64 call) {
  return staging_address(g, header_of(g, g.rank, of, call));
}

// A call's ready flag. The call has one round, which is the last; in `taken` the flag is the end of
// the call.
__device__ __forceinline__ u64 flag_of(u64 call) { return call << 17 | 1; }
__device__ __forceinline__ u64 call_of(u64 flag) { return flag >> 17; }

__device__ __forceinline__ UcclEpOwnState* own_of(const UcclEpGroup& g) {
  return reinterpret_cast<UcclEpOwnState*>(g.own);
}

__device__ __forceinline__ UcclEpStatus* status_of(const UcclEpGroup& g) {
  return reinterpret_cast<UcclEpStatus*>(g.status);
}

// The word of the set of lost ranks that has a rank's bit.
__device__ __forceinline__ u64 lost_word(const UcclEpGroup& g, u32 rank) {
  return g.status + offsetof(UcclEpStatus, lost) + sizeof(u64) * word_of_rank(rank);
}

// Header words behind the agreed ones that a block keeps.
constexpr u32 EXTRA_WORDS = 2;

// State that the threads of a block share: the call, and their waits or a fault.
struct WaitState {
  PlacedCall call;
  UcclEpRankSet rowless;  // ranks that send back no rows: they are left out, or a combine's dispatch left them out
  u32 state;              // 0, one of the states of a status, or STOPPED
  u32 detail;
  u32 is_waiting;
  UcclEpRankSet late;
  u64 waited_ns;
  u64 expected[RANKS];
  u64 seen[RANKS];
  u64 extras[EXTRA_WORDS][RANKS];  // the first words of ranks' headers that are not agreed on
  u32 is_last_block;
};

// Another block, or an earlier call, has failed.
constexpr u32 STOPPED = 100;

// The block's state, the same for all its threads: none of them changes it before all have read it.
__device__ __forceinline__ u32 agreed_state(const WaitState& w) {
  __syncthreads();
  u32 state = w.state;
  __syncthreads();
  return state;
}

// Whether a call leaves a rank out.
__device__ __forceinline__ bool is_masked(const UcclEpPlacement& call, u32 rank) { return has_rank(call.masked, rank); }

// Whether sums have no row of a rank.
__device__ __forceinline__ bool has_no_row(const WaitState& w, u32 rank) { return has_rank(w.rowless, rank); }

// Whether a rank gets the acknowledgement of a call. A rank that is left out gets it too, unless
// it is absent or the host knows that it is gone: if it takes part in a later call, it writes to this place then.
__device__ __forceinline__ bool gets_ack(const UcclEpGroup& g, const UcclEpPlacement& call, u32 rank) {
  if (!is_masked(call, rank)) return true;
  return window_of(g, rank) != 0 && (load_relaxed(lost_word(g, rank)) >> bit_of_rank(rank) & 1) == 0;
}

// The number of calls since the last earlier one in a slot; for the call's own slot, UCCL_EP_SLOTS.
__device__ __forceinline__ u32 calls_since(u64 number, u32 slot) {
  return (slot_of(number) + UCCL_EP_SLOTS - 1 - slot) % UCCL_EP_SLOTS + 1;
}

// Finds the number and place of the next call, as uccl-ep's places.rs does. One warp,
// with a slot for each lane.
__device__ __forceinline__ void place_call(const UcclEpGroup& g, const UcclEpCall& c, UcclEpPlacement& call) {
  const UcclEpOwnState* own = own_of(g);
  u32 slot = lane_of_thread();
  // A lane has a word of the set.
  u64 masked = own->masked.words[slot % SET_WORDS];
  u64 number = own->calls + 1, offset = own->next, first = own->first, begin = 0, end = 0;
  if (slot < UCCL_EP_SLOTS) {
    begin = own->begins[slot];
    end = own->ends[slot];
  }
  if (c.zero_copy != 0 || offset + c.len > min(g.pool, c.len * UCCL_EP_ROUND)) offset = 0;
  u32 ago = calls_since(number, slot % UCCL_EP_SLOTS);
  bool overlaps = begin < offset + c.len && offset < end;
  // The call that used the same words counts as overlapping. Calls before the ranks last met were
  // in other windows.
  bool is_after = slot < UCCL_EP_SLOTS && number >= first + ago && (ago == UCCL_EP_SLOTS || overlaps);
  u32 after = __ballot_sync(ALL, is_after);
  if (slot == 0) {
    call.number = number;
    call.place = g.pool_at + offset;
    call.after = after;
  }
  if (slot < SET_WORDS) call.masked.words[slot] = masked;
}

// Copies a call's number and place.
__device__ __forceinline__ void copy_placement(UcclEpPlacement& to, const UcclEpPlacement& from) {
  to.number = from.number;
  to.place = from.place;
  to.after = from.after;
  copy_set(to.masked, from.masked);
}

// Stores the call's number and place for later launches. One thread does it, when all blocks have
// found the place. `masked`: the ranks that the call leaves out. `pending_ack`: the call, if it is
// acknowledged when the next one begins; or 0.
__device__ __forceinline__ void store_place(const UcclEpGroup& g, const UcclEpCall& c, const UcclEpPlacement& call,
                                            const UcclEpRankSet& masked, u64 pending_ack) {
  UcclEpOwnState* own = own_of(g);
  u32 slot = slot_of(call.number);
  u64 begin = call.place - g.pool_at;
  own->calls = call.number;
  own->begins[slot] = begin;
  own->ends[slot] = own->next = begin + c.len;
  own->pending_ack = pending_ack;
  UcclEpPlacement& placement = *reinterpret_cast<UcclEpPlacement*>(c.placement);
  copy_placement(placement, call);
  copy_set(placement.masked, masked);
}

// Stores the place in the last block of a launch that sends.
__device__ __forceinline__ void take_place(const UcclEpGroup& g, const UcclEpCall& c, UcclEpPlacement& call) {
  if (threadIdx.x == 0) {
    // Other blocks may have left out ranks that were late.
    if (g.masks_late != 0) copy_set(call.masked, own_of(g)->masked);
    // The block may have left out idle ranks of a round.
    store_place(g, c, call, own_of(g)->masked, c.zero_copy != 0 ? call.number : 0);
  }
  __syncthreads();
}

// Sends every rank the acknowledgement of the call before, if it is pending: its launch has ended.
// One warp.
__device__ __forceinline__ void send_pending_ack(const UcclEpGroup& g, const UcclEpPlacement& call) {
  u64 pending_ack = own_of(g)->pending_ack;
  if (pending_ack == 0) return;
#pragma unroll 1
  for (u32 peer = lane_of_thread(); peer < g.ranks; peer += LANES) {
    if (gets_ack(g, call, peer)) store_relaxed(taken_word(g, peer, g.rank, pending_ack), flag_of(pending_ack));
  }
}

// Launches of a call: one sends and stores its place, one receives. `layout` runs before, and is
// part of no call.
constexpr u32 STEP_SEND = 0;
constexpr u32 STEP_RECEIVE = 1;
constexpr u32 STEP_LAYOUT = 2;

UCCL_COLD void refuse_stale(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w, u64 number);

// Reads the windows for rows. One warp; the loads of other addresses bring them into the cache.
__device__ __forceinline__ void load_windows(const UcclEpGroup& g, PlacedCall& call) {
#pragma unroll 1
  for (u32 rank = lane_of_thread(); rank < g.ranks; rank += LANES) {
    window_of(g, rank);
    call.row_windows[rank] = row_window_of(g, rank);
  }
}

// Sets the block's state: sound, unless an earlier call has failed, or ranks have met since the
// dispatch of a combine. The first warp does it, while the second one reads windows.
__device__ __forceinline__ void begin_waiting(const UcclEpGroup& g, const UcclEpCall& c, u32 step, WaitState& w) {
  if (warp_of_thread() == 1) load_windows(g, w.call);
  if (warp_of_thread() != 0) return;
  // The load is in flight while the call gets its place.
  u32 has_failed = load_word(g.own);
  u64 unsent[SET_WORDS] = {}, first = 0, dispatch = 0;
  if (c.dispatch_placement != 0) {
    const UcclEpPlacement* placement = reinterpret_cast<const UcclEpPlacement*>(c.dispatch_placement);
    for_words([&](u32 word) { unsent[word] = placement->masked.words[word]; });
    dispatch = placement->number;
    first = own_of(g)->first;
  }
  // So is this one.
  u64 staging = staging_of(g);
  if (step != STEP_RECEIVE) place_call(g, c, w.call);
  __syncwarp();
  if (step == STEP_SEND && blockIdx.x == 0) send_pending_ack(g, w.call);
  if (threadIdx.x == 0) {
    UcclEpPlacement& call = w.call;
    if (step == STEP_RECEIVE) copy_placement(call, *reinterpret_cast<const UcclEpPlacement*>(c.placement));
    w.call.staged = staging + w.call.place;
    for_words([&](u32 word) { w.rowless.words[word] = call.masked.words[word] | unsent[word]; });
    w.state = has_failed != 0 ? STOPPED : 0;
    w.detail = 0;
    w.is_waiting = 0;
    clear_set(w.late);
    w.waited_ns = 0;
    if (dispatch < first) refuse_stale(g, c, w, dispatch);
  }
}

__device__ __forceinline__ bool begin_block(const UcclEpGroup& g, const UcclEpCall& c, u32 step, WaitState& w) {
  begin_waiting(g, c, step, w);
  return agreed_state(w) == 0;
}

// Passes the state of a sound block to the next half of its call, which uses this rank's window alone.
__device__ __forceinline__ void pass_state(const UcclEpGroup& g, const WaitState& from, WaitState& to) {
  if (threadIdx.x == 0) {
    copy_placement(to.call, from.call);
    to.call.staged = from.call.staged;
    to.call.row_windows[g.rank] = from.call.row_windows[g.rank];
    to.state = to.detail = to.is_waiting = 0;
    clear_set(to.late);
    to.waited_ns = 0;
  }
  __syncthreads();
}

// Sets a fault of a rank, which one thread has found. The block reports the first one.
__device__ __forceinline__ void set_fault(WaitState& w, u32 state, u32 detail, u32 peer) {
  u32 before = atomicCAS(&w.state, 0u, state);
  if (before != 0 && before != state) return;
  if (before == 0) w.detail = detail;
  add_rank(w.late, peer);
}

// Sends all ranks the fault: this rank has given up. One thread; far ranks get it as long as the
// proxy takes commands.
__device__ __forceinline__ void send_fault(const UcclEpGroup& g, u64 call, bool can_push) {
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) {
    if (window_of(g, rank) == 0) continue;
    u64 word = fault_word(g, rank, g.rank), number = 0;
    if (!is_far(g, rank)) {
      store_release(word, call);
    } else if (can_push) {
      can_push = claim(g, 1, number) == 0;
      if (can_push) put(g, number, set_command(g, rank, word, call));
    }
  }
}

// Reports the block's fault to the host and the peers, unless another block has reported before.
UCCL_COLD void report(const UcclEpGroup& g, u32 phase, const WaitState& w) {
  if (w.state == STOPPED || atomicExch(&own_of(g)->has_failed, 1u) != 0) return;
  UcclEpStatus* status = status_of(g);
  status->phase = phase;
  status->detail = w.detail;
  status->call = w.call.number;
  copy_set(status->late, w.late);
  status->waited_ns = w.waited_ns;
#pragma unroll 1
  for (u32 rank = 0; rank < g.ranks; rank++) {
    if (!has_rank(w.late, rank)) continue;
    status->expected[rank] = w.expected[rank];
    status->seen[rank] = w.seen[rank];
  }
  __threadfence_system();
  *const_cast<volatile u32*>(&status->state) = w.state;
  __threadfence_system();
  send_fault(g, w.call.number, w.detail != UCCL_EP_PUSH);
}

// Reports a combine whose dispatch, with this number, was before ranks last met: its rows are not
// those of the ranks that are there. One thread; the block ends.
UCCL_COLD void refuse_stale(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w, u64 number) {
  if (w.state != 0) return;
  w.expected[g.rank] = own_of(g)->first;
  w.seen[g.rank] = number;
  set_fault(w, UCCL_EP_STALE, 0, g.rank);
  report(g, c.phase, w);
}

// Whether the block is sound. If not, the first block that fails reports to the host and the peers.
__device__ __forceinline__ bool is_sound(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  if (agreed_state(w) == 0) return true;
  if (threadIdx.x == 0) report(g, c.phase, w);
  return false;
}

// Results of a wait: a fault; the word has its flag; or the call may go on without the rank.
constexpr u32 FAULT = 0;
constexpr u32 ARRIVED = 1;
constexpr u32 LATE = 2;

// The blocks' verdict on a rank's data: 0 (none yet), ARRIVED or LATE.
__device__ __forceinline__ u32* verdict_on(const UcclEpGroup& g, const UcclEpPlacement& call, u32 rank) {
  return &own_of(g)->verdicts[slot_of(call.number)][rank];
}

// Whether another block has left a rank out.
__device__ __forceinline__ bool is_left_out(const UcclEpGroup& g, const WaitState& w, u32 rank, u32 detail) {
  if (detail == UCCL_EP_DATA) return *const_cast<volatile u32*>(verdict_on(g, w.call, rank)) == LATE;
  const volatile u64* masked = own_of(g)->masked.words;
  return (masked[word_of_rank(rank)] >> bit_of_rank(rank) & 1) != 0;
}

// Leaves a rank out of this call and of later ones.
__device__ __forceinline__ void leave_out(const UcclEpGroup& g, WaitState& w, u32 rank) {
  add_rank(own_of(g)->masked, rank);
  add_rank(w.call.masked, rank);
  add_rank(w.rowless, rank);
}

// Whether a word has the flag; a word of `taken` may have that of a later call.
__device__ __forceinline__ bool has_flag(u64 seen, u64 flag, u32 detail) {
  return seen == flag || (detail == UCCL_EP_ROOM && call_of(seen) > call_of(flag));
}

// A thread's wait for a flag in a word that a peer sets. A chunk's flag has another format, with
// the same call.
struct WordWait {
  u64 word;
  u64 flag;
  u32 peer;
  u32 detail;
  u16 call_at = 0;  // the lowest bit of the call's number in the word, if not as in `flag`; NO_CALL: the word has none
};

// The lowest bit of the call's number in a chunk's flag: see chunks.cuh.
constexpr u16 FLAG_CALL = 22;
constexpr u16 NO_CALL = 63;

// Checks for other reasons to end a wait, as its word has no flag yet. Returns ARRIVED if there is
// none.
UCCL_COLD u32 judge_wait(const UcclEpGroup& g, WaitState& w, WordWait a, u64 seen, u64 waited, bool looks_at_host) {
  u32 peer = a.peer;
  bool is_lost = looks_at_host && (load_acquire(lost_word(g, peer)) >> bit_of_rank(peer) & 1) != 0;
  // Writes of the peer from before its loss may have come since.
  if (is_lost && load_acquire(a.word) != seen) return ARRIVED;
  u64 fault = load_acquire(fault_word(g, g.rank, peer));
  bool is_late = fault != 0 || is_lost || waited > g.timeout_ns;
  if (g.masks_late != 0 && (is_late || is_left_out(g, w, peer, a.detail))) return LATE;
  u32 state = 0;
  if (fault != 0) {
    state = UCCL_EP_GAVE_UP;
  } else if (is_lost) {
    state = UCCL_EP_LOST;
  } else if (looks_at_host && load_word(g.status) != 0) {
    state = UCCL_EP_POISONED;
  } else if (waited > g.timeout_ns) {
    w.waited_ns = waited;
    state = UCCL_EP_OVERDUE;
  } else if (load_word(g.own) != 0) {
    atomicCAS(&w.state, 0u, STOPPED);
  } else if (load_shared(w.state) == UCCL_EP_OVERDUE) {
    // Another thread's wait is overdue: this rank is late, too.
    state = UCCL_EP_OVERDUE;
  }
  if (state != 0) {
    u64 flag = a.call_at == NO_CALL ? 0 : a.call_at != 0 && seen != 0 ? flag_of(seen >> a.call_at) : seen;
    w.expected[peer] = a.flag;
    w.seen[peer] = fault != 0 ? fault : flag;
    set_fault(w, state, a.detail, peer);
  }
  return load_shared(w.state) != 0 ? FAULT : ARRIVED;
}

// The time since `began`. The clock of a GPU may step back by a little.
__device__ __forceinline__ u64 since(u64 began) {
  u64 waited = now_ns() - began;
  return static_cast<long long>(waited) < 0 ? 0 : waited;
}

// Waits until `has_come` accepts the word's value, which is returned in `seen`.
template <typename HasCome>
__device__ __forceinline__ u32 wait_for_word(const UcclEpGroup& g, WaitState& w, const WordWait& a, u64& seen,
                                             HasCome has_come) {
  constexpr u32 LOOKS = 32;
  // Reads of host memory are slow: if every block made them, each wait would take 100 us longer,
  // and so would the peers' waits for this rank. The first block reads it now and then, and its
  // fault ends the others' waits; they read it seldom, in case the first block has ended.
  constexpr u32 LOOKS_AT_HOST = 256, SELDOM = 65536;
  seen = load_acquire(a.word);
  if (has_come(seen)) return ARRIVED;
  u64 began = now_ns();
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    seen = load_acquire(a.word);
    if (has_come(seen)) return ARRIVED;
    if (looks % LOOKS == 0) {
      bool looks_at_host = looks % (blockIdx.x == 0 ? LOOKS_AT_HOST : SELDOM) == 0;
      u32 ended = judge_wait(g, w, a, seen, since(began), looks_at_host);
      if (ended != ARRIVED) return ended;
    }
    relax();
  }
}

// Waits until a peer's word has the flag; a word of `taken` may have that of a later call.
__device__ __forceinline__ u32 wait_for_flag(const UcclEpGroup& g, WaitState& w, const WordWait& a) {
  u64 seen;
  return wait_for_word(g, w, a, seen, [&](u64 word) { return has_flag(word, a.flag, a.detail); });
}

// Reads a word of `taken`: a rank has one for each slot.
__device__ __forceinline__ u64 load_taken(const UcclEpGroup& g, u32 i) {
  return load_acquire(line_of(g, g.rank, i / UCCL_EP_SLOTS, 1) + 8 * (i % UCCL_EP_SLOTS));
}

// Checks all words of `taken` at once, read by `word_of`. Sets `is_waiting`, valid behind the
// block's next barrier, if a flag is missing.
template <typename WordOf>
__device__ __forceinline__ void look_for_room(const UcclEpGroup& g, WaitState& w, WordOf word_of) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * UCCL_EP_SLOTS; i += blockDim.x) {
    u32 slot = i % UCCL_EP_SLOTS;
    if ((w.call.after >> slot & 1) == 0 || is_masked(w.call, i / UCCL_EP_SLOTS)) continue;
    u64 call = w.call.number - calls_since(w.call.number, slot);
    if (!has_flag(word_of(i), flag_of(call), UCCL_EP_ROOM)) atomicOr(&w.is_waiting, 1u);
  }
}

// Whether this block follows the first one, which alone polls words in host memory.
__device__ __forceinline__ bool is_follower(const UcclEpGroup& g) { return g.via_host != 0 && blockIdx.x != 0; }

// Waits until the first block has found room. The first block keeps the deadline, and its failure
// ends this wait.
__device__ __forceinline__ bool follow_to_room(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  if (threadIdx.x == 0) {
    u64 room = g.own + offsetof(UcclEpOwnState, room);
#pragma unroll 1
    while (load_acquire(room) < w.call.number && w.state == 0) {
      if (load_word(g.own) != 0) w.state = STOPPED;
      relax();
    }
    copy_set(w.call.masked, own_of(g)->masked);
    for_words([&](u32 word) { w.rowless.words[word] |= w.call.masked.words[word]; });
  }
  return is_sound(g, c, w);
}

// Waits until every rank has ended the calls that had this call's place. All threads of the block
// take part.
__device__ __forceinline__ bool wait_for_room(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  if (is_follower(g)) return follow_to_room(g, c, w);
  look_for_room(g, w, [&](u32 i) { return load_taken(g, i); });
  __syncthreads();
  u32 peer = threadIdx.x;
  if (w.is_waiting != 0 && peer < g.ranks && !is_masked(w.call, peer)) {
#pragma unroll 1
    for (u64 left = w.call.after; left != 0; left &= left - 1) {
      u64 call = w.call.number - calls_since(w.call.number, __ffs(static_cast<int>(left)) - 1);
      u32 ended = wait_for_flag(g, w, {taken_word(g, g.rank, peer, call), flag_of(call), peer, UCCL_EP_ROOM});
      if (ended == LATE) leave_out(g, w, peer);
      if (ended != ARRIVED) break;
    }
  }
  if (!is_sound(g, c, w)) return false;
  if (g.via_host != 0 && threadIdx.x == 0) store_release(g.own + offsetof(UcclEpOwnState, room), w.call.number);
  return true;
}

// Words of `taken`, loaded while the call gets its number.
struct TakenWords {
  u64 words[RANKS * UCCL_EP_SLOTS];
};

// Begins a block of a launch that sends, once the call has room. By then a block knows the place,
// so the last block to come here stores it. `acks_later`: whether the call is acknowledged when the
// next one begins.
__device__ __forceinline__ bool begin_at_once(const UcclEpGroup& g, const UcclEpCall& c, bool acks_later, WaitState& w,
                                              TakenWords& taken) {
  begin_waiting(g, c, STEP_SEND, w);
#pragma unroll 1
  for (u32 i = blockDim.x - 1 - threadIdx.x; i < g.ranks * UCCL_EP_SLOTS; i += blockDim.x)
    taken.words[i] = load_taken(g, i);
  __syncthreads();
  look_for_room(g, w, [&](u32 i) { return taken.words[i]; });
  if (agreed_state(w) != 0) return false;
  if (w.is_waiting != 0 && !wait_for_room(g, c, w)) return false;
  if (threadIdx.x + 1 == blockDim.x) {
    u32* begun = &own_of(g)->ended[STEP_SEND][slot_of(w.call.number)];
    if (count_up(begun) + 1 == gridDim.x) {
      *begun = 0;
      store_place(g, c, w.call, w.call.masked, acks_later ? w.call.number : 0);
    }
  }
  return true;
}

// Begins a block of a launch that sends, once the call has room.
__device__ __forceinline__ bool begin_send(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  return begin_block(g, c, STEP_SEND, w) && wait_for_room(g, c, w);
}

// Waits for the first block's verdict on this thread's rank.
__device__ __forceinline__ u32 follow_to_rank(const UcclEpGroup& g, WaitState& w) {
#pragma unroll 1
  for (;;) {
    u32 verdict = *const_cast<volatile u32*>(verdict_on(g, w.call, threadIdx.x));
    if (verdict != 0) {
      // Data that the first block has fetched is visible behind the fence.
      __threadfence();
      return verdict;
    }
    if (load_word(g.own) != 0) {
      atomicCAS(&w.state, 0u, STOPPED);
      return FAULT;
    }
    relax();
  }
}

// Stores this block's verdict on this thread's rank, unless another block was first. Returns the
// valid one.
__device__ __forceinline__ u32 set_verdict(const UcclEpGroup& g, const WaitState& w, u32 ended) {
  u32 before = atomicCAS(verdict_on(g, w.call, threadIdx.x), 0u, ended);
  return before != 0 ? before : ended;
}

// Waits for this thread's rank. Where late ranks are left out, all blocks follow the first verdict.
__device__ __forceinline__ u32 wait_for_rank(const UcclEpGroup& g, WaitState& w, u64 word, u64 flag) {
  if (is_follower(g)) return follow_to_rank(g, w);
  u32 ended = wait_for_flag(g, w, {word, flag, threadIdx.x, UCCL_EP_DATA});
  // With windows in host memory, the others follow once this block has fetched the data that they
  // read.
  if (g.masks_late == 0 || g.via_host != 0 || ended == FAULT) return ended;
  ended = set_verdict(g, w, ended);
  // Another block has seen the flag, which changes only when this call has ended.
  while (ended == ARRIVED && load_acquire(word) != flag) relax();
  return ended;
}

// The layout of the ranks' counts by expert in a place, where a call has any.
struct CountsLayout {
  u64 area_len;
  u32 local_experts;
};

// In the first block, after its wait for all ranks: fetches headers and counts, and lets the other
// blocks go on.
__device__ __forceinline__ void release_followers(const UcclEpGroup& g, WaitState& w, const CountsLayout& counts_layout,
                                                  bool is_awaited, u32 ended) {
  if (agreed_state(w) != 0) return;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * UCCL_EP_HEADER_WORDS; i += blockDim.x) {
    u64 word = header_of(g, g.rank, i / UCCL_EP_HEADER_WORDS, w.call.number) + sizeof(u64) * (i % UCCL_EP_HEADER_WORDS);
    *reinterpret_cast<u64*>(staging_address(g, word)) = *reinterpret_cast<const u64*>(word);
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * counts_layout.local_experts; i += blockDim.x) {
    u64 area = window_of(g, g.rank) + w.call.place + i / counts_layout.local_experts * counts_layout.area_len;
    u64 word = area + sizeof(u32) * (i % counts_layout.local_experts);
    *reinterpret_cast<u32*>(staging_address(g, word)) = *reinterpret_cast<const u32*>(word);
  }
  __syncthreads();
  __threadfence();
  if (is_awaited) set_verdict(g, w, ended);
}

// Compares a rank's header with this rank's, and keeps the words behind the agreed ones.
__device__ __forceinline__ void compare_headers(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w, u32 peer) {
  const u64* header = reinterpret_cast<const u64*>(staged_header(g, peer, w.call.number));
  u64 theirs[UCCL_EP_HEADER_WORDS];
  // All loads are in flight before the first comparison.
#pragma unroll
  for (u32 i = 0; i < UCCL_EP_HEADER_WORDS; i++) theirs[i] = header[i];
  u32 first = UCCL_EP_HEADER_WORDS;
  u64 expected = 0, seen = 0;
#pragma unroll
  for (u32 i = UCCL_EP_HEADER_WORDS; i-- > 0;) {
    if (i - c.agreed < EXTRA_WORDS) w.extras[i - c.agreed][peer] = theirs[i];
    if (i >= c.agreed || theirs[i] == c.header[i]) continue;
    first = i;
    expected = c.header[i];
    seen = theirs[i];
  }
  if (first == UCCL_EP_HEADER_WORDS) return;
  w.expected[peer] = expected;
  w.seen[peer] = seen;
  set_fault(w, UCCL_EP_DISAGREE, first, peer);
}

// Waits until every rank's data is there, and compares headers. Adds the nanoseconds of waiting to
// `waits`, by rank, unless it is null; data that is there already adds nothing.
__device__ __forceinline__ bool wait_for_data(const UcclEpGroup& g, const UcclEpCall& c, u64 waits, WaitState& w,
                                              const CountsLayout& counts_layout = {0, 0}) {
  u32 peer = threadIdx.x, ended = FAULT;
  bool is_awaited = peer < g.ranks && !is_masked(w.call, peer);
  if (is_awaited) {
    u64 number = w.call.number;
    u64 word = arrived_word(g, g.rank, peer, number);
    bool is_timed = waits != 0 && blockIdx.x == 0 && load_acquire(word) != flag_of(number);
    u64 began = is_timed ? now_ns() : 0;
    ended = wait_for_rank(g, w, word, flag_of(number));
    if (ended == ARRIVED && is_timed) reinterpret_cast<u64*>(waits)[peer] += since(began);
    if (ended == LATE) leave_out(g, w, peer);
  }
  if (g.via_host != 0 && blockIdx.x == 0) release_followers(g, w, counts_layout, is_awaited, ended);
  if (ended == ARRIVED) compare_headers(g, c, w, peer);
  return is_sound(g, c, w);
}

// Begins a block of a launch that receives, once every rank's data is there.
__device__ __forceinline__ bool begin_receive(const UcclEpGroup& g, const UcclEpCall& c, u64 waits, WaitState& w,
                                              const CountsLayout& counts_layout = {0, 0}) {
  return begin_block(g, c, STEP_RECEIVE, w) && wait_for_data(g, c, waits, w, counts_layout);
}

// Whether all other blocks of the launch, which count in a word, have come here; their writes are
// then visible here.
__device__ __forceinline__ bool is_last_block(u32* ended, WaitState& w) {
  // The barrier orders the whole block's reads and stores before the count. No fence for the
  // system: fences between GPUs run one after the other, and take a microsecond each. The last
  // block's release to peers is ordered behind the other blocks' writes, which it has seen.
  __syncthreads();
  if (threadIdx.x == 0) {
    w.is_last_block = count_up(ended) + 1 == gridDim.x;
    if (w.is_last_block) *ended = 0;
  }
  __syncthreads();
  return w.is_last_block != 0;
}

// The same at the end of a step of a call.
__device__ __forceinline__ bool is_last_block(const UcclEpGroup& g, u32 step, WaitState& w) {
  return is_last_block(&own_of(g)->ended[step][slot_of(w.call.number)], w);
}

// Sets a fault: the proxy has not taken a command for a rank.
__device__ __forceinline__ void set_push_fault(const UcclEpGroup& g, WaitState& w, u32 state, u32 rank) {
  w.expected[rank] = own_of(g)->pushed;
  w.seen[rank] = load_acquire(ring_of(g) + 8 * UCCL_EP_RING_TAIL);
  w.waited_ns = g.timeout_ns;
  set_fault(w, state, UCCL_EP_PUSH, rank);
}

// Has data in a far rank's mirror copied to its window: a piece for each lane, or none. All lanes
// of a warp take part.
__device__ __forceinline__ void send_far(const UcclEpGroup& g, WaitState& w, bool has, u32 rank, u64 from, u64 len) {
  u32 state = push(g, has, has ? copy_command(g, rank, from, len) : Command{});
  if (has && state != 0) set_push_fault(g, w, state, rank);
}

// Sets a word of a rank for each lane, or none. Earlier writes and sends to that rank are visible
// to a reader of the word. All lanes of a warp take part.
__device__ __forceinline__ void set_word(const UcclEpGroup& g, WaitState& w, bool has, u32 rank, u64 word, u64 value) {
  bool is_pushed = has && is_far(g, rank);
  if (has && !is_pushed) store_release(word, value);
  u32 state = push(g, is_pushed, is_pushed ? set_command(g, rank, word, value) : Command{});
  if (is_pushed && state != 0) set_push_fault(g, w, state, rank);
}

// Writes a header to each rank. `counts`: by rank, the word behind the agreed ones; or null. One
// block.
__device__ __forceinline__ void write_headers(const UcclEpGroup& g, const UcclEpCall& c, const UcclEpPlacement& call,
                                              const u32* counts) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < g.ranks * UCCL_EP_HEADER_WORDS; i += blockDim.x) {
    u32 to = i / UCCL_EP_HEADER_WORDS, word = i % UCCL_EP_HEADER_WORDS;
    if (is_masked(call, to)) continue;
    u64 value = counts != nullptr && word == c.agreed ? counts[to] : c.header[word];
    reinterpret_cast<u64*>(header_of(g, to, g.rank, call.number))[word] = value;
  }
}

// Sends far ranks their headers.
__device__ __forceinline__ void send_headers(const UcclEpGroup& g, WaitState& w) {
  u32 rank = threadIdx.x;
  bool has = rank < g.ranks && is_far(g, rank) && !is_masked(w.call, rank);
  u64 header = has ? header_of(g, rank, g.rank, w.call.number) : 0;
  send_far(g, w, has, rank, header, 8 * UCCL_EP_HEADER_WORDS);
}

// Sets `arrived` at every rank: this rank's data is there. Headers and counts were written before,
// and rows for far ranks were sent.
__device__ __forceinline__ void set_arrived(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  __syncthreads();
  u32 peer = threadIdx.x;
  // Whole warps, as `push` needs all lanes.
  if (peer - lane_of_thread() < g.ranks) {
    bool has_word = peer < g.ranks && !is_masked(w.call, peer);
    if (has_far(g)) send_headers(g, w);
    u64 word = has_word ? arrived_word(g, peer, g.rank, w.call.number) : 0;
    set_word(g, w, has_word, peer, word, flag_of(w.call.number));
  }
  if (has_far(g)) is_sound(g, c, w);
}

// The block with the fewest rows, for work that one block does.
__device__ __forceinline__ bool is_spare_block() { return block_number() + 1 == gridDim.x; }

// Ends a launch that sends: its last block sends the data in mirrors, by `send`, and sets
// `arrived` at every rank.
template <typename Send>
__device__ __forceinline__ void end_send(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w, Send send) {
  if (!is_last_block(g, STEP_SEND, w)) return;
  take_place(g, c, w.call);
  if (has_far(g)) {
    // Orders the commands behind the writes of all blocks.
    __threadfence_system();
    send();
  }
  set_arrived(g, c, w);
}

// The copy of a row: its source, and its destination at a rank, or 0 for no copy.
struct RowCopy {
  u64 from;
  u64 to;
  u32 rank;
};

// Sends far ranks their rows, of `len` bytes: `of(i)` for each `i` below `total`.
template <typename Of>
__device__ __forceinline__ void send_rows_far(const UcclEpGroup& g, WaitState& w, Of of, u32 total, u64 len) {
#pragma unroll 1
  for (u32 first = warp_of_thread() * LANES; first < total; first += blockDim.x) {
    u32 at = first + lane_of_thread();
    RowCopy row = {0, 0, 0};
    if (at < total) row = of(at);
    send_far(g, w, row.to != 0 && is_far(g, row.rank), row.rank, row.to, len);
  }
}

// Acknowledges the call: sets `taken` at every rank.
__device__ __forceinline__ void set_taken(const UcclEpGroup& g, const UcclEpCall& c, WaitState& w) {
  u32 peer = threadIdx.x;
  if (peer - lane_of_thread() < g.ranks) {
    // Clears the verdict for the next call in this slot.
    if (peer < g.ranks) *verdict_on(g, w.call, peer) = 0;
    bool has_word = peer < g.ranks && gets_ack(g, w.call, peer);
    u64 word = has_word ? taken_word(g, peer, g.rank, w.call.number) : 0;
    if (has_far(g)) __threadfence_system();
    set_word(g, w, has_word, peer, word, flag_of(w.call.number));
  }
  if (has_far(g)) is_sound(g, c, w);
}
