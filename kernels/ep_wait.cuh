// What ranks say to each other in a call, as crates/uccl-ep/src/protocol has it: marks, waiting for them, telling them.
#pragma once

#include "ep.cuh"

// A window begins with lines of 64 bytes for each rank: `arrived`, `taken`, its fault, and a header for each call.
constexpr u32 LINE = 64;
constexpr u32 LINES = 3 + UCCL_EP_SLOTS;

__device__ __forceinline__ u64 line_of(const UcclEpGroup& g, u32 at, u32 about, u32 line) {
  return g.windows[at] + (about * LINES + line) * LINE;
}

__device__ __forceinline__ u32 slot_of(u64 call) {
  return static_cast<u32>(call % UCCL_EP_SLOTS);
}

__device__ __forceinline__ u64 arrived_word(const UcclEpGroup& g, u32 at, u32 from, u64 call) {
  return line_of(g, at, from, 0) + 8 * slot_of(call);
}

__device__ __forceinline__ u64 taken_word(const UcclEpGroup& g, u32 at, u32 by, u64 call) {
  return line_of(g, at, by, 1) + 8 * slot_of(call);
}

__device__ __forceinline__ u64 fault_word(const UcclEpGroup& g, u32 at, u32 of) {
  return line_of(g, at, of, 2);
}

__device__ __forceinline__ u64 header_of(const UcclEpGroup& g, u32 at, u32 of, u64 call) {
  return line_of(g, at, of, 3 + slot_of(call));
}

// The only round of a call, which is the last; of `taken`, the end of the call.
__device__ __forceinline__ u64 mark_of(u64 call) { return call << 17 | 1; }
__device__ __forceinline__ u64 call_of(u64 mark) { return mark >> 17; }

__device__ __forceinline__ UcclEpOwn* own_of(const UcclEpGroup& g) {
  return reinterpret_cast<UcclEpOwn*>(g.own);
}

__device__ __forceinline__ UcclEpStatus* status_of(const UcclEpGroup& g) {
  return reinterpret_cast<UcclEpStatus*>(g.status);
}

// What a block's threads tell each other about a wait or a fault.
struct Waiting {
  u32 state;  // 0, one of the states of a status, or STOPPED
  u32 what;
  u64 late;
  u64 waited_ns;
  u64 expected[UCCL_EP_MOST_RANKS];
  u64 seen[UCCL_EP_MOST_RANKS];
  u32 is_last_block;
};

// Another block has failed, or an earlier call.
constexpr u32 STOPPED = 100;

// How the block stands, the same for all its threads: nobody goes on to change it before all have read it.
__device__ __forceinline__ u32 agreed_state(const Waiting& w) {
  __syncthreads();
  u32 state = w.state;
  __syncthreads();
  return state;
}

// The block begins: nothing has gone wrong, unless an earlier call has failed.
__device__ __forceinline__ bool begin_block(const UcclEpGroup& g, Waiting& w) {
  if (threadIdx.x == 0) {
    w.state = look(g.own) != 0 ? STOPPED : 0;
    w.what = 0;
    w.late = 0;
    w.waited_ns = 0;
  }
  return agreed_state(w) == 0;
}

// One thread has found a fault of a rank. The first decides what the block reports.
__device__ __forceinline__ void note_fault(Waiting& w, u32 state, u32 what, u32 peer) {
  u32 before = atomicCAS(&w.state, 0u, state);
  if (before != 0 && before != state) return;
  if (before == 0) w.what = what;
  atomicOr(&w.late, 1ull << peer);
}

// Whether the block goes on. If not, the first block that fails tells the host and the peers.
__device__ __forceinline__ bool is_sound(const UcclEpGroup& g, const UcclEpCall& c, Waiting& w) {
  u32 state = agreed_state(w);
  if (state == 0) return true;
  if (threadIdx.x == 0 && state != STOPPED && atomicExch(&own_of(g)->has_failed, 1u) == 0) {
    UcclEpStatus* status = status_of(g);
    status->phase = c.phase;
    status->what = w.what;
    status->call = c.number;
    status->late = w.late;
    status->waited_ns = w.waited_ns;
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) {
      if ((w.late >> rank & 1) == 0) continue;
      status->expected[rank] = w.expected[rank];
      status->seen[rank] = w.seen[rank];
    }
    __threadfence_system();
    *const_cast<volatile u32*>(&status->state) = state;
    __threadfence_system();
#pragma unroll 1
    for (u32 rank = 0; rank < g.ranks; rank++) store_release(fault_word(g, rank, g.rank), c.number);
  }
  return false;
}

