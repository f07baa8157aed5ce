// Where ranks reach each other's windows, a call's rows are sent in parts, and a part has a mark of its own, so that whoever takes them out
// waits for no more than what it takes. `arrived` then says that the counts are there. Of few tokens a record is a part, or a piece of a
// row that goes back; what else is said here of parts is of normal mode.
#pragma once

#include "ep_wait.cuh"
#include "ep_warp.cuh"

// Up to so many rows, each is a part of its own.
constexpr u32 FEW_ROWS = 1024;
// Fewer rows than this are cut into as many pieces, which several warps share: some two for each warp that sends on 24 blocks. A warp sends
// no more before the mark of its last piece is set, which takes long: with smaller pieces it waits more often.
constexpr u32 ENOUGH_PIECES = 256;
constexpr u32 MOST_PIECES = 8;

__device__ __forceinline__ u32 pieces_of(u32 rows, u32 enough) { return max(min(enough / max(rows, 1u), MOST_PIECES), 1u); }

// How rows are cut, which both sides find by their number: into parts of so many rows, and each row into pieces. A mark is of a piece
// of a part.
struct Cut {
  u32 rows;
  u32 pieces;
  u32 marks;
};

__device__ __forceinline__ Cut cut_of(u32 rows) {
  if (rows == 0) return {1, 1, 0};
  if (rows <= FEW_ROWS) {
    u32 pieces = pieces_of(rows, ENOUGH_PIECES);
    return {1, pieces, rows * pieces};
  }
  u32 of_part = max((rows + UCCL_EP_PARTS - 1) / UCCL_EP_PARTS, 2u);
  return {of_part, 1, (rows + of_part - 1) / of_part};
}

// The rows of a part, of all that there are, and who works on a mark's piece of them.
struct Part {
  u32 begin;
  u32 end;
  Team team;
};

__device__ __forceinline__ Part part_of(const Cut& cut, u32 mark, u32 rows) {
  u32 begin = mark / cut.pieces * cut.rows;
  return {begin, min(begin + cut.rows, rows), {0, 0, mark % cut.pieces, cut.pieces}};
}

// The blocks of a launch that send before they take out, as the others do from the start: the last ones. More would fill the link no
// better, and have all parts come late.
constexpr u32 SENDERS = 5;  // of twelve
constexpr u32 SENDERS_OF_ROWS_THAT_STAY = 7;

// Not by block_number(): where the blocks that begin first send, rows that stay take a tenth longer (two H200s).
__device__ __forceinline__ Share senders(u32 of_twelve) {
  u32 blocks = max(gridDim.x * of_twelve / 12, 1u);
  return {blockIdx.x + blocks - gridDim.x, blocks};
}

// The block of normal mode that does what one block has to; it sends.
__device__ __forceinline__ bool is_spare_sender() { return blockIdx.x + 1 == gridDim.x; }

// Has each of `count` things done by one warp, `take(i, look_ahead)`, which returns whether the warp goes on: warps take them in their order,
// whoever is free the next. A warp is told of each by `look(i)` before: of the first at once, and of the next when it looks ahead, which it
// does once. The count may be in memory of the block's, where a register is wanted for something else.
template <typename Look, typename Take>
__device__ __forceinline__ void share_out(const UcclEpGroup& g, const UcclEpPlaced& call, const u32& count, Look look, Take take) {
  u32* claimed = &own_of(g)->claimed[slot_of(call.number)];
  u32 claim = 0;
  if (lane_of_thread() == 0) claim = atomicAdd(claimed, 1u);
  u32 i = __shfl_sync(ALL, claim, 0);
  if (i < count) look(i);
#pragma unroll 1
  while (i < count) {
    u32 next = 0;
    // The next is on its way while this one is done.
    if (lane_of_thread() == 0) claim = atomicAdd(claimed, 1u);
    bool goes_on = take(i, [&] {
      next = __shfl_sync(ALL, claim, 0);
      if (next < count) look(next);
    });
    if (!goes_on) return;
    i = next;
  }
}

// The same of things that nothing has to be known of before.
template <typename Take>
__device__ __forceinline__ void share_out(const UcclEpGroup& g, const UcclEpPlaced& call, const u32& count, Take take) {
  share_out(
      g, call, count, [](u32) {},
      [&](u32 i, auto look_ahead) {
        bool goes_on = take(i);
        look_ahead();
        return goes_on;
      });
}

// Nobody claims anything of a call any more: the next that has its slot begins anew. The last block does it.
__device__ __forceinline__ void end_shares(const UcclEpGroup& g, const UcclEpPlaced& call) {
  if (threadIdx.x == 0) own_of(g)->claimed[slot_of(call.number)] = 0;
}

// A mark: the call's number, and which of the rows for its receiver the part has. No part has more than 63.
constexpr u32 MARK_FIRST = 6;

__device__ __forceinline__ u64 mark_of_part(u64 call, u32 first, u32 count) {
  return call << MARK_CALL | first << MARK_FIRST | count;
}
__device__ __forceinline__ u32 first_of_mark(u64 mark) { return static_cast<u32>(mark) >> MARK_FIRST & 0xffff; }
__device__ __forceinline__ u32 count_of_mark(u64 mark) { return static_cast<u32>(mark) & ((1u << MARK_FIRST) - 1); }

