//! Memory that a group's calls use in turn. The kernel would zero fresh memory for each call, page
//! by page.

use parking_lot::Mutex;

use crate::shared::places::SLOTS;

/// Memory that no call uses at the moment.
#[derive(Debug, Default)]
pub(crate) struct ScratchPool(Mutex<Vec<ScratchMemory>>);

/// Memory of one call. Its content is arbitrary.
#[derive(Debug, Default)]
pub(crate) struct ScratchMemory {
    pub(crate) bytes: Vec<u8>,
    pub(crate) words: Vec<u32>,
}

impl ScratchPool {
    /// Takes memory for so many bytes and words.
    pub(crate) fn take(&self, bytes: usize, words: usize) -> ScratchMemory {
        let mut memory = self.0.lock().pop().unwrap_or_default();
        memory.bytes.resize(bytes, 0);
        memory.words.resize(words, 0);
        memory
    }

    /// Keeps memory for later calls: as many pieces as calls may be in flight.
    pub(crate) fn recycle(&self, memory: ScratchMemory) {
        let mut free = self.0.lock();
        if free.len() < SLOTS {
            free.push(memory);
        }
    }
}
