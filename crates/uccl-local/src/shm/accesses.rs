//! The initiator's side of the [hazard words](super::hazard): the accesses that this process is
//! making.
//!
//! An access first claims a word in this process's own memory. That word is the reliable record
//! that the access is under way. Then the access copies it to the shared hazard word of the same
//! number, which only informs the peer when its memory is free again. The peer can write the shared
//! words, but it can neither make us unmap memory that a copy is in nor keep a copy from beginning.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::hazard::{HAZARD_WORDS, Hazards, SLOT_MASK, mark};
use super::sync::Word;

/// Words that accesses which outlive their call never take, so that some are always left for those
/// that end with it.
const SHORT_WORDS: usize = 16;
/// How long an access waits for a word. The words are held by copies of at most a few MiB.
const PATIENCE: Duration = Duration::from_secs(5);
const GENERATION: u64 = 1 << 32;

/// Claims the word `at` for `slot` when it is free.
#[inline(always)]
fn claim_at<W: Word>(claimed: &[W], at: usize, slot: u32) -> Option<u64> {
    let word = claimed.get(at)?;
    let seen = word.load(Ordering::Relaxed);
    if seen & SLOT_MASK != 0 {
        return None;
    }
    let held = seen | mark(slot);
    word.compare_exchange(seen, held).ok().map(|_| held)
}

/// Claims a free word, looking at `start` first. Announce it before the access.
#[inline(always)]
pub(crate) fn claim<W: Word>(claimed: &[W], start: usize, slot: u32) -> Option<(usize, u64)> {
    let count = claimed.len();
    (0..count)
        .map(|step| (start + step) % count)
        .find_map(|at| claim_at(claimed, at, slot).map(|held| (at, held)))
}

/// Tells the peer of a claimed word. Loads that follow this call are ordered after the
/// announcement.
#[inline(always)]
pub(crate) fn announce<W: Word>(announced: &[W], at: usize, held: u64) {
    if let Some(word) = announced.get(at) {
        word.store(held, Ordering::SeqCst);
    }
    W::fence_for_loom();
}

/// Frees a word from `claim`. Clears the announcement first: once the claim is free, the next
/// access may announce there.
#[inline(always)]
pub(crate) fn clear<W: Word>(claimed: &[W], announced: &[W], at: usize, held: u64) {
    let free = (held & !SLOT_MASK).wrapping_add(GENERATION);
    for words in [announced, claimed] {
        if let Some(word) = words.get(at) {
            word.store(free, Ordering::Release);
        }
    }
}

/// The accesses under way at some moment. Wait for their end with [`ended`].
#[derive(Clone, Debug, Default)]
pub(crate) struct AccessSnapshot(Vec<(usize, u64)>);

/// The accesses under way now.
pub(crate) fn in_use<W: Word>(claimed: &[W]) -> AccessSnapshot {
    W::fence(Ordering::SeqCst);
    let busy = |(at, word): (usize, &W)| {
        let held = word.load(Ordering::SeqCst);
        (held & SLOT_MASK != 0).then_some((at, held))
    };
    AccessSnapshot(claimed.iter().enumerate().filter_map(busy).collect())
}

/// Whether all of `uses` have ended; forgets those that have.
pub(crate) fn ended<W: Word>(claimed: &[W], uses: &mut AccessSnapshot) -> bool {
    let holds = |at: usize, held| {
        claimed.get(at).is_some_and(|word: &W| word.load(Ordering::Acquire) == held)
    };
    uses.0.retain(|&(at, held)| holds(at, held));
    uses.0.is_empty()
}

/// Tries until it succeeds, for a bounded time.
#[cold]
pub(super) fn patiently<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let done = attempt();
        if done.is_some() || begun.elapsed() > PATIENCE {
            return done;
        }
        std::thread::yield_now();
    }
}

/// Words in this process's own memory. Each thread's first word is on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct ClaimWords([AtomicU64; HAZARD_WORDS]);

/// The accesses of this process to the memory of one peer.
#[derive(Debug)]
pub struct Accesses {
    claimed: ClaimWords,
    announced: Hazards,
}

impl Accesses {
    /// No accesses yet. `announced` are the words that the peer reads.
    #[must_use]
    pub fn new(announced: Hazards) -> Self {
        Self { claimed: ClaimWords(std::array::from_fn(|_| AtomicU64::new(0))), announced }
    }

