//! The callers' tensors in a GPU's memory. Addresses are those that the GPU uses, aligned to 16
//! bytes where rows of bytes begin; 0 is none.

use crate::{
    cuda::{
        memory::{COMBINE_SCRATCH_LEN, Choices, Offsets, scratch_len},
        params::room_for,
    },
    host::dispatch::Payload,
};

/// A rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct DispatchInput {
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// The format of the payload.
    pub payload: Payload,
    /// The address of NVFP4's global scale, an f32 that replaces the payload's; or 0. It is finite
    /// and more than 0.
    pub global_scale: u64,
}

/// Output memory: by expert, each with rows for `slots` tokens of each rank.
#[derive(Clone, Copy, Debug)]
pub struct DispatchOutput {
    /// Payloads: the first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Scales, where rows are quantised.
    pub scales: Option<ScalesOut>,
    /// i32 by expert: its number of rows.
    pub count: u64,
    /// The same, added to earlier values; or 0.
    pub stats: u64,
    /// u64 by rank: nanoseconds of waiting for its data, added to earlier values; or 0.
    pub waits: u64,
    /// The handle's tables.
    pub tables: RowTables,
}

/// The tables of a dispatch about its rows.
#[derive(Clone, Copy, Debug)]
pub struct RowTables {
    /// i32 by row: the token's number at its rank.
    pub src_info: u64,
    /// The combine's input: [`records_len`] bytes, aligned to 4.
    pub records: u64,
    /// i64 by expert and rank: `first row << 32 | count`.
    pub layout_range: u64,
}

/// The layout of scales in the output, as in the [CPU's calls](crate::dispatch::ScalesOut). Strides
/// are in words.
#[derive(Clone, Copy, Debug)]
pub enum ScalesOut {
    /// Word `w` of a row is at `row * row_stride + expert * expert_stride + w * word_stride`.
    Strided {
        /// The first word.
        words: u64,
        /// From one row to the next.
        row_stride: usize,
        /// Added for each expert before the row's.
        expert_stride: usize,
        /// From one word to the next.
        word_stride: usize,
    },
    /// In tiles of 128 rows and one word.
    Tiled {
        /// The first word.
        words: u64,
        /// Rows of tiles of each expert.
        tile_rows: usize,
    },
}

/// Rows of bf16 that go back: those of a dispatch, each from its expert.
#[derive(Clone, Copy, Debug)]
pub struct CombineInput {
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Values of a row, a multiple of 8.
    pub hidden: usize,
    /// The records of the dispatch.
    pub records: u64,
    /// Whether rows are packed as LogFMT-10 in transit.
    pub is_packed: bool,
}

/// Memory for the sums.
#[derive(Clone, Copy, Debug)]
pub struct CombineOutput {
    /// The first row of bf16; rows are contiguous.
    pub rows: u64,
    /// f32 weights, one for each choice of each token.
    pub weights: u64,
    /// The choices of the dispatch.
    pub experts: u64,
    /// u64 by rank: nanoseconds of waiting for its rows, added to earlier values; or 0.
    pub waits: u64,
}

/// The offsets of a workspace's sub-buffers, and its length, in words of four bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkspaceLayout {
    /// Scratch of the handle's first combine.
    pub combine_scratch: usize,
    /// Scratch of the dispatch.
    pub dispatch_scratch: usize,
    /// The records for the combine.
    pub records: usize,
    /// `[E/R, R * slots]` i32: token numbers at their ranks.
    pub src_info: usize,
    /// `[E/R]` i32: rows of each local expert.
    pub count: usize,
    /// Words of the workspace.
    pub len: usize,
}

impl WorkspaceLayout {
    /// The layout of a dispatch of these choices, where no rank has more than `slots` tokens.
    #[must_use]
    pub fn of(choices: &Choices, slots: usize, ranks: usize) -> Self {
        let local_experts = choices.num_experts / ranks.max(1);
        let rows = ranks.saturating_mul(slots);
        let mut offsets = Offsets::default();
        let combine_scratch = offsets.next_bytes(COMBINE_SCRATCH_LEN);
        let dispatch_scratch = offsets.next_bytes(scratch_len(choices, ranks));
        let records = offsets.next_bytes(records_len(slots, ranks, choices.top_k));
        let src_info = offsets.next(local_experts.saturating_mul(rows));
        let count = offsets.next(local_experts);
        let len = offsets.len;
        Self { combine_scratch, dispatch_scratch, records, src_info, count, len }
    }
}

/// Bytes of a dispatch's records for its combine, if each of so many ranks sends `slots` at most.
/// Their layout is in `kernels/ep/low_latency/handle.cuh`.
#[must_use]
pub fn records_len(slots: usize, ranks: usize, top_k: usize) -> usize {
    let starts = room_for(ranks) + 1;
    let words = ranks.saturating_mul(slots).saturating_mul(1 + top_k).saturating_add(starts);
    words.saturating_mul(size_of::<u32>())
}