// The first mark of a call's parts from a rank.
__device__ __forceinline__ u64 marks_of(const UcclEpGroup& g, u32 at, u32 from, u64 call) {
  u64 nth = static_cast<u64>(slot_of(call)) * g.ranks + from;
  return g.windows[at] + g.marks_at + nth * UCCL_EP_PARTS * sizeof(u64);
}

// The first note of a call from a rank. A note is a word that says itself of which call it is, where a mark does, so that it needs no fence.
__device__ __forceinline__ u64 notes_of(const UcclEpGroup& g, u32 at, u32 from, u64 call) {
  u64 nth = static_cast<u64>(slot_of(call)) * g.ranks + from;
  return g.windows[at] + g.notes_at + nth * UCCL_EP_NOTES * sizeof(u64);
}

__device__ __forceinline__ u64 note_of(u64 call, u32 value) { return call << MARK_CALL | value; }
__device__ __forceinline__ u32 value_of_note(u64 note) { return static_cast<u32>(note) & ((1u << MARK_CALL) - 1); }

// Waits for a mark or a note of a rank, which `seen` then is. One thread does it.
__device__ __forceinline__ bool wait_for_note(const UcclEpGroup& g, Waiting& w, u32 peer, u64 word, u64& seen) {
  u64 call = w.call.number;
  Awaited note = {word, mark_of(call), peer, UCCL_EP_DATA, MARK_CALL};
  return wait_for_word(g, w, note, seen, [&](u64 told) { return told >> MARK_CALL == call; }) == CAME;
}

// Waits for marks, of which a lane has one or none. All lanes of a warp come here. Returns whether all are there; `seen` is what a
// lane's has.
__device__ __forceinline__ bool wait_for_parts(const UcclEpGroup& g, Waiting& w, bool has, u32 peer, u64 word,
                                               u64& seen) {
  seen = 0;
  bool are_there = __all_sync(ALL, !has || wait_for_note(g, w, peer, word, seen));
  __syncwarp();
  return are_there;
}

// A mark to be set.
struct Mark {
  u64 word;  // or 0: there is none
  u64 value;
};

// What the warps of a block that sends have sent, and are to be told of. Stores to another GPU take long until they are there: one warp
// waits for them, and sets the marks, while the others go on.
struct Outgoing {
  static constexpr u32 WARPS = UCCL_EP_THREADS / LANES;

  Mark marks[WARPS][UCCL_EP_MOST_RANKS];  // of a warp's last part
  u32 counts[WARPS];
  u32 sent[WARPS];   // parts, shifted by one; and whether there are no more
  u32 told[WARPS];   // parts
};

constexpr u32 IS_OVER = 1;

// A warp has sent its `nth` part: `count` marks are to be set, `of(i)`. It waits until those of its last one are.
template <typename Of>
__device__ __forceinline__ void tell_later(Outgoing& out, u32 nth, u32 count, Of of) {
  u32 warp = warp_of_thread();
  while (look_shared(out.told[warp]) != nth) relax();
  __syncwarp();
#pragma unroll 1
  for (u32 i = lane_of_thread(); i < count; i += LANES) out.marks[warp][i] = of(i);
  if (lane_of_thread() == 0) out.counts[warp] = count;
  __syncwarp();
  if (lane_of_thread() == 0) say_to_block(out.sent[warp], (nth + 1) << 1);
}

// One warp tells of what so many others send, of which a lane has one, until they have sent all.
__device__ __forceinline__ void tell_parts(Outgoing& out, u32 senders) {
  u32 lane = lane_of_thread(), told = 0;
  for (bool is_over = false; !is_over;) {
    u32 sent = lane < senders ? look_shared(out.sent[lane]) : IS_OVER;
    bool has = sent >> 1 != told;
    is_over = __all_sync(ALL, (sent & IS_OVER) != 0);
    if (!__any_sync(ALL, has)) {
      relax();
      continue;
    }
    // What the warps have stored, and said so, is there for whoever sees what is set behind this.
    __threadfence_system();
    if (has) {
#pragma unroll 1
      for (u32 i = 0; i < out.counts[lane]; i++) {
        Mark mark = out.marks[lane][i];
        if (mark.word != 0) store_relaxed(mark.word, mark.value);
      }
      say_to_block(out.told[lane], ++told);
    }
  }
}

// Sends `count` parts, each by `send(part, nth)`, which tells of it later. All warps of the blocks that send come here.
template <typename Send>
__device__ __forceinline__ void send_parts(Outgoing& out, u32 count, const Share& share, Send send) {
  u32 warp = warp_of_thread(), warps = warps_of_block() - 1;
  if (lane_of_thread() == 0) out.sent[warp] = out.told[warp] = 0;
  __syncthreads();
  if (warp == warps) {
    tell_parts(out, warps);
    return;
  }
  u32 nth = 0;
#pragma unroll 1
  for (u32 part = share.block + warp * share.blocks; part < count; part += share.blocks * warps) send(part, nth++);
  __syncwarp();
  if (lane_of_thread() == 0) say_to_block(out.sent[warp], nth << 1 | IS_OVER);
}
