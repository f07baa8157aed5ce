// Parameters of the kernels of expert parallelism. `cargo xtask headers` makes this file from
// crates/uccl-ep/src/cuda/params.rs.
// clang-format off
#pragma once

#include <machine.cuh>

// The most ranks of a group; of one whose sets are one word; and the words of a set.
constexpr u32 UCCL_EP_MAX_RANKS = 512;
constexpr u32 UCCL_EP_NARROW_RANKS = 64;
constexpr u32 UCCL_EP_RANK_WORDS = 8;
// An origin is a rank times this, plus an index among a token's ranks.
constexpr u32 UCCL_EP_ORIGIN_RANK = 512;
constexpr u32 UCCL_EP_MAX_EXPERTS = 2048;
// Each choice has a lane of a warp.
constexpr u32 UCCL_EP_MAX_TOP_K = 32;
// Bounds of a small batch, where each block of `low_latency_send` reads all choices.
constexpr u32 UCCL_EP_SMALL_BATCH_TOKENS = 512;
constexpr u32 UCCL_EP_SMALL_BATCH_CHOICES = 4096;
// A token's number has 16 bits in a record's first word and in a flag.
constexpr u32 UCCL_EP_MAX_TOKENS = 65535;
// Calls that may be in flight at once.
constexpr u32 UCCL_EP_SLOTS = 8;
// Calls of one length after which places begin anew, so that the memory they touch stays in caches.
constexpr u32 UCCL_EP_ROUND = 4;
constexpr u32 UCCL_EP_HEADER_WORDS = 8;
// With twice as many threads, each would have half the registers, and fewer loads in flight.
constexpr u32 UCCL_EP_THREADS = 512;
// Packing rows and summing packed rows are bound by arithmetic, not by memory. A summing thread
// keeps two sums of sixteen values, and needs more registers than 1024 threads leave it.
constexpr u32 UCCL_EP_PACKING_THREADS = 1024;
constexpr u32 UCCL_EP_UNPACKING_THREADS = 896;
constexpr u32 UCCL_EP_LAYOUT_THREADS = 512;
// Chunks of a call, from each rank, that have ready flags: see chunks.cuh.
constexpr u32 UCCL_EP_CHUNKS = 2048;
// Tagged words from each rank in a call of a small batch: counts, or whether weights follow and
// then weights.
constexpr u32 UCCL_EP_TAGGED_WORDS = 8193;
// Tokens of a segment, which a block of `layout` counts; and in a wide group.
constexpr u32 UCCL_EP_SEGMENT = 128;
constexpr u32 UCCL_EP_WIDE_SEGMENT = 64;
// Values of UcclEpStatus::state.
constexpr u32 UCCL_EP_OVERDUE = 1;
constexpr u32 UCCL_EP_GAVE_UP = 2;
constexpr u32 UCCL_EP_POISONED = 3;
constexpr u32 UCCL_EP_DISAGREE = 4;
constexpr u32 UCCL_EP_WRONG_CHOICE = 5;
constexpr u32 UCCL_EP_NO_ROOM = 6;
constexpr u32 UCCL_EP_LOST = 7;
constexpr u32 UCCL_EP_STALE = 8;
// Kinds of wait, in the report of a wait that failed: for data, for room in a window, and for a
// proxy that takes commands.
constexpr u32 UCCL_EP_DATA = 0;
constexpr u32 UCCL_EP_ROOM = 1;
constexpr u32 UCCL_EP_PUSH = 2;
// Formats of a payload: bytes that are copied as they are; FP8 with scales that are any f32, or a
// power of two, or the exponent of one in a byte; NVFP4.
constexpr u32 UCCL_EP_FORMAT_BYTES = 0;
constexpr u32 UCCL_EP_FORMAT_FP8 = 1;
constexpr u32 UCCL_EP_FORMAT_FP8_POWER_OF_TWO = 2;
constexpr u32 UCCL_EP_FORMAT_FP8_EXPONENT = 3;
constexpr u32 UCCL_EP_FORMAT_NVFP4 = 4;
// Phases of a call in UcclEpNormalDispatch: all; all but the counts, which UcclEpNormalCount has
// sent; or only the taking out of rows that an earlier launch has sent but had no room for.
constexpr u32 UCCL_EP_PHASES_ALL = 0;
constexpr u32 UCCL_EP_PHASES_AFTER_COUNTS = 1;
constexpr u32 UCCL_EP_PHASES_RECEIVE = 2;
// The order in which a token's rows are summed: rank by rank; by the last of each rank's choices;
// or, where each choice has a row, choice by choice.
constexpr u32 UCCL_EP_BY_RANK = 0;
constexpr u32 UCCL_EP_BY_CHOICE = 1;
constexpr u32 UCCL_EP_EACH_CHOICE = 2;
// A window begins with lines of 64 bytes for each rank: `arrived`, `taken`, its fault, and a header
// for each call.
constexpr u32 UCCL_EP_LINE = 64;
constexpr u32 UCCL_EP_LINES = 11;
// A ring, in words: the offset of the proxy's count of popped commands, and of the slots.
constexpr u32 UCCL_EP_RING_TAIL = 16;
constexpr u32 UCCL_EP_RING_SLOTS = 32;
// Fields of a command.
constexpr u32 UCCL_EP_COMMAND_UNIT = 32;
constexpr u64 UCCL_EP_COMMAND_LAP = 0x8000000000000000;
constexpr u64 UCCL_EP_COMMAND_SIGNALS = 0x4000000000000000;
constexpr u32 UCCL_EP_COMMAND_PEER_AT = 46;
constexpr u32 UCCL_EP_COMMAND_TARGET_AT = 31;

