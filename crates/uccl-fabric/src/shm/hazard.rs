//! Hazard words: an initiator says which region it is touching, so that its owner can wait.
//!
//! The initiator, before each access, claims a word and puts the region's slot there, *then* looks at
//! the region's version in the owner's published table, and clears the word when the access is over. The
//! owner, to revoke, first changes the version, *then* looks at the words. Both orders are sequentially
//! consistent, so of an access and a revocation that meet at least one sees the other: either the access
//! sees the new version and goes no further, or the owner sees the word and waits until it is cleared.
//! Hence, once no word holds a revoked slot, no access to it is under way and none can start.
//!
//! A word is `generation << 32 | slot + 1`, or `generation << 32` when free; the generation grows with
//! every use, so that who waits for one use to end cannot mistake the next for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::segment::{Segment, Words};
use super::sync::Word;

/// How many words an area has: how many accesses to distinct regions can be under way at once.
pub const HAZARD_WORDS: usize = 64;
/// How many bytes of shared memory an area takes.
pub const HAZARD_BYTES: usize = HAZARD_WORDS * 8;

const SLOT_MASK: u64 = 0xffff_ffff;
const GENERATION: u64 = 1 << 32;

/// What a word holds for a slot. Never 0; the last slot there could be shares that of the one before.
#[inline(always)]
fn mark(slot: u32) -> u64 {
    u64::from(slot.saturating_add(1))
}

/// Claims the word `at` for `slot` when it is free.
#[inline(always)]
fn claim_at<W: Word>(words: &[W], at: usize, slot: u32) -> Option<u64> {
    let word = words.get(at)?;
    let seen = word.load(Ordering::Relaxed);
    if seen & SLOT_MASK != 0 {
        return None;
    }
    let held = seen | mark(slot);
    word.compare_exchange(seen, held).ok()?;
    W::fence_for_loom();
    Some(held)
}

/// Claims a free word, looking at `start` first.
#[inline(always)]
pub(crate) fn claim<W: Word>(words: &[W], start: usize, slot: u32) -> Option<(usize, u64)> {
    let count = words.len();
    (0..count)
        .map(|step| (start + step) % count)
        .find_map(|at| claim_at(words, at, slot).map(|held| (at, held)))
}

/// Frees a word that `claim` gave.
#[inline(always)]
pub(crate) fn clear<W: Word>(words: &[W], at: usize, held: u64) {
    if let Some(word) = words.get(at) {
        word.store((held & !SLOT_MASK).wrapping_add(GENERATION), Ordering::Release);
    }
}

/// Whether some word holds `slot`. To be called after the region's version has changed.
pub(crate) fn holds<W: Word>(words: &[W], slot: u32) -> bool {
    W::fence(Ordering::SeqCst);
    // Acquire: the accesses of the words seen cleared have ended, for whoever goes on from here.
    words.iter().any(|word| word.load(Ordering::SeqCst) & SLOT_MASK == mark(slot))
}

/// The words in use now, to be waited out with [`Hazards::ended`].
#[derive(Clone, Debug, Default)]
pub(crate) struct InUse(Vec<(usize, u64)>);

/// One direction's hazard words, in the segment that a connection shares.
#[derive(Clone, Debug)]
pub struct Hazards {
    words: Words,
}

impl Hazards {
    /// The area of [`HAZARD_BYTES`] zeroed bytes at byte `offset` of `segment`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it does not fit there, is misaligned (8 bytes; 64 is better),
    /// or the mapping is read-only.
    pub fn new(segment: &Arc<Segment>, offset: usize) -> io::Result<Self> {
        if segment.mode() != super::MapMode::ReadWrite {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { words: Words::new(segment, offset, HAZARD_WORDS)? })
    }

