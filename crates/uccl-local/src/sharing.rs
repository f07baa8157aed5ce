//! Decides whether several threads share a copy.
//!
//! With a processor free for a second thread, a shared copy takes half the time. With none, it
//! takes a tenth more than copying alone: it is handed out, and then waits for a thread that does
//! not get to run. No value of the system shows how busy the machine is, so both ways are tried and
//! timed.

use std::{
    array,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use super::INLINE;

/// Costs, in bytes, are classed by powers of two, from the first above [`INLINE`] to 1 GiB; dearer
/// copies are always shared.
const CLASSES: usize = 12;
/// How often the way that seems slower is tried again.
const TRY_EVERY: u32 = 128;
/// The weight of one copy in the average of its way is one part in this number.
const MEMORY: u32 = 8;

/// What the kernel does for each piece of a copy takes as long as copying so many bytes.
const PIECE_COST: u64 = 4 << 10;

/// The threads that make a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyThreads {
    /// One thread: the one that posts it, or one that makes progress.
    One,
    /// Every thread that has time.
    Many,
}

/// Times of the copies of one class of lengths.
#[derive(Default)]
struct Class {
    posts: AtomicU32,
    /// Nanoseconds per MiB by one thread and by many; 0 before the first copy.
    ns_a_mib: [AtomicU32; 2],
}

/// The measured times of a lane's copies.
#[derive(Default)]
pub(super) struct CopyTimes {
    classes: [Class; CLASSES],
}

impl CopyTimes {
    /// Chooses the threads for a copy that costs as much as `len` bytes in one piece, more than
    /// [`INLINE`].
    pub(super) fn choose(&self, len: u64) -> CopyThreads {
        let Some(class) = self.class(len) else { return CopyThreads::Many };
        let [one, many] = array::from_fn(|i| class.ns_a_mib[i].load(Relaxed));
        let faster = if many <= one { CopyThreads::Many } else { CopyThreads::One };
        match class.posts.fetch_add(1, Relaxed) % TRY_EVERY {
            0 if faster == CopyThreads::Many => CopyThreads::One,
            0 => CopyThreads::Many,
            _ => faster,
        }
    }

    /// Records how long a copy took that costs as much as `len` bytes in one piece.
    pub(super) fn learn(&self, threads: CopyThreads, len: u64, took: Duration) {
        let Some(class) = self.class(len) else { return };
        let known = &class.ns_a_mib[threads as usize];
        let seen = (took.as_nanos() << 20) / u128::from(len);
        let seen = u32::try_from(seen).unwrap_or(u32::MAX).max(1);
        let before = known.load(Relaxed);
        let mixed = before - before / MEMORY + seen / MEMORY;
        known.store(if before == 0 { seen } else { mixed.max(1) }, Relaxed);
    }

    fn class(&self, len: u64) -> Option<&Class> {
        let doublings = len.saturating_sub(1) / INLINE;
        self.classes.get(doublings.checked_ilog2()? as usize)
    }
}

/// The cost of a copy, in bytes of one long piece: each piece costs the kernel something, too.
pub(super) fn cost_of(len: u64, pieces: usize) -> u64 {
    len + pieces as u64 * PIECE_COST
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the next thousand copies one thread makes, if copies by one and by many threads
    /// take these times.
    fn by_one(sharing: &CopyTimes, len: u64, one_us: u64, many_us: u64) -> usize {
        let mut alone = 0;
        for _ in 0..1000 {
            let threads = sharing.choose(len);
            let us = if threads == CopyThreads::One { one_us } else { many_us };
            sharing.learn(threads, len, Duration::from_micros(us));
            alone += usize::from(threads == CopyThreads::One);
        }
        alone
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried() {
        let (sharing, len) = (CopyTimes::default(), 1 << 20);
        let idle = by_one(&sharing, len, 60, 35);
        assert!((1..100).contains(&idle), "{idle}");
        // The machine has become busy, and then idle again.
        let busy = by_one(&sharing, len, 60, 70);
        assert!((800..1000).contains(&busy), "{busy}");
        let idle = by_one(&sharing, len, 60, 35);
        assert!((1..500).contains(&idle), "{idle}");
    }

    #[test]
    fn lengths_learn_apart_and_long_ones_are_shared() {
        let sharing = CopyTimes::default();
        by_one(&sharing, INLINE + 1, 10, 20);
        assert!(by_one(&sharing, INLINE * 2 + 1, 20, 10) < 100);
        for len in [INLINE + (1 << 30), 1 << 40] {
            assert_eq!(by_one(&sharing, len, 10, 20), 0, "{len}");
        }
        assert!(sharing.class(1 << 30).is_some());
    }
}