    /// Claims a word for `slot`, if one is free, and tells the peer. Read the region's version
    /// after this and before the access.
    #[inline]
    pub fn try_claim(&self, slot: u32) -> Option<HazardGuard<'_>> {
        let (at, held) = claim(&self.claimed.0, start_hint(), slot)?;
        announce(self.announced.words(), at, held);
        Some(HazardGuard { accesses: self, at, held })
    }

    /// As [`try_claim`](Self::try_claim), but waits for a word if accesses of this process hold
    /// them all. `None` when no word becomes free within some seconds.
    #[inline]
    pub fn claim(&self, slot: u32) -> Option<HazardGuard<'_>> {
        match self.try_claim(slot) {
            None => patiently(|| self.try_claim(slot)),
            claimed => claimed,
        }
    }

    /// As [`try_claim`](Self::try_claim), for an access that outlives the call.
    pub(crate) fn try_claim_owned(self: &Arc<Self>, slot: u32) -> Option<OwnedHazard> {
        let (at, held) = claim(&self.claimed.0[SHORT_WORDS..], start_hint(), slot)?;
        let at = at + SHORT_WORDS;
        announce(self.announced.words(), at, held);
        Some(OwnedHazard { accesses: Arc::clone(self), at, held })
    }

    /// The accesses under way now.
    pub(crate) fn in_use(&self) -> AccessSnapshot {
        in_use(&self.claimed.0)
    }

    /// Whether all of `uses` have ended; forgets those that have.
    pub(crate) fn ended(&self, uses: &mut AccessSnapshot) -> bool {
        ended(&self.claimed.0, uses)
    }

    #[inline(always)]
    fn clear(&self, at: usize, held: u64) {
        clear(&self.claimed.0, self.announced.words(), at, held);
    }
}

/// Where this thread looks for a free word first. Each thread starts on a cache line of its own.
#[inline(always)]
fn start_hint() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static START: usize = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(8) % HAZARD_WORDS;
    }
    START.with(|start| *start)
}

/// A claimed word that keeps its [`Accesses`] alive; cleared when dropped.
#[derive(Debug)]
pub struct OwnedHazard {
    accesses: Arc<Accesses>,
    at: usize,
    held: u64,
}

impl Drop for OwnedHazard {
    fn drop(&mut self) {
        self.accesses.clear(self.at, self.held);
    }
}

/// A claimed word; cleared when dropped.
#[derive(Debug)]
#[must_use = "the word is cleared at once when the guard is dropped"]
pub struct HazardGuard<'a> {
    accesses: &'a Accesses,
    at: usize,
    held: u64,
}

impl Drop for HazardGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.accesses.clear(self.at, self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::hazard::HAZARD_BYTES;
    use uccl_fabric::shm::Segment;

    /// The initiator's side, and the owner's.
    fn sides() -> (Arc<Accesses>, Hazards) {
        let segment = Segment::create("test", HAZARD_BYTES).unwrap();
        let hazards = Hazards::new(&segment, 0).unwrap();
        (Arc::new(Accesses::new(hazards.clone())), hazards)
    }

    #[test]
    fn a_guard_holds_its_slot() {
        let (initiator, owner) = sides();
        for slot in [0, 7, u32::MAX] {
            let guard = initiator.try_claim(slot).unwrap();
            let second = initiator.try_claim(slot).unwrap();
            assert!(owner.holds(slot) && !owner.holds(slot.wrapping_add(3)));
            drop(guard);
            assert!(owner.holds(slot));
            drop(second);
            assert!(!owner.holds(slot));
        }
    }

    #[test]
    fn there_are_as_many_words_as_said() {
        let (initiator, owner) = sides();
        let guards: Vec<_> =
            (0..HAZARD_WORDS as u32).map(|slot| initiator.try_claim(slot).unwrap()).collect();
        assert!(initiator.try_claim(0).is_none());
        assert!((0..HAZARD_WORDS as u32).all(|slot| owner.holds(slot)));
        drop(guards);
        assert!((0..HAZARD_WORDS as u32).all(|slot| !owner.holds(slot)));
    }

    #[test]
    fn accesses_that_outlive_their_calls_leave_words_for_others() {
        let (initiator, _) = sides();
        let owned: Vec<_> = (0..).map_while(|slot| initiator.try_claim_owned(slot)).collect();
        assert_eq!(owned.len(), HAZARD_WORDS - SHORT_WORDS);
        let short: Vec<_> = (0..).map_while(|slot| initiator.try_claim(slot)).collect();
        assert_eq!(short.len(), SHORT_WORDS);
    }

    #[test]
    fn the_next_use_is_not_taken_for_the_last() {
        let (initiator, _) = sides();
        let guard = initiator.try_claim(3).unwrap();
        let mut uses = initiator.in_use();
        assert!(!initiator.ended(&mut uses));
        drop(guard);
        let _next = initiator.try_claim(3).unwrap();
        assert!(initiator.ended(&mut uses));
    }

    #[test]
    fn words_that_the_peer_writes_change_nothing_that_we_know() {
        let (initiator, owner) = sides();
        let guard = initiator.try_claim(3).unwrap();
        for scribble in [0, 4, u64::MAX] {
            owner.words().iter().for_each(|word| word.store(scribble, Ordering::SeqCst));
            assert!(!initiator.ended(&mut initiator.in_use()));
            let others: Vec<_> = (0..).map_while(|slot| initiator.try_claim(slot)).collect();
            assert_eq!(others.len(), HAZARD_WORDS - 1);
        }
        owner.words().iter().for_each(|word| word.store(u64::MAX, Ordering::SeqCst));
        drop(guard);
        assert!(initiator.ended(&mut initiator.in_use()));
    }
}