    /// Initiator: claims a word for `slot`, if one is free. The region's version is to be looked at
    /// after this and before the access.
    #[inline]
    pub fn try_claim(&self, slot: u32) -> Option<HazardGuard<'_>> {
        let words = self.words.as_slice();
        let (at, held) = claim(words, start_hint(), slot)?;
        Some(HazardGuard { words, at, held })
    }

    /// As [`try_claim`](Self::try_claim), for an access that outlives the call.
    pub(crate) fn try_claim_owned(&self, slot: u32) -> Option<OwnedHazard> {
        let (at, held) = claim(self.words.as_slice(), start_hint(), slot)?;
        Some(OwnedHazard { hazards: self.clone(), at, held })
    }

    /// Initiator: claims a word for `slot`, waiting for one if all are in use.
    #[inline]
    pub fn claim(&self, slot: u32) -> HazardGuard<'_> {
        loop {
            if let Some(guard) = self.try_claim(slot) {
                return guard;
            }
            std::thread::yield_now();
        }
    }

    /// Owner: whether the peer may still be touching the region that was at `slot`. To be asked after
    /// revoking it; once the answer is `false` it stays so until the slot is used again.
    ///
    /// A peer that dies in the middle of an access leaves its word standing. Its hazards may be ignored once
    /// its socket is at its end: the system closes a process's files only after all of its threads have
    /// left its memory. A peer that lives must therefore end its accesses before it closes.
    pub fn holds(&self, slot: u32) -> bool {
        holds(self.words.as_slice(), slot)
    }

    /// The uses under way.
    pub(crate) fn in_use(&self) -> InUse {
        AtomicU64::fence(Ordering::SeqCst);
        let busy = |(at, word): (usize, &AtomicU64)| {
            let held = word.load(Ordering::SeqCst);
            (held & SLOT_MASK != 0).then_some((at, held))
        };
        InUse(self.words.as_slice().iter().enumerate().filter_map(busy).collect())
    }

    /// Whether all of `uses` have ended; forgets those that have.
    pub(crate) fn ended(&self, uses: &mut InUse) -> bool {
        let words = self.words.as_slice();
        uses.0.retain(|&(at, held)| words[at].load(Ordering::Acquire) == held);
        uses.0.is_empty()
    }
}

/// Where this thread looks for a free word first: threads start on cache lines of their own.
#[inline(always)]
fn start_hint() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static START: usize = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(8) % HAZARD_WORDS;
    }
    START.with(|start| *start)
}

/// A claimed word that keeps its area; cleared when dropped.
#[derive(Debug)]
pub struct OwnedHazard {
    hazards: Hazards,
    at: usize,
    held: u64,
}

impl Drop for OwnedHazard {
    fn drop(&mut self) {
        clear(self.hazards.words.as_slice(), self.at, self.held);
    }
}

/// A claimed word; cleared when dropped.
#[derive(Debug)]
#[must_use = "the word is cleared at once when the guard is dropped"]
pub struct HazardGuard<'a> {
    words: &'a [AtomicU64],
    at: usize,
    held: u64,
}

impl Drop for HazardGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        clear(self.words, self.at, self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hazards() -> (Hazards, Arc<Segment>) {
        let segment = Arc::new(Segment::create("test", HAZARD_BYTES).unwrap());
        (Hazards::new(&segment, 0).unwrap(), segment)
    }

    #[test]
    fn a_guard_holds_its_slot() {
        let (owner, segment) = hazards();
        let initiator = Hazards::new(&segment, 0).unwrap();
        for slot in [0, 7, u32::MAX] {
            let guard = initiator.claim(slot);
            let second = initiator.claim(slot);
            assert!(owner.holds(slot) && !owner.holds(slot.wrapping_add(3)));
            drop(guard);
            assert!(owner.holds(slot));
            drop(second);
            assert!(!owner.holds(slot));
        }
    }

    #[test]
    fn there_are_as_many_words_as_said() {
        let (hazards, _) = hazards();
        let guards: Vec<_> =
            (0..HAZARD_WORDS as u32).map(|slot| hazards.try_claim(slot).unwrap()).collect();
        assert!(hazards.try_claim(0).is_none());
        assert!((0..HAZARD_WORDS as u32).all(|slot| hazards.holds(slot)));
        drop(guards);
        assert!((0..HAZARD_WORDS as u32).all(|slot| !hazards.holds(slot)));
    }

    #[test]
    fn the_next_use_is_not_taken_for_the_last() {
        let (hazards, _) = hazards();
        let guard = hazards.claim(3);
        let mut uses = hazards.in_use();
        assert!(!hazards.ended(&mut uses));
        drop(guard);
        let _next = hazards.claim(3);
        assert!(hazards.ended(&mut uses));
    }

    #[test]
    fn an_area_must_fit_and_be_writable() {
        let segment = Arc::new(Segment::create("test", HAZARD_BYTES).unwrap());
        assert!(Hazards::new(&segment, 8).is_err());
        let published = Segment::create_published("test", HAZARD_BYTES).unwrap();
        let fd = published.fd().try_clone_to_owned().unwrap();
        let read_only = Segment::map(fd, super::super::MapMode::ReadOnly, HAZARD_BYTES).unwrap();
        assert!(Hazards::new(&Arc::new(read_only), 0).is_err());
    }
}
