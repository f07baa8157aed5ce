//! Words of eight bytes in registered memory, which peers read and write one-sidedly.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use uccl_p2p::{Endpoint, Iov, MrId, SharedBuf};
use uccl_wire::advert::Advert;

use super::{error::Result, mark::Mark};

/// Bytes of a word.
const WORD: usize = 8;

/// Words that are zero at first.
pub(crate) struct Words {
    memory: SharedBuf,
    mr: MrId,
}

impl Words {
    pub(crate) fn new(endpoint: &Endpoint, count: usize) -> Result<Self> {
        let memory = endpoint.alloc(count * WORD)?;
        // SAFETY: the region keeps the memory of `alloc` allocated as long as it lives itself.
        let mr = unsafe { endpoint.register(memory.as_ptr() as usize, memory.len()) }?;
        Ok(Self { memory, mr })
    }

    pub(crate) fn mr(&self) -> MrId {
        self.mr
    }

    /// The memory of `count` words from a word on, for transfers.
    pub(crate) fn iov(&self, first: usize, count: usize) -> Iov {
        Iov { mr: self.mr, ptr: self.memory.as_ptr() as usize + first * WORD, len: count * WORD }
    }

    /// The advert of all words.
    pub(crate) fn advert(&self, endpoint: &Endpoint) -> Result<Advert> {
        Ok(endpoint.advertise(self.mr, self.memory.as_ptr() as usize, self.memory.len())?)
    }

    pub(crate) fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::SeqCst)
    }

    pub(crate) fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::SeqCst);
    }

    /// Sets the mark in the first two words. Bytes that are written after it are written after it
    /// for every peer.
    pub(crate) fn set(&self, mark: Mark) {
        self.store(0, mark.word());
        self.store(1, !mark.word());
        fence(Ordering::SeqCst);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * WORD <= self.memory.len(), "word {index} is outside the memory");
        // SAFETY: the word is inside the memory, which lives as long as `self`, is page aligned,
        // and is only accessed by atomic operations and by peers.
        unsafe { AtomicU64::from_ptr(self.memory.as_ptr().cast::<u64>().add(index)) }
    }
}

/// The advert of `count` words from a word on.
pub(crate) fn part(words: &Advert, first: usize, count: usize) -> Option<Advert> {
    let (at, len) = ((first * WORD) as u64, (count * WORD) as u64);
    let addr = words.addr.checked_add(at)?;
    (at.checked_add(len)? <= words.len).then_some(Advert { addr, len, ..*words })
}
