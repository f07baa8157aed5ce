//! The places of calls' data in the ranks' windows.
//!
//! Calls are numbered, and placed one behind the other, around and around, at the same place in
//! every window: all ranks make the same calls in the same order and compute the same places.
//! Before a rank writes to a peer's place, it waits until this peer has ended the earlier calls
//! that overlap it. So a small call never waits for the one before it, and a call as large as the
//! window waits for exactly that one. A round has only a few calls, so that the memory they touch
//! stays in caches.

use std::collections::VecDeque;

use smallvec::SmallVec;

/// Calls that may be in flight at once: each has words of its own (see [`crate::protocol`]).
pub const SLOTS: usize = 8;

/// Calls of a round: two dispatches and two combines may be in flight at a time.
pub(crate) const ROUND: usize = 4;

/// Each place begins at a multiple of this many bytes: the unit of writes to far peers.
pub(crate) const PLACE_ALIGN: usize = 64;

/// The place of a call's data, and the earlier calls that a peer must have ended before it is
/// written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The call's number; the first is 1.
    pub call: u64,
    /// Its begin, in bytes from the start of the pool.
    pub offset: usize,
    /// The numbers of these earlier calls.
    pub after: SmallVec<[u64; SLOTS]>,
}

/// The places of a window's last calls.
#[derive(Debug)]
pub struct Places {
    next_call: u64,
    next_offset: usize,
    recent: VecDeque<(u64, std::ops::Range<usize>)>,
}

impl Default for Places {
    fn default() -> Self {
        Self::from_call(1)
    }
}

impl Places {
    /// Starts with this number, in an empty window.
    #[must_use]
    pub fn from_call(call: u64) -> Self {
        Self { next_call: call, next_offset: 0, recent: VecDeque::new() }
    }

    /// The number that the next call will have.
    #[must_use]
    pub fn next_call(&self) -> u64 {
        self.next_call
    }

    /// The next call's place, of `len` bytes in a pool of `pool` bytes; `None` if the pool is too
    /// small.
    pub fn take(&mut self, len: usize, pool: usize) -> Option<Place> {
        if len > pool {
            return None;
        }
        let round = pool.min(len.saturating_mul(ROUND));
        let offset = if self.next_offset + len <= round { self.next_offset } else { 0 };
        let range = offset..offset + len;
        let call = self.next_call;
        let overlaps =
            |other: &std::ops::Range<usize>| other.start < range.end && range.start < other.end;
        // The call that used the same words counts as overlapping.
        let is_before =
            |(other, place): &&(u64, _)| call - other == SLOTS as u64 || overlaps(place);
        let after = self.recent.iter().filter(is_before).map(|(other, _)| *other).collect();
        self.recent.push_back((call, range));
        if self.recent.len() > SLOTS {
            self.recent.pop_front();
        }
        self.next_call += 1;
        self.next_offset = offset + len;
        Some(Place { call, offset, after })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(places: &mut Places, len: usize) -> (u64, usize, Vec<u64>) {
        let place = places.take(len, 100).unwrap();
        (place.call, place.offset, place.after.to_vec())
    }

    #[test]
    fn calls_go_around_and_wait_for_the_calls_that_they_overlap() {
        let mut places = Places::default();
        assert_eq!(taken(&mut places, 40), (1, 0, vec![]));
        assert_eq!(taken(&mut places, 40), (2, 40, vec![]));
        assert_eq!(taken(&mut places, 40), (3, 0, vec![1]));
        assert_eq!(taken(&mut places, 100), (4, 0, vec![1, 2, 3]));
        assert_eq!(taken(&mut places, 10), (5, 0, vec![1, 3, 4]));
        assert_eq!(taken(&mut places, 20), (6, 10, vec![1, 3, 4]));
        assert_eq!(
            taken(&mut places, 5),
            (7, 0, vec![1, 3, 4, 5]),
            "a round of small calls is short"
        );
        assert_eq!(places.take(101, 100), None);
        assert_eq!(places.next_call(), 8);
    }

    #[test]
    fn words_are_used_again_only_after_their_last_call() {
        let mut places = Places::default();
        for call in 1..=50u64 {
            let (number, _, after) = taken(&mut places, 1);
            // The call that used the same words, and the call that had the same place.
            let before = [SLOTS as u64, ROUND as u64]
                .map(|ago| call.checked_sub(ago).filter(|old| *old > 0));
            let expected: Vec<u64> = before.into_iter().flatten().collect();
            assert_eq!((number, after), (call, expected));
        }
    }

    #[test]
    fn words_are_used_again_only_after_their_last_call_wherever_that_was() {
        let mut places = Places::default();
        let all = [1, 4, 4, 4, 5, 8, 10, 15, 20].map(|len| taken(&mut places, len));
        assert!(all[..8].iter().all(|(.., after)| after.is_empty()), "none overlaps: {all:?}");
        assert_eq!(all[8], (9, 51, vec![1]));
    }
}