// A set of ranks: a bit for each.
struct UcclEpRankSet {
  u64 words[UCCL_EP_RANK_WORDS];
};

// State that only this rank's own kernels use: whether a call has failed, the blocks that have
// ended a step, the places of the last calls, and the ranks that are left out.
struct UcclEpOwnState {
  u32 has_failed;
  u32 layout_ended;                                // Blocks that have come to the end of `layout`.
  u32 zero[14];
  u32 ended[2][UCCL_EP_SLOTS];
  // By slot: work items that warps have claimed, see `share_out`.
  u32 claimed[UCCL_EP_SLOTS];
  u64 calls;                                       // Calls that have begun.
  // Offset in the pool at which the next call may begin.
  u64 next;
  u64 begins[UCCL_EP_SLOTS];                       // By slot: offset in the pool.
  u64 ends[UCCL_EP_SLOTS];
  UcclEpRankSet masked;                            // The ranks that are left out.
  // By slot and rank: whether the rank's data came in time.
  u32 verdicts[UCCL_EP_SLOTS][UCCL_EP_MAX_RANKS];
  u64 pushed;                                      // Commands pushed to the proxy, in all.
  // Commands that the proxy had taken at the last look.
  u64 popped;
  // The last call that the first block found room for, where it alone polls.
  u64 room;
  // The call that is acknowledged when the next one begins; or 0.
  u64 pending_ack;
  // The first call since the ranks last met. Combines of earlier dispatches fail.
  u64 first;
};

// Addresses that a meeting of the ranks changes: see addresses.cuh.
struct UcclEpAddresses {
  u64 windows[UCCL_EP_MAX_RANKS];      // By rank; of far ranks, their mirrors; 0 of absent ones.
  // The same, but of this rank its staging copy: where this rank writes rows.
  u64 row_windows[UCCL_EP_MAX_RANKS];
  u64 staging;                         // This rank's window, or its staging copy: see staging.cuh.
  UcclEpRankSet far;                   // The ranks whose windows this GPU does not reach.
  u64 mirrors;                         // The base of commands' sources.
  u64 ring;                            // The ring of commands: see far.cuh.
  u64 ring_slots;
};

// Leaves ranks out, readmits others, and writes to `status` which ones are left out.
struct UcclEpMask {
  u64 own;
  UcclEpRankSet set;
  UcclEpRankSet clear;
  u64 status;           // i32 by rank, or null.
  u32 ranks;
  u32 zero;
};

// Words in the host's memory. Kernels report a fault there, and set `state` last.
struct UcclEpStatus {
  u32 poison;                       // Set by the host, to end all waits.
  u32 state;
  u32 phase;
  u32 detail;
  u64 call;
  UcclEpRankSet late;               // The ranks that the report is about.
  u64 waited_ns;
  UcclEpRankSet lost;               // The ranks that are gone: set by the host.
  u64 expected[UCCL_EP_MAX_RANKS];
  u64 seen[UCCL_EP_MAX_RANKS];
};

