// What the kernels of expert parallelism take. Mirrored in crates/uccl-ep/src/cuda/params.rs: `cargo xtask kernels
// --check` compares sizes and offsets.
#pragma once

#include <machine.cuh>

// A rank is a bit of a word.
constexpr u32 UCCL_EP_MOST_RANKS = 64;
constexpr u32 UCCL_EP_MOST_EXPERTS = 2048;
// A choice is a lane of a warp.
constexpr u32 UCCL_EP_MOST_TOP_K = 32;
// Of few tokens, which each block of `send` looks at.
constexpr u32 UCCL_EP_FEW_TOKENS = 512;
constexpr u32 UCCL_EP_FEW_CHOICES = 4096;
// Positions of a token among those of an expert have 16 bits while they are counted.
constexpr u32 UCCL_EP_MOST_TOKENS = 65535;
// Calls that may be under way.
constexpr u32 UCCL_EP_SLOTS = 8;
// Calls of the same length that lie behind each other in a pool.
constexpr u32 UCCL_EP_ROUND = 4;
constexpr u32 UCCL_EP_HEADER = 8;
// Twice as many would have half the registers, which hold less of what is under way.
constexpr u32 UCCL_EP_THREADS = 512;
// Packing rows, and summing packed ones, takes more work than memory. Two sums of sixteen values need more registers than more threads would have.
constexpr u32 UCCL_EP_PACKING_THREADS = 1024;
constexpr u32 UCCL_EP_UNPACKING_THREADS = 896;
constexpr u32 UCCL_EP_LAYOUT_THREADS = 512;
// Parts of a call, from each rank, that have marks of their own: see ep_parts.cuh.
constexpr u32 UCCL_EP_PARTS = 2048;
// Words that a rank tells another of a call of few tokens besides: counts, or weights behind the first.
constexpr u32 UCCL_EP_NOTES = 1 + 8192;
// Tokens that a block of `layout` counts.
constexpr u32 UCCL_EP_CHUNK = 128;

// Words that only this rank's kernels use: whether a call has failed, how many blocks have come to the end of a step, where the last
// calls are, and which ranks are left out.
struct UcclEpOwn {
  u32 has_failed;
  u32 laid_out;  // blocks that have come to the end of `layout`
  u32 zero[14];
  u32 ended[2][UCCL_EP_SLOTS];
  u32 claimed[UCCL_EP_SLOTS];  // of the last calls, how many of the parts that are taken or summed warps have claimed
  u64 calls;                  // how many calls have begun
  u64 next;                   // offset in the pool at which the next may begin
  u64 begins[UCCL_EP_SLOTS];  // of the last calls, by number: offsets
  u64 ends[UCCL_EP_SLOTS];
  u64 masked;                                       // a bit for each rank that is left out
  u32 verdicts[UCCL_EP_SLOTS][UCCL_EP_MOST_RANKS];  // of the last calls: whether a rank's data came in time
  u64 pushed;                                       // commands for the proxy, in all
  u64 popped;                                       // how many of them the proxy had taken when that was looked at last
  u64 room;                                         // the last call that the first block has found room for, where it alone looks
  u64 owed;                                         // the last call, if its end is told when the next begins; or 0
};

// Leaves ranks out, lets others take part again, and tells which are left out.
struct UcclEpMask {
  u64 own;
  u64 set;     // a bit for each rank
  u64 clear;
  u64 status;  // i32 by rank, or null
  u32 ranks;
  u32 zero;
};

// What the host is told, in its memory. `state` is set last.
struct UcclEpStatus {
  u32 poison;  // the host ends all waits
  u32 state;
  u32 phase;
  u32 what;
  u64 call;
  u64 late;  // a bit for each rank that it is about
  u64 waited_ns;
  u64 lost;  // a bit for each rank that is not there any more: the host sets it
  u64 expected[UCCL_EP_MOST_RANKS];
  u64 seen[UCCL_EP_MOST_RANKS];
};

// UcclEpStatus::state.
constexpr u32 UCCL_EP_OVERDUE = 1;
constexpr u32 UCCL_EP_GAVE_UP = 2;
constexpr u32 UCCL_EP_POISONED = 3;
constexpr u32 UCCL_EP_DISAGREE = 4;
constexpr u32 UCCL_EP_WRONG_CHOICE = 5;
constexpr u32 UCCL_EP_NO_ROOM = 6;
constexpr u32 UCCL_EP_LOST = 7;

// UcclEpStatus::what, of an overdue call.
constexpr u32 UCCL_EP_DATA = 0;
constexpr u32 UCCL_EP_ROOM = 1;
constexpr u32 UCCL_EP_PUSH = 2;  // the proxy takes no commands

