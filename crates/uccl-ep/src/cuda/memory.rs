//! The callers' choices and scratch memory, which both modes share. Addresses are those that the
//! GPU uses; 0 is none.

use crate::shared::{
    error::{Error, Result},
    rank_set::RANK_WORDS,
    routing::{MAX_EXPERTS, MAX_TOP_K},
};

use super::params::{Placement, Routes, is_wide, max_call_tokens, segment_of};

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

/// Bytes of the memory that a dispatch uses until its combine has ended, and a layout until the
/// combines of all its dispatches have.
#[must_use]
pub fn scratch_len(choices: &Choices, ranks: usize) -> usize {
    ScratchLayout::of(choices, ranks).len
}

/// Bytes of the memory that a combine uses until it has ended.
pub const COMBINE_SCRATCH_LEN: usize = size_of::<Placement>();

/// Offsets of the tables in a dispatch's scratch memory, behind the call's number and place. The
/// counts by rank and expert lie right behind the segments' counts, with the same layout.
struct ScratchLayout {
    masks: usize,
    slots: usize,
    places: usize,
    segments: usize,
    counts: usize,
    experts: usize,
    len: usize,
}

impl ScratchLayout {
    fn of(choices: &Choices, ranks: usize) -> Self {
        let Choices { tokens, top_k, num_experts, .. } = *choices;
        let masks = size_of::<Placement>();
        let words = if is_wide(ranks) { RANK_WORDS } else { 1 };
        let slots = masks + size_of::<u64>() * words * tokens;
        let places = slots + 4 * tokens * ranks;
        let segments = places + 4 * tokens * top_k;
        let counts = segments + 4 * tokens.div_ceil(segment_of(ranks)) * (ranks + num_experts);
        let experts = counts + 4 * ranks;
        let len = experts + 4 * num_experts;
        Self { masks, slots, places, segments, counts, experts, len }
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
        let most = max_call_tokens(ranks);
        if tokens > most {
            let why = format!("{tokens} tokens, and a call on a GPU has {most} at most");
            return Err(Error::invalid(why));
        }
        Ok(())
    }

    /// The routing's tables, in the scratch memory at this address.
    pub(super) fn routes(&self, ranks: usize, scratch: u64) -> Routes {
        let places = ScratchLayout::of(self, ranks);
        let at = |offset: usize| scratch + offset as u64;
        Routes {
            choices: self.experts,
            masks: at(places.masks),
            slots: at(places.slots),
            places: at(places.places),
            experts: at(places.experts),
            counts: at(places.counts),
            segments: at(places.segments),
            tokens: self.tokens as u32,
            top_k: self.top_k as u32,
            local_experts: (self.num_experts / ranks) as u32,
            is_64: u32::from(self.is_64),
        }
    }
}

/// Alignment of a sub-buffer, in words of four bytes: torch has other kernels for tensors that are
/// not aligned so.
const OFFSET_WORDS: usize = 4;

/// The offsets of sub-buffers, one behind the other, in words of four bytes. Lengths that no memory
/// has stay too large.
#[derive(Default)]
pub(super) struct Offsets {
    /// The end of the last sub-buffer.
    pub(super) len: usize,
}

impl Offsets {
    /// The offset of the next sub-buffer, of so many words.
    pub(super) fn next(&mut self, words: usize) -> usize {
        let offset = self.len;
        let aligned = words.div_ceil(OFFSET_WORDS).saturating_mul(OFFSET_WORDS);
        self.len = offset.saturating_add(aligned);
        offset
    }

    /// As [`next`](Self::next), for scratch memory of so many bytes.
    pub(super) fn next_bytes(&mut self, len: usize) -> usize {
        self.next(len.div_ceil(size_of::<u32>()))
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