// A rank of a group: its words and memory. A meeting of the ranks changes none of them, so they may
// be part of a graph.
struct UcclEpGroup {
  u64 addresses;   // UcclEpAddresses.
  u64 own;
  u64 status;
  u64 timeout_ns;
  u64 pool_at;     // In bytes from the start of a window.
  u64 pool;        // Bytes.
  u64 flags_at;    // The flags of chunks, as `pool_at`; 0: chunks have none.
  u64 tagged_at;   // Tagged words, as `flags_at`.
  u32 rank;
  u32 ranks;
  u32 masks_late;  // Whether a late rank is left out, and the call goes on.
  u32 via_host;    // Whether windows are in host memory, which only the first block polls.
};

// A call's parameters: the same each time that a graph repeats it.
struct UcclEpCall {
  // UcclEpPlacement: its number and place this time, written for the later launches.
  u64 placement;
  u64 len;                           // Bytes of a call in the pool.
  // UcclEpPlacement of a combine's dispatch, with the ranks that it left out; or null.
  u64 dispatch_placement;
  u64 header[UCCL_EP_HEADER_WORDS];  // This rank's header.
  u32 agreed;                        // Leading words of the header that must be equal on all ranks.
  u32 phase;
  // Whether the caller reads received rows in the window, at the pool's begin, until the next call.
  u32 zero_copy;
  u32 zero;
};

// A call's number and place, which follow from the calls before it.
struct UcclEpPlacement {
  u64 number;
  u64 place;             // In bytes from the start of a window.
  // A bit for the slot of each call that a peer must have ended before the place is written to.
  u64 after;
  UcclEpRankSet masked;  // The ranks that are left out.
};

// The routing of tokens; see layout.cuh.
struct UcclEpRoutes {
  u64 choices;        // `tokens * top_k` integers.
  u64 masks;          // By token: its ranks. A word, or in a wide group a set.
  u64 slots;          // i32 by token and rank: the token's place among those for the rank, or -1.
  // u32 by token and choice: the expert, and the token's place among those that chose it.
  u64 places;
  u64 experts;        // u32 by expert: tokens that chose it.
  u64 counts;         // u32 by rank: tokens for it.
  // u32 by segment of the tokens, and by rank and then expert: an addend of places and slots.
  u64 segments;
  u32 tokens;
  u32 top_k;
  u32 local_experts;
  u32 is_64;
};

// Parameters of `layout`, which finds the ranks and places of tokens.
struct UcclEpLayout {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  // u8 by token and rank, whether the token has the rank; or null: its choices decide.
  u64 token_in_rank;
  u64 token_in_rank_out;  // An output of the same form; or null.
  // u32 by expert, with `token_in_rank`: the token count that the expert's rank gets.
  u64 per_expert;
  u64 ended;              // u32: blocks of the running launch that have come to their end; else 0.
};

// The layout of a rank's area in a place, and of its records.
struct UcclEpArea {
  u64 len;         // Bytes of a rank's area.
  u32 first;       // Offset of the first record.
  u32 stride;      // Bytes from one record to the next.
  u32 payload;     // Bytes.
  u32 scales;      // Words.
  u32 scales_at;
  u32 choices_at;
  u32 places_at;   // Records of the CPU have weights here.
  u32 token_at;
};

// The send of a dispatch, of either mode.
struct UcclEpSend {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 global_scale_at;  // f32: NVFP4's global scale; or null.
  float global_scale;   // For a null `global_scale_at`.
  u32 format;
  // Whether `low_latency_send` finds the places of tokens itself, without `layout`.
  u32 is_small_batch;
  u32 in_chunks;        // Whether each record has a flag: see chunks.cuh.
};

// The receive of a low latency dispatch.
struct UcclEpLowLatencyReceive {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 scales;         // Words, at row * scales_row + expert * scales_expert + word * scales_word.
  u64 scales_row;
  u64 scales_expert;
  u64 scales_word;
  u64 count;          // i32 by expert.
  u64 stats;          // i32 by expert, added to; or null.
  u64 waits;          // u64 by rank: nanoseconds of waiting, added to; or null.
  u64 src_info;       // i32 by row: the token.
  u64 records;        // The combine's input: see low_latency/handle.cuh.
  u64 layout_range;   // i64 by expert and rank: first << 32 | count.
  u32 expert_rows;    // Rows of each expert.
  u32 slots;
  u32 top_k;
  u32 local_experts;
  u32 tile_rows;      // Rows of tiles in an expert's scales; 0: scales have the strides above.
  u32 in_chunks;      // As that of UcclEpSend.
};

