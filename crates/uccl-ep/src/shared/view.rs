//! A mapping of a window, and offsets in it.
//!
//! A window begins with the words of streams (see [`crate::protocol`]), a cache line for each kind,
//! and the streams' headers for the calls that may be in flight. Behind them is the pool in which
//! calls are placed.

use std::{
    io,
    sync::{Arc, atomic::AtomicU64},
};

use uccl_fabric::shm::{Mapping, segment};

use crate::shared::{header, places::SLOTS};

pub(crate) const LINE: usize = 64;
/// Lines of a stream: `arrived`, `taken`, the fault of the rank with its number and the window's
/// nonce, and its headers.
pub(crate) const LINES: usize = 3 + SLOTS;
const _: () = assert!(header::WORDS * 8 == LINE && SLOTS * 8 <= LINE);
pub(crate) const PAGE: usize = 4096;

/// Bytes before the pool, for so many ranks.
#[must_use]
pub fn control_len(ranks: usize) -> usize {
    // No spread over nodes has more words: see `protocol::words_of`.
    (3 * ranks * LINES * LINE).next_multiple_of(PAGE)
}

const fn word_at(stream: usize, line: usize, index: usize) -> usize {
    (stream * LINES + line) * (LINE / 8) + index
}

/// The word that a stream's sender sets when a call's data is there.
pub(crate) fn arrived_at(stream: usize, slot: usize) -> usize {
    word_at(stream, 0, slot)
}

/// The word that a stream's receiver sets when it has taken out a call's data.
pub(crate) fn taken_at(stream: usize, slot: usize) -> usize {
    word_at(stream, 1, slot)
}

/// The word that a rank sets when it gives up.
pub(crate) fn fault_at(of: usize) -> usize {
    word_at(of, 2, 0)
}

/// The first word of the header that a stream's sender writes for a call.
pub(crate) fn header_at(stream: usize, call: u64) -> usize {
    word_at(stream, 3 + call as usize % SLOTS, 0)
}

pub(crate) const NONCE_AT: usize = word_at(0, 2, 1);

/// One rank's mapping of a window: its own, or a peer's.
#[derive(Clone, Debug)]
pub(crate) struct View {
    mapping: Arc<Mapping>,
    words: segment::Words,
    control_len: usize,
}

impl View {
    /// # Errors
    /// It is too short for the words of so many ranks.
    pub(crate) fn new(mapping: Arc<Mapping>, ranks: usize) -> io::Result<Self> {
        let control_len = control_len(ranks);
        let words = segment::Words::new(&mapping, 0, control_len / 8)?;
        Ok(Self { mapping, words, control_len })
    }

    /// The whole mapping.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// A word before the pool.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.as_slice()[at]
    }

    /// Bytes before the pool.
    pub(crate) fn control_len(&self) -> usize {
        self.control_len
    }

    /// Bytes of the pool.
    pub(crate) fn pool_len(&self) -> usize {
        self.mapping.len() - self.control_len
    }

    /// `len` bytes of the pool. Peers may write to them at any time: a reader has to see a mark
    /// first.
    pub(crate) fn pool(&self, at: usize, len: usize) -> *mut u8 {
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.pool_len());
        assert!(is_inside, "{len} bytes at {at} of a pool of {}", self.pool_len());
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.mapping.as_ptr().add(self.control_len + at) }
    }
}
