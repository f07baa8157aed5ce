// Where ranks reach each other's windows, a call's rows are sent in chunks. Each chunk has a ready
// flag, so that a receiver waits only for the rows that it takes; `arrived` then says
// that the counts are there. In a small batch a chunk is a record, or a piece of a row that goes
// back; all else in this file about chunks is of normal mode.
#pragma once

#include "wait.cuh"
#include "warp.cuh"

// Up to so many rows, each row is a chunk of its own.
constexpr u32 MAX_SINGLE_ROWS = 1024;
// Fewer rows than this are cut into as many pieces, which several warps share: about two for each
// warp that sends on 24 blocks. A warp sends its next piece only when the flag of its last one is
// set, which takes long: with smaller pieces it would wait more often.
constexpr u32 ENOUGH_PIECES = 256;
constexpr u32 MAX_PIECES = 8;

__device__ __forceinline__ u32 pieces_of(u32 rows, u32 enough) {
  return max(min(enough / max(rows, 1u), MAX_PIECES), 1u);
}

// How rows are cut into chunks; both sides compute it from their number: so many rows in a chunk,
// and so many pieces in a row. Each piece of a chunk has a flag.
struct Chunking {
  u32 rows;
  u32 pieces;
  u32 flags;
};

__device__ __forceinline__ Chunking chunking_of(u32 rows) {
  if (rows == 0) return {1, 1, 0};
  if (rows <= MAX_SINGLE_ROWS) {
    u32 pieces = pieces_of(rows, ENOUGH_PIECES);
    return {1, pieces, rows * pieces};
  }
  u32 of_chunk = max((rows + UCCL_EP_CHUNKS - 1) / UCCL_EP_CHUNKS, 2u);
  return {of_chunk, 1, (rows + of_chunk - 1) / of_chunk};
}

// A chunk's rows, among all rows, and the warps that work on a flag's piece of them.
struct Chunk {
  u32 begin;
  u32 end;
  Team team;
};

__device__ __forceinline__ Chunk chunk_of(const Chunking& chunking, u32 flag, u32 rows) {
  u32 begin = flag / chunking.pieces * chunking.rows;
  return {begin, min(begin + chunking.rows, rows), {0, 0, flag % chunking.pieces, chunking.pieces}};
}

// The last blocks of a launch send before they take out; the others take out from the start. More
// senders would fill the link no better, and delay all chunks.
constexpr u32 SENDERS = 5;  // of twelve
constexpr u32 ZERO_COPY_SENDERS = 7;

// Not by block_number(): if the blocks that begin first send, zero-copy rows take a tenth longer
// (two H200s).
__device__ __forceinline__ Share senders(u32 of_twelve) {
  u32 blocks = max(gridDim.x * of_twelve / 12, 1u);
  return {blockIdx.x + blocks - gridDim.x, blocks};
}

// The block of normal mode for work that one block does; it also sends.
__device__ __forceinline__ bool is_spare_sender() { return blockIdx.x + 1 == gridDim.x; }

// Warps claim `count` items in order from a shared counter. `take(i, look_ahead)` does an item, and
// returns whether the warp continues. `announce(i)` announces an item to a warp: the first at once,
// the next when `take` calls `look_ahead`, once. The count may be in shared memory, to spare a
// register.
template <typename Announce, typename Take>
__device__ __forceinline__ void share_out(const UcclEpGroup& g, const PlacedCall& call, const u32& count,
                                          Announce announce, Take take) {
  u32* claimed = &own_of(g)->claimed[slot_of(call.number)];
  u32 claim = 0;
  if (lane_of_thread() == 0) claim = atomicAdd(claimed, 1u);
  u32 i = __shfl_sync(ALL, claim, 0);
  if (i < count) announce(i);
#pragma unroll 1
  while (i < count) {
    u32 next = 0;
    // The next claim is in flight while this item is done.
    if (lane_of_thread() == 0) claim = atomicAdd(claimed, 1u);
    bool continues = take(i, [&] {
      next = __shfl_sync(ALL, claim, 0);
      if (next < count) announce(next);
    });
    if (!continues) return;
    i = next;
  }
}

// The same for items that need no announcement.
template <typename Take>
__device__ __forceinline__ void share_out(const UcclEpGroup& g, const PlacedCall& call, const u32& count, Take take) {
  share_out(
      g, call, count, [](u32) {},
      [&](u32 i, auto look_ahead) {
        bool continues = take(i);
        look_ahead();
        return continues;
      });
}

// Resets the claims for the next call in this slot: all items are claimed. The last block does it.
__device__ __forceinline__ void end_shares(const UcclEpGroup& g, const PlacedCall& call) {
  if (threadIdx.x == 0) own_of(g)->claimed[slot_of(call.number)] = 0;
}

// A chunk's ready flag: the call's number, the index of the chunk's first row among those for its
// receiver, and the number of rows, 63 at most.
constexpr u32 FLAG_FIRST = 6;

__device__ __forceinline__ u64 chunk_flag(u64 call, u32 first, u32 count) {
  return call << FLAG_CALL | first << FLAG_FIRST | count;
}
__device__ __forceinline__ u32 first_of_flag(u64 flag) { return static_cast<u32>(flag) >> FLAG_FIRST & 0xffff; }
__device__ __forceinline__ u32 count_of_flag(u64 flag) { return static_cast<u32>(flag) & ((1u << FLAG_FIRST) - 1); }

