//! The callers' tensors in a GPU's memory. Addresses are those that the GPU uses, aligned to 16
//! bytes where rows of bytes begin; 0 is none.

use crate::{
    host::dispatch::Payload,
    shared::{
        error::{Error, Result},
        routing::{MAX_EXPERTS, MAX_TOP_K},
    },
};

use super::params::{CHUNK, MAX_RANKS, MAX_TOKENS, Placed, Routes};

/// A rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
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

/// The experts that each of a rank's tokens chose.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    /// `tokens * top_k` integers, row by row; a negative one is no choice.
    pub experts: u64,
    /// Whether they have 64 bits, or 32.
    pub is_64: bool,
    /// The number of tokens.
    pub tokens: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Experts of all ranks together; rank `r` has those from `r * experts / ranks`.
    pub num_experts: usize,
}

/// Output memory: by expert, each with rows for `slots` tokens of each rank.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
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
    pub table: Table,
}

/// The tables of a dispatch about its rows.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// i32 by row: the token's number at its rank.
    pub src_info: u64,
    /// The combine's input: [`records_len`](super::records_len) bytes, aligned to 4.
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
pub struct Results {
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
pub struct Combined {
    /// The first row of bf16; rows are contiguous.
    pub rows: u64,
    /// f32 weights, one for each choice of each token.
    pub weights: u64,
    /// The choices of the dispatch.
    pub experts: u64,
    /// u64 by rank: nanoseconds of waiting for its rows, added to earlier values; or 0.
    pub waits: u64,
}

/// Bytes of the memory that a dispatch uses until its combine has ended, and a layout until the
/// combines of all its dispatches have.
#[must_use]
pub fn scratch_len(choices: &Choices, ranks: usize) -> usize {
    Scratch::of(choices, ranks).len
}

/// Bytes of a dispatch's records for its combine, if each of so many ranks sends `slots` at most.
/// Their layout is in `kernels/ep_records.cuh`.
#[must_use]
pub fn records_len(slots: usize, ranks: usize, top_k: usize) -> usize {
    size_of::<u32>() * (MAX_RANKS + 1 + ranks * slots * (1 + top_k))
}

/// Bytes of the memory that a combine uses until it has ended.
pub const COMBINE_SCRATCH_LEN: usize = size_of::<Placed>();

/// Offsets of the parts of a dispatch's scratch memory, behind the call's number and place. The
/// counts by rank and expert lie right behind the chunks' counts, with the same layout.
struct Scratch {
    masks: usize,
    slots: usize,
    places: usize,
    chunks: usize,
    counts: usize,
    experts: usize,
    len: usize,
}

impl Scratch {
    fn of(choices: &Choices, ranks: usize) -> Self {
        let Choices { tokens, top_k, num_experts, .. } = *choices;
        let masks = size_of::<Placed>();
        let slots = masks + 8 * tokens;
        let places = slots + 4 * tokens * ranks;
        let chunks = places + 4 * tokens * top_k;
        let counts = chunks + 4 * tokens.div_ceil(CHUNK) * (ranks + num_experts);
        let experts = counts + 4 * ranks;
        let len = experts + 4 * num_experts;
        Self { masks, slots, places, chunks, counts, experts, len }
    }
}

impl Choices {
    /// Fails for choices that kernels cannot take.
    pub(super) fn check(&self, ranks: usize) -> Result<()> {
        let Self { tokens, top_k, num_experts, .. } = *self;
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(Error::invalid(format!("top-k is 1 to {MAX_TOP_K}, not {top_k}")));
        }
        if num_experts == 0 || num_experts > MAX_EXPERTS || !num_experts.is_multiple_of(ranks) {
            let why = format!(
                "the number of experts is a multiple of the {ranks} ranks and {MAX_EXPERTS} at most, not {num_experts}"
            );
            return Err(Error::invalid(why));
        }
        if tokens > MAX_TOKENS {
            let why = format!("{tokens} tokens, and a call on a GPU has {MAX_TOKENS} at most");
            return Err(Error::invalid(why));
        }
        Ok(())
    }

    /// The routing's tables, in the scratch memory at this address.
    pub(super) fn routes(&self, ranks: usize, scratch: u64) -> Routes {
        let places = Scratch::of(self, ranks);
        let at = |offset: usize| scratch + offset as u64;
        Routes {
            choices: self.experts,
            masks: at(places.masks),
            slots: at(places.slots),
            places: at(places.places),
            experts: at(places.experts),
            counts: at(places.counts),
            chunks: at(places.chunks),
            tokens: self.tokens as u32,
            top_k: self.top_k as u32,
            local_experts: (self.num_experts / ranks) as u32,
            is_64: u32::from(self.is_64),
        }
    }
}

/// Fails unless rows can be moved in vectors of 16 bytes.
pub(super) fn check_rows(what: &str, rows: u64, stride: usize, len: usize) -> Result<()> {
    if rows.is_multiple_of(16) && stride.is_multiple_of(16) && len.is_multiple_of(16) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{what} of {len} bytes, {stride} apart, at {rows:#x}: a GPU takes multiples of 16"
    )))
}
