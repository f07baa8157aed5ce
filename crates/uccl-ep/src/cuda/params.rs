//! The parameters of the kernels. `kernels/ep/params.cuh` is made from this file. Addresses are
//! those that the GPU uses.

use std::mem::size_of;

use uccl_kernels::{
    cpp::{Constant, Header, Struct},
    kernel_constants, kernel_struct,
};

use crate::{
    far::{command, fifo},
    shared::{
        header,
        places::{ROUND, SLOTS},
        rank_set::{MAX_RANKS, NARROW_RANKS, RANK_SET, RANK_WORDS, RankSet},
        record::Record,
        routing::MAX_EXPERTS,
        routing::MAX_TOP_K,
    },
};

/// The origin of a received token is its rank times this, plus this rank's index among the token's
/// ranks.
pub const ORIGIN_RANK: usize = MAX_RANKS;
/// The most tokens of a rank in a round on a GPU. A call of low latency mode has one round.
pub const MAX_TOKENS: usize = 65_535;
/// The most tokens of a rank in a call of several rounds: so many for each rank are counted in 32
/// bits.
pub(super) const fn max_call_tokens(ranks: usize) -> usize {
    (1 << 31) / room_for(ranks)
}

/// The ranks for which kernels of a group with so many have room: see rank_set.cuh.
pub(super) const fn room_for(ranks: usize) -> usize {
    if is_wide(ranks) { MAX_RANKS } else { NARROW_RANKS }
}

/// Whether a group has so many ranks that a set of them is more than a word.
pub(super) const fn is_wide(ranks: usize) -> bool {
    ranks > NARROW_RANKS
}

/// The most tokens and choices that each block of the send kernel reads. With more, a kernel before
/// it computes the routing.
pub(super) const SMALL_BATCH_TOKENS: usize = 512;
pub(super) const SMALL_BATCH_CHOICES: usize = 4096;
pub(super) const THREADS: u32 = 512;
/// Threads of the kernel that packs rows.
pub(super) const PACKING_THREADS: u32 = 1024;
/// Threads of the kernel that sums packed rows.
pub(super) const UNPACKING_THREADS: u32 = 896;
pub(super) const LAYOUT_THREADS: u32 = 512;
/// Chunks of a call, from each rank, that have ready flags of their own.
pub(super) const CHUNKS: usize = 2048;
/// Tagged words from each rank in a call of a small batch.
pub(super) const TAGGED_WORDS: usize = 1 + 8192;
/// Tokens of a segment, which a block of `layout` counts.
const SEGMENT: usize = 128;
/// The same in a wide group, whose counts need more of a block's memory.
const WIDE_SEGMENT: usize = 64;

/// Tokens of a segment, in a group of so many ranks.
pub(super) const fn segment_of(ranks: usize) -> usize {
    if is_wide(ranks) { WIDE_SEGMENT } else { SEGMENT }
}
/// Words of a header.
const HEADER_WORDS: usize = header::WORDS;

kernel_struct! {
    /// State that only this rank's own kernels use: whether a call has failed, the blocks that have
    /// ended a step, the places of the last calls, and the ranks that are left out.
    #[derive(Clone, Copy)]
    pub(super) struct Own = "UcclEpOwnState" {
        has_failed: u32,
        /// Blocks that have come to the end of `layout`.
        layout_ended: u32,
        zero: [u32; 14],
        ended: [[u32; SLOTS]; 2],
        /// By slot: work items that warps have claimed, see `share_out`.
        claimed: [u32; SLOTS],
        /// Calls that have begun.
        calls: u64,
        /// Offset in the pool at which the next call may begin.
        next: u64,
        /// By slot: offset in the pool.
        begins: [u64; SLOTS],
        ends: [u64; SLOTS],
        /// The ranks that are left out.
        masked: RankSet,
        /// By slot and rank: whether the rank's data came in time.
        verdicts: [[u32; MAX_RANKS]; SLOTS],
        /// Commands pushed to the proxy, in all.
        pushed: u64,
        /// Commands that the proxy had taken at the last look.
        popped: u64,
        /// The last call that the first block found room for, where it alone polls.
        room: u64,
        /// The call that is acknowledged when the next one begins; or 0.
        pending_ack: u64,
        /// The first call since the ranks last met. Combines of earlier dispatches fail.
        first: u64,
    }
}