// Waits until a word has the mark, or, of `taken`, that of a later call. False if that has no end in sight.
__device__ __forceinline__ bool wait_for_mark(const UcclEpGroup& g, Waiting& w, u64 word, u64 mark,
                                              u32 what) {
  constexpr u32 LOOKS = 32;
  u32 peer = threadIdx.x;
  u64 began = now_ns(), seen;
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    seen = load_acquire(word);
    if (seen == mark || (what == UCCL_EP_ROOM && call_of(seen) > call_of(mark))) return true;
    if (looks % LOOKS == 0) {
      u64 waited = now_ns() - began;
      u64 fault = load_acquire(fault_word(g, g.rank, peer));
      w.expected[peer] = mark;
      w.seen[peer] = fault != 0 ? fault : seen;
      if (fault != 0) {
        note_fault(w, UCCL_EP_GAVE_UP, what, peer);
      } else if (look(g.status) != 0) {
        note_fault(w, UCCL_EP_POISONED, what, peer);
      } else if (waited > g.timeout_ns) {
        w.waited_ns = waited;
        note_fault(w, UCCL_EP_OVERDUE, what, peer);
      } else if (look(g.own) != 0) {
        atomicCAS(&w.state, 0u, STOPPED);
      } else if (look_shared(w.state) == UCCL_EP_OVERDUE) {
        // Another rank is late: so is this one.
        note_fault(w, UCCL_EP_OVERDUE, what, peer);
      }
      if (look_shared(w.state) != 0) return false;
    }
    relax();
  }
}

// Waits until every rank has ended the calls that had this call's place. All threads of the block come here.
__device__ __forceinline__ bool wait_for_room(const UcclEpGroup& g, const UcclEpCall& c,
                                              Waiting& w) {
  if (!begin_block(g, w)) return false;
  u32 peer = threadIdx.x;
  if (peer < g.ranks) {
#pragma unroll 1
    for (u32 i = 0; i < c.after_count; i++) {
      u64 word = taken_word(g, g.rank, peer, c.after[i]);
      if (!wait_for_mark(g, w, word, mark_of(c.after[i]), UCCL_EP_ROOM)) break;
    }
  }
  return is_sound(g, c, w);
}

// Waits until every rank's data is there, and compares what ranks tell of the call.
__device__ __forceinline__ bool wait_for_data(const UcclEpGroup& g, const UcclEpCall& c,
                                              Waiting& w) {
  if (!begin_block(g, w)) return false;
  u32 peer = threadIdx.x;
  if (peer < g.ranks) {
    u64 word = arrived_word(g, g.rank, peer, c.number);
    if (wait_for_mark(g, w, word, mark_of(c.number), UCCL_EP_DATA)) {
      const u64* theirs = reinterpret_cast<const u64*>(header_of(g, g.rank, peer, c.number));
#pragma unroll 1
      for (u32 i = 0; i < c.agreed; i++) {
        if (theirs[i] == c.header[i]) continue;
        w.expected[peer] = c.header[i];
        w.seen[peer] = theirs[i];
        note_fault(w, UCCL_EP_DISAGREE, i, peer);
        break;
      }
    }
  }
  return is_sound(g, c, w);
}

// Whether all other blocks have come to the end of a step; what they wrote is then visible here.
__device__ __forceinline__ bool is_last_block(const UcclEpGroup& g, const UcclEpCall& c, u32 step,
                                              Waiting& w) {
  // The barrier and then the fence put the whole block's reads and stores before the count.
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* ended = &own_of(g)->ended[step][slot_of(c.number)];
    __threadfence_system();
    w.is_last_block = atomicAdd(ended, 1u) + 1 == gridDim.x;
    if (w.is_last_block) *ended = 0;
    __threadfence_system();
  }
  __syncthreads();
  return w.is_last_block != 0;
}

constexpr u32 STEP_SEND = 0;
constexpr u32 STEP_RECEIVE = 1;

// Tells every rank that this one's data is there. Headers and counts were written before.
__device__ __forceinline__ void tell_arrived(const UcclEpGroup& g, const UcclEpCall& c) {
  __syncthreads();
  if (threadIdx.x < g.ranks) {
    __threadfence_system();
    store_release(arrived_word(g, threadIdx.x, g.rank, c.number), mark_of(c.number));
  }
}

// Tells every rank that this one has ended the call.
__device__ __forceinline__ void tell_taken(const UcclEpGroup& g, const UcclEpCall& c) {
  if (threadIdx.x < g.ranks) {
    __threadfence_system();
    store_release(taken_word(g, threadIdx.x, g.rank, c.number), mark_of(c.number));
  }
}
