// Ranks whose windows this GPU does not reach: it fills mirrors of them, in memory of the host's, and pushes commands to a ring there. A
// proxy carries them out, as crates/uccl-ep/src/far has it.
#pragma once

#include "ep.cuh"
#include "ep_warp.cuh"

// A ring: where its proxy says what it has popped, and where the slots begin, in words.
constexpr u32 RING_TAIL = 16;
constexpr u32 RING_SLOTS = 32;

// A command's parts.
constexpr u32 COMMAND_UNIT = 32;
constexpr u64 COMMAND_LAP = 1ull << 63;
constexpr u64 COMMAND_SIGNALS = 1ull << 62;
constexpr u32 COMMAND_PEER_AT = 46;
constexpr u32 COMMAND_TARGET_AT = 31;

struct Command {
  u64 first, second;
};

__device__ __forceinline__ bool is_far(const UcclEpGroup& g, u32 rank) { return (g.far >> rank & 1) != 0; }

// Copies what lies at an address of a rank's mirror to the same place in its window.
__device__ __forceinline__ Command copy_command(const UcclEpGroup& g, u32 rank, u64 from, u64 len) {
  u64 target = (from - g.windows[rank]) / COMMAND_UNIT;
  return {static_cast<u64>(rank) << COMMAND_PEER_AT | (from - g.mirrors) / COMMAND_UNIT,
          target << COMMAND_TARGET_AT | (len + COMMAND_UNIT - 1) / COMMAND_UNIT};
}

// Sets the word that has an address in a rank's mirror, when all that was copied before is there.
__device__ __forceinline__ Command set_command(const UcclEpGroup& g, u32 rank, u64 word, u64 value) {
  return {COMMAND_SIGNALS | static_cast<u64>(rank) << COMMAND_PEER_AT | (word - g.windows[rank]) / 8, value};
}

// Whether the ring has room for a command with this number. The tail as it was seen last is in this GPU's memory.
__device__ __forceinline__ bool ring_has(const UcclEpGroup& g, u64 number) {
  u64 seen = g.own + offsetof(UcclEpOwn, popped);
  if (number - load_acquire(seen) < g.ring_slots) return true;
  u64 tail = load_acquire(g.ring + 8 * RING_TAIL);
  store_release(seen, tail);
  return number - tail < g.ring_slots;
}

// Takes numbers for `count` commands, at most as many as the ring has slots, once it has room for all. If the host ends all waits, or time
// is over, the state of a status that says so, and no number is taken.
__device__ __forceinline__ u32 claim(const UcclEpGroup& g, u32 count, u64& number) {
  constexpr u32 LOOKS = 32;
  u64* pushed = &reinterpret_cast<UcclEpOwn*>(g.own)->pushed;
  u64 began = now_ns();
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    number = load_acquire(reinterpret_cast<u64>(pushed));
    if (ring_has(g, number + count - 1)) {
      if (atomicCAS(pushed, number, number + count) == number) return 0;
      continue;
    }
    if (looks % LOOKS == 0) {
      if (look(g.status) != 0) return UCCL_EP_POISONED;
      // The clock may step back by a little.
      u64 waited = now_ns() - began;
      if (static_cast<long long>(waited) >= 0 && waited > g.timeout_ns) return UCCL_EP_OVERDUE;
    }
    relax();
  }
}

// Puts a command into its slot: both halves say in which lap.
__device__ __forceinline__ void put(const UcclEpGroup& g, u64 number, Command c) {
  u64 lap = (number & g.ring_slots) == 0 ? COMMAND_LAP : 0;
  u64 slot = g.ring + 8 * (RING_SLOTS + 2 * (number & (g.ring_slots - 1)));
  store_pair(slot, c.first | lap, c.second | lap);
}

// Pushes the commands of those lanes of a warp that have one; all of the warp come here. What these lanes have fenced before is there for
// the proxy. Not 0: as `claim` says, and nothing was pushed.
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