// The first flag of a call's chunks from a rank.
__device__ __forceinline__ u64 flags_of(const UcclEpGroup& g, const PlacedCall& call, u32 at, u32 from) {
  u64 nth = static_cast<u64>(slot_of(call.number)) * g.ranks + from;
  return call.row_windows[at] + g.flags_at + nth * UCCL_EP_CHUNKS * sizeof(u64);
}

// The address of a call's first tagged word from a rank. A tagged word has the call's number, at
// the same bits as a flag, and a value in one word, so that it needs no fence.
__device__ __forceinline__ u64 tagged_words_of(const UcclEpGroup& g, const PlacedCall& call, u32 at, u32 from) {
  u64 nth = static_cast<u64>(slot_of(call.number)) * g.ranks + from;
  return call.row_windows[at] + g.tagged_at + nth * UCCL_EP_TAGGED_WORDS * sizeof(u64);
}

__device__ __forceinline__ u64 tagged_word(u64 call, u32 value) { return call << FLAG_CALL | value; }
__device__ __forceinline__ u32 value_of_tagged(u64 word) { return static_cast<u32>(word) & ((1u << FLAG_CALL) - 1); }

// Waits for a flag or a tagged word of a rank, and returns it in `seen`. One thread.
__device__ __forceinline__ bool wait_for_tagged_word(const UcclEpGroup& g, WaitState& w, u32 peer, u64 word,
                                                     u64& seen) {
  u64 call = w.call.number;
  WordWait wait = {word, flag_of(call), peer, UCCL_EP_DATA, FLAG_CALL};
  return wait_for_word(g, w, wait, seen, [&](u64 published) { return published >> FLAG_CALL == call; }) == ARRIVED;
}

// Waits for flags, one for each lane or none. All lanes of a warp take part. Returns whether all
// are there; `seen` is the lane's flag.
__device__ __forceinline__ bool wait_for_flags(const UcclEpGroup& g, WaitState& w, bool has, u32 peer, u64 word,
                                               u64& seen) {
  seen = 0;
  bool are_there = __all_sync(ALL, !has || wait_for_tagged_word(g, w, peer, word, seen));
  __syncwarp();
  return are_there;
}

// A ready flag to be set.
struct ReadyFlag {
  u64 word;  // or 0: there is none
  u64 value;
};

// Flags of chunks that the warps of a block have sent. Stores to another GPU take long to arrive:
// one warp waits for them, and sets the flags, while the others go on.
struct FlagQueue {
  static constexpr u32 WARPS = UCCL_EP_THREADS / LANES;

  ReadyFlag flags[WARPS][RANKS];  // of a warp's last chunk
  u32 counts[WARPS];
  u32 sent[WARPS];       // chunks, shifted by one; the low bit: there are no more
  u32 published[WARPS];  // chunks whose flags are set
};

constexpr u32 IS_OVER = 1;

// A warp has sent its `nth` chunk: hands over its `count` flags, `of(i)`. First waits until the
// flags of its chunk before are set.
template <typename Of>
__device__ __forceinline__ void hand_over_flags(FlagQueue& out, u32 nth, u32 count, Of of) {
  u32 warp = warp_of_thread();
  while (load_shared(out.published[warp]) != nth) relax();
  __syncwarp();
#pragma unroll 1
  for (u32 i = lane_of_thread(); i < count; i += LANES) out.flags[warp][i] = of(i);
  if (lane_of_thread() == 0) out.counts[warp] = count;
  __syncwarp();
  if (lane_of_thread() == 0) store_to_block(out.sent[warp], (nth + 1) << 1);
}

// One warp sets the flags of so many sending warps, one for each lane, until all have sent their
// last chunk.
__device__ __forceinline__ void publish_flags(FlagQueue& out, u32 senders) {
  u32 lane = lane_of_thread(), published = 0;
  for (bool is_over = false; !is_over;) {
    u32 sent = lane < senders ? load_shared(out.sent[lane]) : IS_OVER;
    bool has = sent >> 1 != published;
    is_over = __all_sync(ALL, (sent & IS_OVER) != 0);
    if (!__any_sync(ALL, has)) {
      relax();
      continue;
    }
    // Orders the flags behind the data of the warps that have handed them over.
    __threadfence_system();
    if (has) {
#pragma unroll 1
      for (u32 i = 0; i < out.counts[lane]; i++) {
        ReadyFlag flag = out.flags[lane][i];
        if (flag.word != 0) store_relaxed(flag.word, flag.value);
      }
      store_to_block(out.published[lane], ++published);
    }
  }
}

// Sends `count` chunks, each by `send(chunk, nth)`, which hands over its flags by
// `hand_over_flags`. All warps of the sending blocks take part.
template <typename Send>
__device__ __forceinline__ void send_chunks(FlagQueue& out, u32 count, const Share& share, Send send) {
  u32 warp = warp_of_thread(), warps = warps_of_block() - 1;
  if (lane_of_thread() == 0) out.sent[warp] = out.published[warp] = 0;
  __syncthreads();
  if (warp == warps) {
    publish_flags(out, warps);
    return;
  }
  u32 nth = 0;
#pragma unroll 1
  for (u32 chunk = share.block + warp * share.blocks; chunk < count; chunk += share.blocks * warps) send(chunk, nth++);
  __syncwarp();
  if (lane_of_thread() == 0) store_to_block(out.sent[warp], nth << 1 | IS_OVER);
}
