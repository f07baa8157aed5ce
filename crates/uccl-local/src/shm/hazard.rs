//! Hazard words: an initiator announces which region it is accessing, so that the region's owner
//! can wait.
//!
//! The initiator, before each access, claims a word and puts the region's slot there, *then* looks
//! at the region's version in the owner's published table, and clears the word when the access is
//! over. The owner, to revoke, first changes the version, *then* looks at the words. Both orders
//! are sequentially consistent, so of an access and a revocation that meet at least one sees the
//! other: either the access sees the new version and goes no further, or the owner sees the word
//! and waits until it is cleared. Hence, once no word holds a revoked slot, no access to it is
//! under way and none can start.
//!
//! A word is `generation << 32 | slot + 1`, or `generation << 32` when free; the generation grows
//! with every use.
//!
//! Both ends can write the words. The owner relies on them as far as the initiator is honest. The
//! initiator never does: it keeps its own record of its accesses in [`Accesses`](super::Accesses).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::segment::{self, Mapping, Words};
use super::sync::Word;

/// How many words an area has: how many accesses to distinct regions can be under way at once.
pub const HAZARD_WORDS: usize = 64;
/// How many bytes of shared memory an area takes.
pub const HAZARD_BYTES: usize = HAZARD_WORDS * 8;

pub(super) const SLOT_MASK: u64 = 0xffff_ffff;

/// The value of a word that holds a slot. Never 0; the highest possible slot shares the value of
/// the one before.
#[inline(always)]
pub(super) fn mark(slot: u32) -> u64 {
    u64::from(slot.saturating_add(1))
}

/// Whether some word holds `slot`. Call it after the region's version has changed.
pub(crate) fn holds<W: Word>(words: &[W], slot: u32) -> bool {
    W::fence(Ordering::SeqCst);
    // Acquire: the accesses of the words seen cleared have ended before the caller's next accesses.
    words.iter().any(|word| word.load(Ordering::SeqCst) & SLOT_MASK == mark(slot))
}

/// One direction's hazard words, in the segment that a connection shares.
#[derive(Clone, Debug)]
pub struct Hazards {
    words: Words,
}

impl Hazards {
    /// The area of [`HAZARD_BYTES`] zeroed bytes at byte `offset` of a segment.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it does not fit there, is misaligned (8 bytes; 64 is
    /// better), or the mapping is read-only.
    pub fn new(segment: &Arc<Mapping>, offset: usize) -> io::Result<Self> {
        if segment.mode() != segment::MapMode::ReadWrite {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { words: Words::new(segment, offset, HAZARD_WORDS)? })
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        self.words.as_slice()
    }

    /// For the owner: whether the peer may still be accessing the region that was in `slot`. Ask
    /// after revoking it; once the answer is `false`, it stays so until the slot is used again.
    ///
    /// A peer that dies in the middle of an access leaves its word set. Its hazards may be ignored
    /// once its socket has ended: the system closes a process's files only after all of its threads
    /// have left its memory. A peer that lives must therefore end its accesses before it closes the
    /// socket.
    pub fn holds(&self, slot: u32) -> bool {
        holds(self.words.as_slice(), slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uccl_fabric::shm::Segment;

    #[test]
    fn an_area_must_fit_and_be_writable() {
        let segment = Segment::create("test", HAZARD_BYTES).unwrap();
        assert!(Hazards::new(&segment, 8).is_err());
        let published = Segment::create_published("test", HAZARD_BYTES).unwrap();
        let fd = published.fd().try_clone_to_owned().unwrap();
        let read_only = Mapping::of(fd, super::segment::MapMode::ReadOnly, HAZARD_BYTES).unwrap();
        assert!(Hazards::new(&Arc::new(read_only), 0).is_err());
    }
}
