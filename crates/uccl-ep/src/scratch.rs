//! Memory that a group's calls use in turns. Fresh memory of the kernel's would be zeroed for each call, page by page.

use parking_lot::Mutex;

use crate::placing::SLOTS;

/// Memory that no call uses.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Mutex<Vec<Pieces>>);

/// Memory of one call. What is in it is of no meaning.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) bytes: Vec<u8>,
    pub(crate) words: Vec<u32>,
}

impl Scratch {
    /// So many bytes and words.
    pub(crate) fn take(&self, bytes: usize, words: usize) -> Pieces {
        let mut pieces = self.0.lock().pop().unwrap_or_default();
        pieces.bytes.resize(bytes, 0);
        pieces.words.resize(words, 0);
        pieces
    }

    /// Keeps memory for the calls that follow, for as many as may be under way.
    pub(crate) fn give_back(&self, pieces: Pieces) {
        let mut free = self.0.lock();
        if free.len() < SLOTS {
            free.push(pieces);
        }
    }
}
