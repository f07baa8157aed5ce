// Ranks with windows that this GPU does not reach. It fills mirrors of the windows, in host memory,
// and pushes commands to a ring there. A proxy carries them out, as uccl-ep's module `far` says.
#pragma once

#include "addresses.cuh"
#include "warp.cuh"

struct Command {
  u64 first, second;
};

// A command that copies data in a rank's mirror to the same place in its window.
__device__ __forceinline__ Command copy_command(const UcclEpGroup& g, u32 rank, u64 from, u64 len) {
  u64 target = (from - window_of(g, rank)) / UCCL_EP_COMMAND_UNIT;
  return {static_cast<u64>(rank) << UCCL_EP_COMMAND_PEER_AT | (from - mirrors_of(g)) / UCCL_EP_COMMAND_UNIT,
          target << UCCL_EP_COMMAND_TARGET_AT | (len + UCCL_EP_COMMAND_UNIT - 1) / UCCL_EP_COMMAND_UNIT};
}

// A command that sets the window's word at a mirror's address, once all data copied before is
// there.
__device__ __forceinline__ Command set_command(const UcclEpGroup& g, u32 rank, u64 word, u64 value) {
  return {UCCL_EP_COMMAND_SIGNALS | static_cast<u64>(rank) << UCCL_EP_COMMAND_PEER_AT | (word - window_of(g, rank)) / 8,
          value};
}

// Whether the ring has room for the command with this number. The tail last seen is kept in this
// GPU's memory.
__device__ __forceinline__ bool ring_has(const UcclEpGroup& g, u64 number) {
  u64 seen = g.own + offsetof(UcclEpOwnState, popped);
  if (number - load_acquire(seen) < ring_slots_of(g)) return true;
  u64 tail = load_acquire(ring_of(g) + 8 * UCCL_EP_RING_TAIL);
  store_release(seen, tail);
  return number - tail < ring_slots_of(g);
}

// Takes numbers for `count` commands, at most as many as the ring has slots, once it has room for
// all. Returns 0, or the state to report, without numbers, if the host ends all waits or the
// deadline passes.
__device__ __forceinline__ u32 claim(const UcclEpGroup& g, u32 count, u64& number) {
  constexpr u32 LOOKS = 32;
  u64* pushed = &reinterpret_cast<UcclEpOwnState*>(g.own)->pushed;
  u64 began = now_ns();
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    number = load_acquire(reinterpret_cast<u64>(pushed));
    if (ring_has(g, number + count - 1)) {
      if (atomicCAS(pushed, number, number + count) == number) return 0;
      continue;
    }
    if (looks % LOOKS == 0) {
      if (load_word(g.status) != 0) return UCCL_EP_POISONED;
      // The clock may step back by a little.
      u64 waited = now_ns() - began;
      if (static_cast<long long>(waited) >= 0 && waited > g.timeout_ns) return UCCL_EP_OVERDUE;
    }
    relax();
  }
}

// Puts a command into its slot: both halves carry the lap's bit.
__device__ __forceinline__ void put(const UcclEpGroup& g, u64 number, Command c) {
  u64 lap = (number & ring_slots_of(g)) == 0 ? UCCL_EP_COMMAND_LAP : 0;
  u64 slot = ring_of(g) + 8 * (UCCL_EP_RING_SLOTS + 2 * (number & (ring_slots_of(g) - 1)));
  store_pair(slot, c.first | lap, c.second | lap);
}

// Pushes the commands of those lanes of a warp that have one; all lanes take part. Writes that
// these lanes have fenced are visible to the proxy. Returns 0, or a state of `claim`, with nothing
// pushed.
__device__ __forceinline__ u32 push(const UcclEpGroup& g, bool has, Command c) {
  u32 all = __ballot_sync(ALL, has);
  if (all == 0) return 0;
  int first = __ffs(static_cast<int>(all)) - 1;
  u64 number = 0;
  u32 state = 0;
  if (static_cast<int>(lane_of_thread()) == first) state = claim(g, __popc(all), number);
  number = __shfl_sync(ALL, number, first);
  state = __shfl_sync(ALL, state, first);
  if (has && state == 0) put(g, number + __popc(all & lanes_before()), c);
  return state;
}