// The send of a low latency combine: rows go back.
struct UcclEpLowLatencyReturn {
  UcclEpGroup group;
  UcclEpCall call;
  u64 rows;
  u64 row_stride;
  u64 records;
  u64 slot_stride;    // Bytes from one slot of a place to the next.
  u32 row_len;        // Bytes.
  u32 len;            // Rows of the input.
  u32 slots;
  u32 top_k;
  u32 pieces;         // Pieces of a row, each of which has a flag; 0: rows have no flags.
  // Whether a rank with a token's weights may send a partial sum instead of many rows.
  u32 sums;
};

// The sum of a low latency combine.
struct UcclEpLowLatencySum {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  u64 weights;
  u64 waits;            // As those of UcclEpLowLatencyReceive.
  u64 out;
  u64 slot_stride;
  u32 row_len;
  u32 slots;
  u32 pieces;
  u32 zero;
};

// Both halves of a low latency dispatch in one launch.
struct UcclEpLowLatencyDispatch {
  UcclEpSend send;
  UcclEpLowLatencyReceive receive;
};

// Both halves of a low latency combine in one launch.
struct UcclEpLowLatencyCombine {
  UcclEpLowLatencyReturn send;
  UcclEpLowLatencySum sum;
};

// The send of a dispatch in normal mode. Received rows are in order of rank and token, one for each
// token; or by expert, one for each token and expert of the receiver.
struct UcclEpNormalSend {
  UcclEpSend send;
  u64 scales;        // Words, at token * scales_token + word * scales_word.
  u64 scales_token;
  u64 scales_word;
  u64 weights;       // f32 by token and choice; or null.
  u64 round_tokens;  // As that of UcclEpRound; or null: the call has one round.
};

// Parameters of `normal_count`, which writes the receive counts to the host's mailbox.
struct UcclEpNormalCount {
  UcclEpSend send;  // The call; its counts are sent first if `begins`.
  u64 mailbox;      // UcclEpHostMailbox, in the host's memory.
  u64 ticket;       // Written to the mailbox last.
  u32 slots;
  u32 begins;       // Whether this launch begins the call.
};

// Receive counts, in the host's memory.
struct UcclEpHostMailbox {
  u64 ticket;
  u32 is_taken;                         // Whether the same launch takes the rows out.
  u32 most_tokens;                      // The most tokens of any rank.
  u32 from[UCCL_EP_MAX_RANKS];
  u32 per_expert[UCCL_EP_MAX_EXPERTS];  // By local expert.
};

// The receive of a dispatch in normal mode.
struct UcclEpNormalReceive {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpArea area;
  u64 rows;
  u64 row_stride;
  u64 scales;                // Words, at row * scales_row + word * scales_word.
  u64 scales_row;
  u64 scales_word;
  u64 choices;               // Integers by row and choice: experts of this rank, or -1; or null.
  // f32 by row and choice; or, where rows are by expert, by row; or null.
  u64 weights;
  u64 src_info;              // i32 by received token: its number at its sender.
  // u32 by received token: rank * UCCL_EP_ORIGIN_RANK + this rank's index among the token's ranks;
  // or null: no handle.
  u64 origin;
  u64 starts;                // u32 by rank: received tokens before its first; and then all of them.
  u64 per_expert;            // u32 by local expert: tokens.
  u64 ends;                  // u32 by local expert: the row behind its last; or null.
  // i32 by token, 2 + top_k: rank * slots + token, rank * top_k + last choice, rows of choices or
  // -1; or null.
  u64 metadata;
  u32 len;                   // Rows that fit into the output.
  u32 tokens;                // Tokens that fit into the tables.
  u32 slots;
  u32 top_k;
  u32 local_experts;
  u32 is_64;
  u32 zero_foreign_weights;  // Whether weights of other ranks' experts become 0.
  u32 alignment;             // The alignment of an expert's first row; 0: rows are by token.
  u32 zero_gaps;             // Whether rows between those of experts become 0.
  u32 spread;                // Rows from a rank's first to the next rank's; 0: without gaps.
};