struct UcclEpGroup {
  u64 windows[UCCL_EP_MOST_RANKS];  // by rank; the mirrors of those that are far
  u64 home;                         // this rank's window; or, where that is in the host's memory, as much of the GPU's: see ep_home.cuh
  u64 far;                          // a bit for each rank whose window is not reached
  u64 mirrors;                      // where commands' sources are counted from
  u64 ring;                         // of commands
  u64 own;
  u64 status;
  u64 timeout_ns;
  u64 pool_at;   // in bytes from the start of a window
  u64 pool;      // bytes
  u64 marks_at;  // of parts, as `pool_at`; 0: there are none
  u64 notes_at;  // as `marks_at`
  u32 rank;
  u32 ranks;
  u32 masks_late;  // whether a late rank is left out, and the call goes on
  u32 ring_slots;
  u32 by_host;     // whether windows are in the host's memory, at which one block looks for all
  u32 zero;
};

// What a call is: the same each time that a graph repeats it.
struct UcclEpCall {
  u64 placed;                  // UcclEpPlaced: what it is this time, which its later launches find there
  u64 len;                     // bytes that it takes in a pool
  u64 sent;                    // UcclEpPlaced of a combine's dispatch: nothing comes back from ranks that it left out; or null
  u64 header[UCCL_EP_HEADER];  // what this rank tells
  u32 agreed;                  // words of the header that all ranks have alike
  u32 phase;
  u32 stays;                   // whether what arrives stays, at the pool's begin, until the next call begins
  u32 zero;
};

// A call's number and place, which follow from the calls before it.
struct UcclEpPlaced {
  u64 number;
  u64 place;   // in bytes from the start of a window
  u64 after;   // a bit for the slot of each call that a peer must have ended before the place is written to
  u64 masked;  // a bit for each rank that is left out
};

// Choices of tokens, and where they lead; see ep_layout.cuh.
struct UcclEpRoutes {
  u64 choices;  // tokens * top_k integers
  u64 masks;    // u64 by token: the ranks that it goes to
  u64 slots;    // i32 by token and rank: its place among those that go there, or -1
  u64 places;   // u32 by token and choice: the expert, and the token's place among those that chose it
  u64 experts;  // u32 by expert: how many tokens chose it
  u64 counts;   // u32 by rank: how many tokens go there
  u64 chunks;   // u32 by chunk of tokens, and by rank and then expert: what adds to places and slots
  u32 tokens;
  u32 top_k;
  u32 local_experts;
  u32 is_64;
};

// What finds where tokens go.
struct UcclEpLayout {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  u64 goes;        // u8 by token and rank, whether it goes there; or null, where choices say so
  u64 goes_told;   // the same, which is written; or null
  u64 per_expert;  // u32 by expert, with `goes`: how many tokens its rank is told of
  u64 ended;       // u32, 0 but while the launch runs: how many of its blocks have come to their end
};

// How tokens lie in a place.
struct UcclEpArea {
  u64 len;       // bytes of a rank's area
  u32 first;     // where its records begin
  u32 stride;    // bytes from one to the next
  u32 payload;   // bytes
  u32 scales;    // words
  u32 scales_at;
  u32 choices_at;
  u32 places_at;  // where records of the CPU have weights
  u32 token_at;
};

// How a payload is made of a row.
constexpr u32 UCCL_EP_COPIED = 0;
constexpr u32 UCCL_EP_EXACT = 1;
constexpr u32 UCCL_EP_POWER = 2;
constexpr u32 UCCL_EP_EXPONENT = 3;
constexpr u32 UCCL_EP_NVFP4 = 4;

struct UcclEpSend {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 global_scale_at;  // f32: NVFP4's global scale; or null
  float global_scale;   // it, where nothing else says
  u32 how;
  u32 is_few;    // whether `send` finds the places of tokens itself
  u32 in_parts;  // whether each record has a mark: see ep_parts.cuh
};

struct UcclEpReceive {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 scales;  // words, at row * row + expert * expert + word * word
  u64 scales_row;
  u64 scales_expert;
  u64 scales_word;
  u64 count;         // i32 by expert
  u64 stats;         // the same, added to; or null
  u64 waits;         // u64 by rank: nanoseconds, added to; or null
  u64 src_info;      // i32 by row: the token
  u64 records;       // what a combine has to know: see ep_records.cuh
  u64 layout_range;  // i64 by expert and rank: first << 32 | count
  u32 expert_rows;   // rows of each expert
  u32 slots;
  u32 top_k;
  u32 local_experts;
  u32 tile_rows;     // rows of tiles that an expert's scales have; 0 where they lie as above
  u32 in_parts;      // as that of UcclEpSend
};

struct UcclEpReturn {
  UcclEpGroup group;
  UcclEpCall call;
  u64 rows;
  u64 row_stride;
  u64 records;
  u64 slot_stride;  // bytes from one row of a place to the next
  u32 row_len;      // bytes
  u32 len;          // rows that there are
  u32 slots;
  u32 top_k;
  u32 pieces;       // of a row, each of which has a mark; or 0: none has
  u32 sums;         // whether a rank that is told a token's weights may send its part of the sum instead of many rows
};

struct UcclEpSum {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  u64 weights;
  u64 waits;  // as those of UcclEpReceive
  u64 out;
  u64 slot_stride;
  u32 row_len;
  u32 slots;
  u32 pieces;
  u32 zero;
};

// Both parts of a call in one launch.
struct UcclEpDispatch {
  UcclEpSend send;
  UcclEpReceive receive;
};

