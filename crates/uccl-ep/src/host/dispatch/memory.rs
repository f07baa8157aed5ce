//! The callers' memory: their tokens, and the outputs for received ones.

use crate::{
    numerics::{
        nvfp4,
        quantise::{self, ScaleFormat},
    },
    shared::{
        error::{Error, Result},
        places::PLACE_ALIGN,
        record::Record,
    },
};

/// The format of a token's payload.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Payload {
    /// Unchanged: so many bytes.
    Bytes(usize),
    /// Rows of this many bf16, quantised here to FP8.
    Quantised(usize, ScaleFormat),
    /// Rows of this many bf16, quantised here to NVFP4 with this global scale.
    Nvfp4(usize, f32),
}

impl Payload {
    /// The record of a token, with the scales that are made of its row.
    ///
    /// # Errors
    /// Rows of this length, or with this global scale, cannot be quantised.
    pub(crate) fn record(self, top_k: usize) -> Result<Record> {
        let check = |hidden: usize, unit: usize| match hidden > 0 && hidden.is_multiple_of(unit) {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "rows to quantise have a multiple of {unit} bf16, not {hidden}"
            ))),
        };
        match self {
            Self::Bytes(payload) => Ok(Record { payload, scales: 0, top_k }),
            Self::Quantised(hidden, how) => {
                let groups = if how == ScaleFormat::Exponent { 4 } else { 1 };
                check(hidden, groups * quantise::GROUP)?;
                Ok(Record { payload: hidden, scales: how.words(hidden), top_k })
            }
            Self::Nvfp4(hidden, global_scale) => {
                check(hidden, nvfp4::UNIT)?;
                if !(global_scale > 0.0 && global_scale.is_finite()) {
                    let why =
                        format!("a global scale is finite and more than 0, not {global_scale}");
                    return Err(Error::invalid(why));
                }
                Ok(Record { payload: hidden / 2, scales: hidden / nvfp4::UNIT, top_k })
            }
        }
    }
}

/// A rank's tokens in memory. Strides of scales are in words of four bytes.
#[derive(Clone, Copy, Debug)]
pub struct DispatchInput {
    /// The first row.
    pub rows: *const u8,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// The format of the payload.
    pub payload: Payload,
    /// Scales that come with the rows: opaque words.
    pub scales: Option<ScalesIn>,
    /// A weight for each choice, if there are any.
    pub weights: Option<*const f32>,
    /// Whether rows do not change until the dispatch is over: those for this rank's own experts are
    /// then copied only once.
    pub is_stable: bool,
}

/// Scales of tokens: word `w` of token `t` is at `t * token_stride + w * word_stride`.
#[derive(Clone, Copy, Debug)]
pub struct ScalesIn {
    /// The first word.
    pub words: *const u32,
    /// Words of a token.
    pub count: usize,
    /// From one token to the next.
    pub token_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// The part of the window that a call uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// Slots for this many tokens of each rank, which no rank exceeds.
    Tokens(usize),
    /// This many bytes; tokens that do not fit at once go in rounds.
    Bytes(usize),
}

impl Room {
    /// The room of a call in rounds, in a pool of `pool_len` bytes: half of it, since two calls are
    /// in flight at a time.
    #[must_use]
    pub fn of_rounds(pool_len: usize) -> Self {
        Self::Bytes(pool_len / 2 / PLACE_ALIGN * PLACE_ALIGN)
    }
}

/// The layout of received rows.
#[derive(Clone, Debug)]
pub enum RowLayout {
    /// A row for each token, those of rank 0 first, in the order of their rank.
    ByToken,
    /// A row for each token and local expert; the rows of expert `e` begin at `starts[e]`.
    ByExpert(Vec<usize>),
}

/// Memory for received tokens, with the rows of [`RowLayout`].
#[derive(Clone, Copy, Debug)]
pub struct DispatchOutput {
    /// The number of rows.
    pub len: usize,
    /// Payloads: the first row.
    pub rows: *mut u8,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Scales.
    pub scales: Option<ScalesOut>,
    /// The choices of each row, as numbers of this rank's experts, -1 for others
    /// ([`RowLayout::ByToken`]).
    pub choices: Option<ChoicesOut>,
    /// Weights: one for each choice of each row; or, where rows are by expert, one for each row.
    pub weights: Option<*mut f32>,
    /// Whether weights of other ranks' experts become 0.
    pub zero_foreign_weights: bool,
}

/// The layout of scales in the output.
#[derive(Clone, Copy, Debug)]
pub enum ScalesOut {
    /// Word `w` of a row is at `row * row_stride + expert * expert_stride + w * word_stride`.
    Strided {
        /// The first word.
        words: *mut u32,
        /// From one row to the next.
        row_stride: usize,
        /// Added for each expert before the row's.
        expert_stride: usize,
        /// From one word to the next.
        word_stride: usize,
    },
    /// In tiles of 128 rows and one word, as the GPU's products of scaled blocks read them: an
    /// expert has rows of tiles, with a tile for each word in each of them. Row `r` of a tile has
    /// its word at `r % 32 * 4 + r / 32`.
    Tiled {
        /// The first word.
        words: *mut u32,
        /// Rows of tiles of each expert.
        tile_rows: usize,
    },
}

/// The position of a received row.
#[derive(Clone, Copy)]
pub(super) struct RowPosition {
    /// Its number among all rows.
    pub(super) row: usize,
    /// Its expert, where rows are by expert; else 0.
    pub(super) expert: usize,
    /// Its number among the rows of its expert, or among all.
    pub(super) nth: usize,
}

/// Rows of a tile.
pub(crate) const TILE: usize = 128;

impl ScalesOut {
    /// The address of a row's first word, and the distance between two of its `count` words.
    ///
    /// # Safety
    /// There is such a row.
    pub(super) unsafe fn of_row(
        self,
        RowPosition { row, expert, nth }: RowPosition,
        count: usize,
    ) -> (*mut u32, usize) {
        match self {
            Self::Strided { words, row_stride, expert_stride, word_stride } => {
                // SAFETY: the caller guarantees it.
                (unsafe { words.add(row * row_stride + expert * expert_stride) }, word_stride)
            }
            Self::Tiled { words, tile_rows } => {
                let tile = (expert * tile_rows + nth / TILE) * count;
                let inside = nth % 32 * 4 + nth % TILE / 32;
                // SAFETY: the caller guarantees it.
                (unsafe { words.add(tile * TILE + inside) }, TILE)
            }
        }
    }
}

/// Integers of either size.
#[derive(Clone, Copy, Debug)]
pub enum ChoicesOut {
    /// Of 32 bits.
    I32(*mut i32),
    /// Of 64 bits.
    I64(*mut i64),
}

impl ChoicesOut {
    /// # Safety
    /// There is an integer `at`.
    pub(super) unsafe fn put(self, at: usize, value: i32) {
        // SAFETY: the caller guarantees it.
        unsafe {
            match self {
                Self::I32(all) => all.add(at).write(value),
                Self::I64(all) => all.add(at).write(i64::from(value)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_calls_in_rounds_fit_in_a_pool() {
        for pool in [0, 63, 64, 127, 128, 1 << 20, (1 << 20) + 100] {
            let Room::Bytes(len) = Room::of_rounds(pool) else { panic!("not in bytes") };
            assert!(2 * len <= pool && len.is_multiple_of(PLACE_ALIGN), "{len} of {pool}");
            assert!(2 * (len + PLACE_ALIGN) > pool, "{len} of {pool}");
        }
    }
}