// Both halves of a dispatch in normal mode in one launch.
struct UcclEpNormalDispatch {
  UcclEpNormalSend send;
  UcclEpNormalReceive receive;
  // UcclEpHostMailbox: it gets the receive counts, and rows that do not fit are not taken out; or
  // null.
  u64 mailbox;
  u64 ticket;                   // As that of UcclEpNormalCount.
  u32 phases;
  u32 zero;
};

// The send of a combine in normal mode: rows go back.
struct UcclEpNormalReturn {
  UcclEpGroup group;
  UcclEpCall call;
  u64 rows;
  u64 row_stride;
  u64 weights;        // f32 by row and choice; or, where rows are by expert, by row; or null.
  u64 src_info;
  u64 origin;
  u64 starts;
  u64 ends;
  u64 metadata;       // As that of UcclEpNormalReceive; or null: rows are by token.
  u64 slot_stride;
  u32 row_len;
  u32 weights_at;
  u32 len;            // Rows of the input.
  u32 slots;
  u32 token_rows;     // Slots of a token in a place.
  u32 top_k;
  u32 local_experts;
  u32 sends_each;     // Whether each row by expert goes back, instead of a token's sum.
  u32 spread;         // As that of UcclEpNormalReceive.
  u32 zero;
};

// The sum of a combine in normal mode.
struct UcclEpNormalSum {
  UcclEpGroup group;
  UcclEpCall call;
  UcclEpRoutes routes;
  u64 bias[2];          // Rows that sums begin with, in the layout of `out`; or null.
  u64 weights;          // f32 by token and choice; or null.
  u64 out;
  u64 slot_stride;
  u64 round_tokens;     // As that of UcclEpNormalSend.
  u32 row_len;
  u32 weights_at;
  u32 slots;
  u32 order;
};

// Both halves of a combine in normal mode in one launch.
struct UcclEpNormalCombine {
  UcclEpNormalReturn send;
  UcclEpNormalSum sum;
};

// A part of a call of several rounds: see normal/rounds.cuh.
struct UcclEpRound {
  // u32 by rank: received tokens of the whole call before its first; and then all of them.
  u64 starts;
  u64 per_expert;        // u32 by local expert: tokens of the whole call.
  // u32 by rank: the row of its first token in this round; and that in the next.
  u64 firsts;
  u64 next_firsts;
  // u32 by rank and local expert: the row of the rank's first token for the expert in this round,
  // and in the next; or null: rows are by token.
  u64 expert_rows;
  u64 next_expert_rows;
  // u32 by rank: its tokens in the whole call, and then the most of any rank: see normal/idle.cuh.
  u64 tokens;
  u32 first_token;       // The number at its rank of each rank's first token in this round.
  u32 most;              // The most tokens of any rank in the whole call.
  u32 is_last;
  u32 zero;
};

// The call that sends the counts of all rounds.
struct UcclEpNormalTotals {
  UcclEpSend send;
  u64 starts;        // The tables of the handle, as those of UcclEpNormalReceive.
  u64 per_expert;
  u64 ends;
  u64 firsts;        // The tables of the first round, as those of UcclEpRound.
  u64 expert_rows;
  u64 round_tokens;  // As `tokens` of UcclEpRound.
  u32 len;           // Rows that fit into the output.
  u32 tokens;        // Tokens that fit into the tables.
  u32 most;          // The most tokens of any rank in all rounds.
  u32 alignment;
  u32 begins;        // Whether this launch begins the call.
  u32 zero;
};

// Writes the counts of a handle to the host's mailbox.
struct UcclEpNormalRecount {
  UcclEpGroup group;
  u64 starts;
  u64 per_expert;
  u64 mailbox;        // As those of UcclEpNormalCount.
  u64 ticket;
  u32 local_experts;
  u32 zero;
};

// A round of a dispatch, in one launch.
struct UcclEpNormalDispatchRound {
  UcclEpNormalDispatch whole;
  UcclEpRound round;
};

// The receive of a round.
struct UcclEpNormalReceiveRound {
  UcclEpNormalReceive receive;
  UcclEpRound round;
};

// The rows of a round that go back.
struct UcclEpNormalReturnRound {
  UcclEpNormalReturn send;
  UcclEpRound round;
};

// A round of a combine, in one launch.
struct UcclEpNormalCombineRound {
  UcclEpNormalCombine whole;
  UcclEpRound round;
};