struct UcclEpCombine {
  UcclEpReturn give_back;
  UcclEpSum sum;
};

static_assert(sizeof(UcclEpDispatch) <= 4096, "the parameters of every driver");

// Normal mode: the rows that arrive are in order of rank and token, one for each token; or by expert, one for each token and
// expert of this rank.
struct UcclEpNormalSend {
  UcclEpSend send;
  u64 scales;        // words, at token * token + word * word
  u64 scales_token;
  u64 scales_word;
  u64 weights;       // f32 by token and choice; or null
};

// Tells the host how much arrives.
struct UcclEpCount {
  UcclEpSend send;  // the call, whose counts are sent first where `begins` says so
  u64 told;    // UcclEpTold, in the host's memory
  u64 ticket;  // what is written there last
  u32 slots;
  u32 begins;  // whether the call begins with this
};

struct UcclEpTold {
  u64 ticket;
  u32 is_taken;  // whether the launch that tells takes out what arrives
  u32 zero;
  u32 from[UCCL_EP_MOST_RANKS];
  u32 per_expert[UCCL_EP_MOST_EXPERTS];  // of this rank's
};

struct UcclEpNormalReceive {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 scales;      // words, at row * row + word * word
  u64 scales_row;
  u64 scales_word;
  u64 choices;     // integers by row and choice: experts of this rank, or -1; or null
  u64 weights;     // f32 by row and choice, or, by expert, by row; or null
  u64 src_info;    // i32 by token that arrives: its number
  u64 origin;      // u32 by token: rank * 64 + which of the token's ranks this one is; or null, and nothing is told
  u64 starts;      // u32 by rank: tokens before its first; and how many there are
  u64 per_expert;  // u32 by local expert: tokens
  u64 ends;        // u32 by local expert: behind its last row; or null
  u64 metadata;    // i32 by token, 2 + top_k: rank * slots + token, rank * top_k + last choice, rows of choices or -1; or null
  u32 len;         // rows that there is room for
  u32 tokens;      // tokens that there is room for in tables
  u32 slots;
  u32 top_k;
  u32 local_experts;
  u32 is_64;
  u32 zeroes_foreign;  // whether weights of other ranks' experts become 0
  u32 alignment;       // of the first row of an expert; 0: rows are by token
  u32 zeroes_gaps;     // whether rows between those of experts become 0
  u32 spread;          // rows from a rank's first to the next rank's; 0: they are behind each other
};

// What UcclEpNormalDispatch does of a call: all of it; all but what UcclEpCount has begun with; or it takes out what an earlier launch
// has sent, which had no room for what arrives.
constexpr u32 UCCL_EP_WHOLE = 0;
constexpr u32 UCCL_EP_BEGUN = 1;
constexpr u32 UCCL_EP_TAKEN = 2;

// Both parts of a call in one launch, as UcclEpDispatch is.
struct UcclEpNormalDispatch {
  UcclEpNormalSend send;
  UcclEpNormalReceive receive;
  u64 told;    // UcclEpTold, in the host's memory: it is told how much arrives, and nothing is taken out if that does not fit; or null
  u64 ticket;  // as that of UcclEpCount
  u32 does;
  u32 zero;
};

struct UcclEpNormalReturn {
  UcclEpGroup group;
  UcclEpCall call;
  u64 rows;
  u64 row_stride;
  u64 weights;  // f32 by row and choice, or, by expert, by row; or null
  u64 src_info;
  u64 origin;
  u64 starts;
  u64 ends;
  u64 metadata;      // as those of UcclEpNormalReceive; or null, and rows are by token
  u64 slot_stride;
  u32 row_len;
  u32 weights_at;
  u32 len;           // rows that there are
  u32 slots;
  u32 token_rows;    // rows of a token in a place
  u32 top_k;
  u32 local_experts;
  u32 sends_each;    // whether each row by expert goes back, and not a token's sum
  u32 spread;        // as that of UcclEpNormalReceive
  u32 zero;
};

// In which order a token's rows are summed: rank by rank, or by the last of each rank's choices, or, where each choice has a row,
// choice by choice.
constexpr u32 UCCL_EP_BY_RANK = 0;
constexpr u32 UCCL_EP_BY_CHOICE = 1;
constexpr u32 UCCL_EP_EACH_CHOICE = 2;

struct UcclEpNormalSum {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  u64 bias[2];  // rows that sums begin with, as those of `out`; or null
  u64 weights;  // f32 by token and choice; or null
  u64 out;
  u64 slot_stride;
  u32 row_len;
  u32 weights_at;
  u32 slots;
  u32 order;
};

struct UcclEpNormalCombine {
  UcclEpNormalReturn give_back;
  UcclEpNormalSum sum;
};

static_assert(sizeof(UcclEpNormalDispatch) <= 4096 && sizeof(UcclEpNormalCombine) <= 4096, "the parameters of every driver");
static_assert(sizeof(UcclEpReceive) <= 4096, "the parameters of every driver");
static_assert(sizeof(UcclEpSend) <= 4096, "the parameters of every driver");
