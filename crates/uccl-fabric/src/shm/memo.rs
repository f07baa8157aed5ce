//! A small lock-free memory of what has been looked up, so that it need not be again.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How many lines a memo has; keys that fall on one line displace each other.
const LINES: usize = 256;

/// `N` words under a sequence number that is odd while they change.
#[derive(Debug)]
#[repr(align(64))]
struct Line<const N: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; N],
}

/// A direct-mapped cache of `N`-word values, for any number of threads. A reader never waits, and a
/// writer that meets another leaves it be.
#[derive(Debug)]
pub(crate) struct Memo<const N: usize> {
    lines: Box<[Line<N>]>,
}

impl<const N: usize> Memo<N> {
    pub(crate) fn new() -> Self {
        let line = || Line { sequence: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; N] };
        Self { lines: (0..LINES).map(|_| line()).collect() }
    }

    /// What was put under `index` or under one that shares its line, whole, unless it is changing.
    #[inline(always)]
    pub(crate) fn get(&self, index: u32) -> Option<[u64; N]> {
        let line = &self.lines[index as usize % LINES];
        let before = line.sequence.load(Ordering::Acquire);
        let value = std::array::from_fn(|i| line.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let after = line.sequence.load(Ordering::Relaxed);
        (before == after && before & 1 == 0).then_some(value)
    }

    pub(crate) fn put(&self, index: u32, value: &[u64; N]) {
        let line = &self.lines[index as usize % LINES];
        let before = line.sequence.load(Ordering::Relaxed);
        let changing = before.wrapping_add(1);
        let mine = before & 1 == 0
            && line
                .sequence
                .compare_exchange(before, changing, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !mine {
            return;
        }
        fence(Ordering::Release);
        for (word, value) in line.words.iter().zip(value) {
            word.store(*value, Ordering::Relaxed);
        }
        line.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}
