//! A small lock-free cache of lookups.

use std::sync::atomic::{AtomicU64, Ordering};

use super::sync::Word;

/// How many lines a memo has. Indices on the same line displace each other.
const LINES: usize = 256;

/// `N` words under a sequence number that is odd while they change.
#[derive(Debug)]
#[repr(align(64))]
struct Line<W, const N: usize> {
    sequence: W,
    words: [W; N],
}

/// A direct-mapped cache of `N`-word values, for any number of threads. A reader never waits; a
/// writer that finds another writer on its line gives up.
#[derive(Debug)]
pub struct Memo<const N: usize, W = AtomicU64> {
    lines: Box<[Line<W, N>]>,
}

impl<const N: usize> Default for Memo<N> {
    /// An empty memo.
    fn default() -> Self {
        Self::with_lines(LINES)
    }
}

impl<const N: usize, W: Word> Memo<N, W> {
    /// An empty memo with `lines` lines, at least one.
    #[must_use]
    pub fn with_lines(lines: usize) -> Self {
        let line = |_| Line { sequence: W::new(0), words: std::array::from_fn(|_| W::new(0)) };
        Self { lines: (0..lines.max(1)).map(line).collect() }
    }

    #[inline(always)]
    fn line(&self, index: u32) -> &Line<W, N> {
        &self.lines[index as usize % self.lines.len()]
    }

    /// The value last put under `index`, or under another index on its line; `None` while it is
    /// changing. All zeroes if nothing was put.
    #[inline(always)]
    pub fn get(&self, index: u32) -> Option<[u64; N]> {
        let line = self.line(index);
        let before = line.sequence.load(Ordering::Acquire);
        let value = std::array::from_fn(|i| line.words[i].load(Ordering::Relaxed));
        W::fence(Ordering::Acquire);
        let after = line.sequence.load(Ordering::Relaxed);
        (before == after && before & 1 == 0).then_some(value)
    }

    /// Puts a value under `index` and displaces the value on its line. Does nothing while another
    /// thread writes that line.
    pub fn put(&self, index: u32, value: &[u64; N]) {
        let line = self.line(index);
        let before = line.sequence.load(Ordering::Relaxed);
        let mine = before & 1 == 0
            && line.sequence.compare_exchange(before, before.wrapping_add(1)).is_ok();
        if !mine {
            return;
        }
        // A reader that sees any of the new words sees the odd number too.
        W::fence(Ordering::Release);
        for (word, value) in line.words.iter().zip(value) {
            word.store(*value, Ordering::Relaxed);
        }
        line.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}