kernel_struct! {
    /// Leaves ranks out, readmits others, and writes to `status` which ones are left out.
    pub(super) struct Mask = "UcclEpMask" {
        own: u64,
        set: RankSet,
        clear: RankSet,
        /// i32 by rank, or null.
        status: u64,
        ranks: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// Words in the host's memory. Kernels report a fault there, and set `state` last.
    #[derive(Clone, Copy)]
    pub(super) struct Status = "UcclEpStatus" {
        /// Set by the host, to end all waits.
        poison: u32,
        state: u32,
        phase: u32,
        detail: u32,
        call: u64,
        /// The ranks that the report is about.
        late: RankSet,
        waited_ns: u64,
        /// The ranks that are gone: set by the host.
        lost: RankSet,
        expected: [u64; MAX_RANKS],
        seen: [u64; MAX_RANKS],
    }
}

/// Values of `Status::state`.
pub(super) mod state {
    pub(in crate::cuda) const OVERDUE: u32 = 1;
    pub(in crate::cuda) const GAVE_UP: u32 = 2;
    pub(in crate::cuda) const POISONED: u32 = 3;
    pub(in crate::cuda) const DISAGREE: u32 = 4;
    pub(in crate::cuda) const WRONG_CHOICE: u32 = 5;
    pub(in crate::cuda) const NO_ROOM: u32 = 6;
    pub(in crate::cuda) const LOST: u32 = 7;
    pub(in crate::cuda) const STALE: u32 = 8;
}

/// The kind of wait, in a failed call's report, for data of a rank.
const DATA: u32 = 0;
/// The value, in a failed call's report, for a lack of room in a rank's window.
pub(super) const ROOM: u32 = 1;
/// The value for commands that the proxy does not take.
pub(super) const PUSH: u32 = 2;

kernel_struct! {
    /// Addresses that a meeting of the ranks changes: see addresses.cuh.
    #[derive(Clone, Copy)]
    pub(super) struct Addresses = "UcclEpAddresses" {
        /// By rank; of far ranks, their mirrors; 0 of absent ones.
        windows: [u64; MAX_RANKS],
        /// The same, but of this rank its staging copy: where this rank writes rows.
        row_windows: [u64; MAX_RANKS],
        /// This rank's window, or its staging copy: see staging.cuh.
        staging: u64,
        /// The ranks whose windows this GPU does not reach.
        far: RankSet,
        /// The base of commands' sources.
        mirrors: u64,
        /// The ring of commands: see far.cuh.
        ring: u64,
        ring_slots: u64,
    }
}

kernel_struct! {
    /// A rank of a group: its words and memory. A meeting of the ranks changes none of them, so
    /// they may be part of a graph.
    #[derive(Clone, Copy)]
    pub(super) struct GroupParams = "UcclEpGroup" {
        /// UcclEpAddresses.
        addresses: u64,
        own: u64,
        status: u64,
        timeout_ns: u64,
        /// In bytes from the start of a window.
        pool_at: u64,
        /// Bytes.
        pool: u64,
        /// The flags of chunks, as `pool_at`; 0: chunks have none.
        flags_at: u64,
        /// Tagged words, as `flags_at`.
        tagged_at: u64,
        rank: u32,
        ranks: u32,
        /// Whether a late rank is left out, and the call goes on.
        masks_late: u32,
        /// Whether windows are in host memory, which only the first block polls.
        via_host: u32,
    }
}

kernel_struct! {
    /// A call's parameters: the same each time that a graph repeats it.
    #[derive(Clone, Copy)]
    pub(super) struct CallParams = "UcclEpCall" {
        /// UcclEpPlacement: its number and place this time, written for the later launches.
        placement: u64,
        /// Bytes of a call in the pool.
        len: u64,
        /// UcclEpPlacement of a combine's dispatch, with the ranks that it left out; or null.
        dispatch_placement: u64,
        /// This rank's header.
        header: [u64; HEADER_WORDS],
        /// Leading words of the header that must be equal on all ranks.
        agreed: u32,
        phase: u32,
        /// Whether the caller reads received rows in the window, at the pool's begin, until the
        /// next call.
        zero_copy: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// A call's number and place, which follow from the calls before it.
    pub(super) struct Placement = "UcclEpPlacement" {
        number: u64,
        /// In bytes from the start of a window.
        place: u64,
        /// A bit for the slot of each call that a peer must have ended before the place is written
        /// to.
        after: u64,
        /// The ranks that are left out.
        masked: RankSet,
    }
}

kernel_struct! {
    /// The routing of tokens; see layout.cuh.
    #[derive(Clone, Copy)]
    pub(super) struct Routes = "UcclEpRoutes" {
        /// `tokens * top_k` integers.
        choices: u64,
        /// By token: its ranks. A word, or in a wide group a set.
        masks: u64,
        /// i32 by token and rank: the token's place among those for the rank, or -1.
        slots: u64,
        /// u32 by token and choice: the expert, and the token's place among those that chose it.
        places: u64,
        /// u32 by expert: tokens that chose it.
        experts: u64,
        /// u32 by rank: tokens for it.
        counts: u64,
        /// u32 by segment of the tokens, and by rank and then expert: an addend of places and
        /// slots.
        segments: u64,
        tokens: u32,
        top_k: u32,
        local_experts: u32,
        is_64: u32,
    }
}

kernel_struct! {
    /// Parameters of `layout`, which finds the ranks and places of tokens.
    #[derive(Clone, Copy)]
    pub(super) struct Layout = "UcclEpLayout" {
        group: GroupParams,
        call: CallParams,
        routes: Routes,
        /// u8 by token and rank, whether the token has the rank; or null: its choices decide.
        token_in_rank: u64,
        /// An output of the same form; or null.
        token_in_rank_out: u64,
        /// u32 by expert, with `token_in_rank`: the token count that the expert's rank gets.
        per_expert: u64,
        /// u32: blocks of the running launch that have come to their end; else 0.
        ended: u64,
    }
}

kernel_struct! {
    /// The layout of a rank's area in a place, and of its records.
    #[derive(Clone, Copy)]
    pub(super) struct Area = "UcclEpArea" {
        /// Bytes of a rank's area.
        len: u64,
        /// Offset of the first record.
        first: u32,
        /// Bytes from one record to the next.
        stride: u32,
        /// Bytes.
        payload: u32,
        /// Words.
        scales: u32,
        scales_at: u32,
        choices_at: u32,
        /// Records of the CPU have weights here.
        places_at: u32,
        token_at: u32,
    }
}

impl Area {
    /// The layout of an area with `slots` such records, of a rank with `local` experts.
    pub(super) fn of(record: &Record, local: usize, slots: usize) -> Self {
        Self {
            len: record.area(local, slots) as u64,
            first: Record::first_at(local) as u32,
            stride: record.stride() as u32,
            payload: record.payload as u32,
            scales: record.scales as u32,
            scales_at: record.scales_at() as u32,
            choices_at: record.choices_at() as u32,
            places_at: record.weights_at() as u32,
            token_at: record.token_at() as u32,
        }
    }
}

/// Values of `Send::format`.
pub(super) mod format {
    pub(in crate::cuda) const BYTES: u32 = 0;
    pub(in crate::cuda) const FP8: u32 = 1;
    pub(in crate::cuda) const FP8_POWER_OF_TWO: u32 = 2;
    pub(in crate::cuda) const FP8_EXPONENT: u32 = 3;
    pub(in crate::cuda) const NVFP4: u32 = 4;
}

kernel_struct! {
    /// The send of a dispatch, of either mode.
    #[derive(Clone, Copy)]
    pub(super) struct Send = "UcclEpSend" {
        group: GroupParams,
        call: CallParams,
        routes: Routes,
        area: Area,
        rows: u64,
        row_stride: u64,
        /// f32: NVFP4's global scale; or null.
        global_scale_at: u64,
        /// For a null `global_scale_at`.
        global_scale: f32,
        format: u32,
        /// Whether `low_latency_send` finds the places of tokens itself, without `layout`.
        is_small_batch: u32,
        /// Whether each record has a flag: see chunks.cuh.
        in_chunks: u32,
    }
}

kernel_struct! {
    /// The receive of a low latency dispatch.
    #[derive(Clone, Copy)]
    pub(super) struct Receive = "UcclEpLowLatencyReceive" {
        group: GroupParams,
        call: CallParams,
        area: Area,
        rows: u64,
        row_stride: u64,
        /// Words, at row * scales_row + expert * scales_expert + word * scales_word.
        scales: u64,
        scales_row: u64,
        scales_expert: u64,
        scales_word: u64,
        /// i32 by expert.
        count: u64,
        /// i32 by expert, added to; or null.
        stats: u64,
        /// u64 by rank: nanoseconds of waiting, added to; or null.
        waits: u64,
        /// i32 by row: the token.
        src_info: u64,
        /// The combine's input: see low_latency/handle.cuh.
        records: u64,
        /// i64 by expert and rank: first << 32 | count.
        layout_range: u64,
        /// Rows of each expert.
        expert_rows: u32,
        slots: u32,
        top_k: u32,
        local_experts: u32,
        /// Rows of tiles in an expert's scales; 0: scales have the strides above.
        tile_rows: u32,
        /// As that of UcclEpSend.
        in_chunks: u32,
    }
}

kernel_struct! {
    /// The send of a low latency combine: rows go back.
    #[derive(Clone, Copy)]
    pub(super) struct Return = "UcclEpLowLatencyReturn" {
        group: GroupParams,
        call: CallParams,
        rows: u64,
        row_stride: u64,
        records: u64,
        /// Bytes from one slot of a place to the next.
        slot_stride: u64,
        /// Bytes.
        row_len: u32,
        /// Rows of the input.
        len: u32,
        slots: u32,
        top_k: u32,
        /// Pieces of a row, each of which has a flag; 0: rows have no flags.
        pieces: u32,
        /// Whether a rank with a token's weights may send a partial sum instead of many rows.
        sums: u32,
    }
}

kernel_struct! {
    /// The sum of a low latency combine.
    #[derive(Clone, Copy)]
    pub(super) struct Sum = "UcclEpLowLatencySum" {
        group: GroupParams,
        call: CallParams,
        routes: Routes,
        weights: u64,
        /// As those of UcclEpLowLatencyReceive.
        waits: u64,
        out: u64,
        slot_stride: u64,
        row_len: u32,
        slots: u32,
        pieces: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// Both halves of a low latency dispatch in one launch.
    pub(super) struct WholeDispatch = "UcclEpLowLatencyDispatch" {
        send: Send,
        receive: Receive,
    }
}

kernel_struct! {
    /// Both halves of a low latency combine in one launch.
    pub(super) struct WholeCombine = "UcclEpLowLatencyCombine" {
        send: Return,
        sum: Sum,
    }
}

kernel_struct! {
    /// The send of a dispatch in normal mode. Received rows are in order of rank and token, one for
    /// each token; or by expert, one for each token and expert of the receiver.
    #[derive(Clone, Copy)]
    pub(super) struct NormalSend = "UcclEpNormalSend" {
        send: Send,
        /// Words, at token * scales_token + word * scales_word.
        scales: u64,
        scales_token: u64,
        scales_word: u64,
        /// f32 by token and choice; or null.
        weights: u64,
        /// As that of UcclEpRound; or null: the call has one round.
        round_tokens: u64,
    }
}

kernel_struct! {
    /// Parameters of `normal_count`, which writes the receive counts to the host's mailbox.
    #[derive(Clone, Copy)]
    pub(super) struct Count = "UcclEpNormalCount" {
        /// The call; its counts are sent first if `begins`.
        send: Send,
        /// UcclEpHostMailbox, in the host's memory.
        mailbox: u64,
        /// Written to the mailbox last.
        ticket: u64,
        slots: u32,
        /// Whether this launch begins the call.
        begins: u32,
    }
}

kernel_struct! {
    /// Receive counts, in the host's memory.
    pub(super) struct HostMailbox = "UcclEpHostMailbox" {
        ticket: u64,
        /// Whether the same launch takes the rows out.
        is_taken: u32,
        /// The most tokens of any rank.
        most_tokens: u32,
        from: [u32; MAX_RANKS],
        /// By local expert.
        per_expert: [u32; MAX_EXPERTS],
    }
}

kernel_struct! {
    /// The receive of a dispatch in normal mode.
    #[derive(Clone, Copy)]
    pub(super) struct NormalReceive = "UcclEpNormalReceive" {
        group: GroupParams,
        call: CallParams,
        area: Area,
        rows: u64,
        row_stride: u64,
        /// Words, at row * scales_row + word * scales_word.
        scales: u64,
        scales_row: u64,
        scales_word: u64,
        /// Integers by row and choice: experts of this rank, or -1; or null.
        choices: u64,
        /// f32 by row and choice; or, where rows are by expert, by row; or null.
        weights: u64,
        /// i32 by received token: its number at its sender.
        src_info: u64,
        /// u32 by received token: rank * UCCL_EP_ORIGIN_RANK + this rank's index among the token's
        /// ranks; or null: no handle.
        origin: u64,
        /// u32 by rank: received tokens before its first; and then all of them.
        starts: u64,
        /// u32 by local expert: tokens.
        per_expert: u64,
        /// u32 by local expert: the row behind its last; or null.
        ends: u64,
        /// i32 by token, 2 + top_k: rank * slots + token, rank * top_k + last choice, rows of
        /// choices or -1; or null.
        metadata: u64,
        /// Rows that fit into the output.
        len: u32,
        /// Tokens that fit into the tables.
        tokens: u32,
        slots: u32,
        top_k: u32,
        local_experts: u32,
        is_64: u32,
        /// Whether weights of other ranks' experts become 0.
        zero_foreign_weights: u32,
        /// The alignment of an expert's first row; 0: rows are by token.
        alignment: u32,
        /// Whether rows between those of experts become 0.
        zero_gaps: u32,
        /// Rows from a rank's first to the next rank's; 0: without gaps.
        spread: u32,
    }
}

kernel_struct! {
    /// Both halves of a dispatch in normal mode in one launch.
    pub(super) struct WholeNormalDispatch = "UcclEpNormalDispatch" {
        send: NormalSend,
        receive: NormalReceive,
        /// UcclEpHostMailbox: it gets the receive counts, and rows that do not fit are not taken
        /// out; or null.
        mailbox: u64,
        /// As that of UcclEpNormalCount.
        ticket: u64,
        phases: u32,
        zero: u32,
    }
}

/// Values of `WholeNormalDispatch::phases`.
pub(super) mod phases {
    pub(in crate::cuda) const ALL: u32 = 0;
    pub(in crate::cuda) const AFTER_COUNTS: u32 = 1;
    pub(in crate::cuda) const RECEIVE: u32 = 2;
}

kernel_struct! {
    /// The send of a combine in normal mode: rows go back.
    #[derive(Clone, Copy)]
    pub(super) struct NormalReturn = "UcclEpNormalReturn" {
        group: GroupParams,
        call: CallParams,
        rows: u64,
        row_stride: u64,
        /// f32 by row and choice; or, where rows are by expert, by row; or null.
        weights: u64,
        src_info: u64,
        origin: u64,
        starts: u64,
        ends: u64,
        /// As that of UcclEpNormalReceive; or null: rows are by token.
        metadata: u64,
        slot_stride: u64,
        row_len: u32,
        weights_at: u32,
        /// Rows of the input.
        len: u32,
        slots: u32,
        /// Slots of a token in a place.
        token_rows: u32,
        top_k: u32,
        local_experts: u32,
        /// Whether each row by expert goes back, instead of a token's sum.
        sends_each: u32,
        /// As that of UcclEpNormalReceive.
        spread: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// A part of a call of several rounds: see normal/rounds.cuh.
    #[derive(Clone, Copy)]
    pub(super) struct Round = "UcclEpRound" {
        /// u32 by rank: received tokens of the whole call before its first; and then all of them.
        starts: u64,
        /// u32 by local expert: tokens of the whole call.
        per_expert: u64,
        /// u32 by rank: the row of its first token in this round; and that in the next.
        firsts: u64,
        next_firsts: u64,
        /// u32 by rank and local expert: the row of the rank's first token for the expert in this
        /// round, and in the next; or null: rows are by token.
        expert_rows: u64,
        next_expert_rows: u64,
        /// u32 by rank: its tokens in the whole call, and then the most of any rank: see
        /// normal/idle.cuh.
        tokens: u64,
        /// The number at its rank of each rank's first token in this round.
        first_token: u32,
        /// The most tokens of any rank in the whole call.
        most: u32,
        is_last: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// The call that sends the counts of all rounds.
    pub(super) struct Totals = "UcclEpNormalTotals" {
        send: Send,
        /// The tables of the handle, as those of UcclEpNormalReceive.
        starts: u64,
        per_expert: u64,
        ends: u64,
        /// The tables of the first round, as those of UcclEpRound.
        firsts: u64,
        expert_rows: u64,
        /// As `tokens` of UcclEpRound.
        round_tokens: u64,
        /// Rows that fit into the output.
        len: u32,
        /// Tokens that fit into the tables.
        tokens: u32,
        /// The most tokens of any rank in all rounds.
        most: u32,
        alignment: u32,
        /// Whether this launch begins the call.
        begins: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// Writes the counts of a handle to the host's mailbox.
    pub(super) struct Recount = "UcclEpNormalRecount" {
        group: GroupParams,
        starts: u64,
        per_expert: u64,
        /// As those of UcclEpNormalCount.
        mailbox: u64,
        ticket: u64,
        local_experts: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// A round of a dispatch, in one launch.
    pub(super) struct DispatchRound = "UcclEpNormalDispatchRound" {
        whole: WholeNormalDispatch,
        round: Round,
    }
}

kernel_struct! {
    /// The receive of a round.
    pub(super) struct ReceiveRound = "UcclEpNormalReceiveRound" {
        receive: NormalReceive,
        round: Round,
    }
}

kernel_struct! {
    /// The rows of a round that go back.
    pub(super) struct ReturnRound = "UcclEpNormalReturnRound" {
        send: NormalReturn,
        round: Round,
    }
}

kernel_struct! {
    /// A round of a combine, in one launch.
    pub(super) struct CombineRound = "UcclEpNormalCombineRound" {
        whole: WholeNormalCombine,
        round: Round,
    }
}

/// Values of `NormalSum::order`.
pub(super) mod order {
    pub(in crate::cuda) const BY_RANK: u32 = 0;
    pub(in crate::cuda) const BY_CHOICE: u32 = 1;
    pub(in crate::cuda) const EACH_CHOICE: u32 = 2;
}

kernel_struct! {
    /// The sum of a combine in normal mode.
    #[derive(Clone, Copy)]
    pub(super) struct NormalSum = "UcclEpNormalSum" {
        group: GroupParams,
        call: CallParams,
        routes: Routes,
        /// Rows that sums begin with, in the layout of `out`; or null.
        bias: [u64; 2],
        /// f32 by token and choice; or null.
        weights: u64,
        out: u64,
        slot_stride: u64,
        /// As that of UcclEpNormalSend.
        round_tokens: u64,
        row_len: u32,
        weights_at: u32,
        slots: u32,
        order: u32,
    }
}

kernel_struct! {
    /// Both halves of a combine in normal mode in one launch.
    pub(super) struct WholeNormalCombine = "UcclEpNormalCombine" {
        send: NormalReturn,
        sum: NormalSum,
    }
}

/// The structs of the header, each after those that it contains.
const STRUCTS: [Struct; 32] = [
    RANK_SET,
    Own::STRUCT,
    Addresses::STRUCT,
    Mask::STRUCT,
    Status::STRUCT,
    GroupParams::STRUCT,
    CallParams::STRUCT,
    Placement::STRUCT,
    Routes::STRUCT,
    Layout::STRUCT,
    Area::STRUCT,
    Send::STRUCT,
    Receive::STRUCT,
    Return::STRUCT,
    Sum::STRUCT,
    WholeDispatch::STRUCT,
    WholeCombine::STRUCT,
    NormalSend::STRUCT,
    Count::STRUCT,
    HostMailbox::STRUCT,
    NormalReceive::STRUCT,
    WholeNormalDispatch::STRUCT,
    NormalReturn::STRUCT,
    NormalSum::STRUCT,
    WholeNormalCombine::STRUCT,
    Round::STRUCT,
    Totals::STRUCT,
    Recount::STRUCT,
    DispatchRound::STRUCT,
    ReceiveRound::STRUCT,
    ReturnRound::STRUCT,
    CombineRound::STRUCT,
];

/// The parameters of a launch fit into the 4 KiB that every driver takes.
const _: () = {
    assert!(size_of::<WholeDispatch>() <= 4096 && size_of::<WholeCombine>() <= 4096);
    assert!(size_of::<DispatchRound>() <= 4096 && size_of::<CombineRound>() <= 4096);
    assert!(size_of::<Layout>() <= 4096 && size_of::<Count>() <= 4096);
};

/// The constants of the header.
const CONSTANTS: &[Constant] = kernel_constants![
    /// The most ranks of a group; of one whose sets are one word; and the words of a set.
    UCCL_EP_MAX_RANKS = MAX_RANKS,
    UCCL_EP_NARROW_RANKS = NARROW_RANKS,
    UCCL_EP_RANK_WORDS = RANK_WORDS,
    /// An origin is a rank times this, plus an index among a token's ranks.
    UCCL_EP_ORIGIN_RANK = ORIGIN_RANK,
    UCCL_EP_MAX_EXPERTS = MAX_EXPERTS,
    /// Each choice has a lane of a warp.
    UCCL_EP_MAX_TOP_K = MAX_TOP_K,
    /// Bounds of a small batch, where each block of `low_latency_send` reads all choices.
    UCCL_EP_SMALL_BATCH_TOKENS = SMALL_BATCH_TOKENS,
    UCCL_EP_SMALL_BATCH_CHOICES = SMALL_BATCH_CHOICES,
    /// A token's number has 16 bits in a record's first word and in a flag.
    UCCL_EP_MAX_TOKENS = MAX_TOKENS,
    /// Calls that may be in flight at once.
    UCCL_EP_SLOTS = SLOTS,
    /// Calls of one length after which places begin anew, so that the memory they touch stays in
    /// caches.
    UCCL_EP_ROUND = ROUND,
    UCCL_EP_HEADER_WORDS = HEADER_WORDS,
    /// With twice as many threads, each would have half the registers, and fewer loads in flight.
    UCCL_EP_THREADS = THREADS,
    /// Packing rows and summing packed rows are bound by arithmetic, not by memory. A summing
    /// thread keeps two sums of sixteen values, and needs more registers than 1024 threads leave
    /// it.
    UCCL_EP_PACKING_THREADS = PACKING_THREADS,
    UCCL_EP_UNPACKING_THREADS = UNPACKING_THREADS,
    UCCL_EP_LAYOUT_THREADS = LAYOUT_THREADS,
    /// Chunks of a call, from each rank, that have ready flags: see chunks.cuh.
    UCCL_EP_CHUNKS = CHUNKS,
    /// Tagged words from each rank in a call of a small batch: counts, or whether weights follow
    /// and then weights.
    UCCL_EP_TAGGED_WORDS = TAGGED_WORDS,
    /// Tokens of a segment, which a block of `layout` counts; and in a wide group.
    UCCL_EP_SEGMENT = SEGMENT,
    UCCL_EP_WIDE_SEGMENT = WIDE_SEGMENT,
    /// Values of UcclEpStatus::state.
    UCCL_EP_OVERDUE = state::OVERDUE,
    UCCL_EP_GAVE_UP = state::GAVE_UP,
    UCCL_EP_POISONED = state::POISONED,
    UCCL_EP_DISAGREE = state::DISAGREE,
    UCCL_EP_WRONG_CHOICE = state::WRONG_CHOICE,
    UCCL_EP_NO_ROOM = state::NO_ROOM,
    UCCL_EP_LOST = state::LOST,
    UCCL_EP_STALE = state::STALE,
    /// Kinds of wait, in the report of a wait that failed: for data, for room in a window, and for
    /// a proxy that takes commands.
    UCCL_EP_DATA = DATA,
    UCCL_EP_ROOM = ROOM,
    UCCL_EP_PUSH = PUSH,
    /// Formats of a payload: bytes that are copied as they are; FP8 with scales that are any f32,
    /// or a power of two, or the exponent of one in a byte; NVFP4.
    UCCL_EP_FORMAT_BYTES = format::BYTES,
    UCCL_EP_FORMAT_FP8 = format::FP8,
    UCCL_EP_FORMAT_FP8_POWER_OF_TWO = format::FP8_POWER_OF_TWO,
    UCCL_EP_FORMAT_FP8_EXPONENT = format::FP8_EXPONENT,
    UCCL_EP_FORMAT_NVFP4 = format::NVFP4,
    /// Phases of a call in UcclEpNormalDispatch: all; all but the counts, which UcclEpNormalCount
    /// has sent; or only the taking out of rows that an earlier launch has sent but had no room
    /// for.
    UCCL_EP_PHASES_ALL = phases::ALL,
    UCCL_EP_PHASES_AFTER_COUNTS = phases::AFTER_COUNTS,
    UCCL_EP_PHASES_RECEIVE = phases::RECEIVE,
    /// The order in which a token's rows are summed: rank by rank; by the last of each rank's
    /// choices; or, where each choice has a row, choice by choice.
    UCCL_EP_BY_RANK = order::BY_RANK,
    UCCL_EP_BY_CHOICE = order::BY_CHOICE,
    UCCL_EP_EACH_CHOICE = order::EACH_CHOICE,
    /// A window begins with lines of 64 bytes for each rank: `arrived`, `taken`, its fault, and a
    /// header for each call.
    UCCL_EP_LINE = crate::shared::view::LINE,
    UCCL_EP_LINES = crate::shared::view::LINES,
    /// A ring, in words: the offset of the proxy's count of popped commands, and of the slots.
    UCCL_EP_RING_TAIL = fifo::TAIL,
    UCCL_EP_RING_SLOTS = fifo::SLOTS_AT,
    /// Fields of a command.
    UCCL_EP_COMMAND_UNIT = command::UNIT,
    UCCL_EP_COMMAND_LAP = command::LAP,
    UCCL_EP_COMMAND_SIGNALS = command::IS_SIGNAL,
    UCCL_EP_COMMAND_PEER_AT = command::PEER_AT,
    UCCL_EP_COMMAND_TARGET_AT = command::TARGET_AT,
];

const HEADER: Header = Header {
    path: "ep/params.cuh",
    about: "Parameters of the kernels of expert parallelism.",
    source: "crates/uccl-ep/src/cuda/params.rs",
    prefix: "UCCL_EP_",
    constants: CONSTANTS,
    structs: &STRUCTS,
};

/// The header `kernels/ep/params.cuh`.
#[must_use]
pub fn kernel_header() -> String {
    HEADER.text()
}

/// C++ that compiles only if the kernels' structs and constants match those of this build.
#[must_use]
pub fn layout_assertions() -> String {
    HEADER.assertions()
}
