//! The layouts of scales: attributes of Python objects.

use pyo3::prelude::*;

/// The scales of tokens: an address, the words of each token, and strides in words.
#[derive(FromPyObject, Clone, Copy)]
pub(super) struct TokenScales {
    pub(super) words: u64,
    /// Words of a token.
    pub(super) token_words: usize,
    pub(super) token_stride: usize,
    pub(super) word_stride: usize,
}

/// The scales of received rows: an address, and strides in words.
#[derive(FromPyObject, Clone, Copy)]
pub(super) struct RowScales {
    pub(super) words: u64,
    pub(super) row_stride: usize,
    /// Added for each expert before the row's.
    pub(super) expert_stride: usize,
    pub(super) word_stride: usize,
}

/// The scales of received rows in tiles: an address, and the tile rows of each expert.
#[derive(FromPyObject, Clone, Copy)]
pub(super) struct ScaleTiles {
    pub(super) words: u64,
    pub(super) tile_rows: usize,
}
