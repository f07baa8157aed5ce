//! Data on its way to a far peer: a ring of registered memory for each, in the order in which it is
//! sent.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use parking_lot::{Mutex, MutexGuard};

/// One peer's part of the memory to send from. Positions count bytes since the beginning; a piece
/// does not go past the end of the ring, but begins again at its start.
pub(super) struct Outbox {
    /// The offset of the ring in the memory to send from.
    base: usize,
    len: usize,
    /// Whether it is no ring, but laid out as the peer's window. Its producer knows by the protocol
    /// when the peer has taken the data that lay there before.
    is_mirror: bool,
    /// The position up to which it was filled. A producer holds the lock while it fills, so that
    /// pieces are pushed in the order in which they lie.
    head: Mutex<u64>,
    /// The position up to which the peer has the data.
    tail: AtomicU64,
    /// A producer waits: all pushed pieces should be sent, though no signal follows them yet.
    is_send_requested: AtomicBool,
    /// The reason for which nothing can be sent to the peer any more.
    failure: OnceLock<String>,
}

impl Outbox {
    pub(super) fn new(base: usize, len: usize) -> Self {
        Self {
            base,
            len,
            is_mirror: false,
            head: Mutex::default(),
            tail: AtomicU64::new(0),
            is_send_requested: AtomicBool::new(false),
            failure: OnceLock::new(),
        }
    }

    pub(super) fn mirror(base: usize, len: usize) -> Self {
        Self { is_mirror: true, ..Self::new(base, len) }
    }

    /// Its offset in the memory to send from.
    pub(super) fn base(&self) -> usize {
        self.base
    }

    /// Records that nothing can be sent to the peer any more. The first reason is kept.
    pub(super) fn fail(&self, why: impl FnOnce() -> String) {
        self.failure.get_or_init(why);
    }

    /// The reason for which nothing can be sent to the peer any more.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The right to fill the ring; `None` when that cannot be had before a deadline.
    pub(super) fn lock(&self, deadline: Instant) -> Option<MutexGuard<'_, u64>> {
        self.head.try_lock_until(deadline)
    }

    /// Whether a piece is no longer than the ring.
    pub(super) fn holds(&self, len: usize) -> bool {
        len <= self.len
    }

    /// Room for a piece: where it begins in the memory to send from. `None` if the peer has not
    /// taken enough yet.
    pub(super) fn room(&self, head: &mut u64, len: usize) -> Option<usize> {
        let start = place(*head, len, self.len);
        let end = start + len as u64;
        let tail = self.tail.load(Ordering::Acquire);
        // In an empty ring, bytes that are skipped before its end do not count.
        (tail == *head || end - tail <= self.len as u64).then(|| {
            *head = end;
            self.base + (start % self.len as u64) as usize
        })
    }

    /// Asks for all that was pushed to be sent.
    pub(super) fn request_send(&self) {
        self.is_send_requested.store(true, Ordering::Relaxed);
    }

    /// Whether a producer waits; clears the flag.
    pub(super) fn take_send_request(&self) -> bool {
        self.is_send_requested.load(Ordering::Relaxed)
            && self.is_send_requested.swap(false, Ordering::Relaxed)
    }

    /// The position behind a piece, given the one behind the piece before it.
    pub(super) fn end_of(&self, before: u64, source: usize, len: usize) -> u64 {
        if self.is_mirror {
            return before;
        }
        let (lap, at) = (self.len as u64, (source - self.base) as u64);
        let start = before - before % lap + at;
        (if at < before % lap { start + lap } else { start }) + len as u64
    }

    /// Records that the peer has all data before a position.
    pub(super) fn set_taken(&self, position: u64) {
        self.tail.store(position, Ordering::Release);
    }
}

/// The position of a piece, which does not go past the end of a ring.
fn place(head: u64, len: usize, ring: usize) -> u64 {
    let (len, ring) = (len as u64, ring as u64);
    if head % ring + len <= ring { head } else { head.next_multiple_of(ring) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_gives_no_more_room_than_the_peer_has_taken() {
        let outbox = Outbox::new(1000, 128);
        let mut head = outbox.lock(Instant::now()).unwrap();
        assert_eq!(outbox.room(&mut head, 96), Some(1000));
        // 32 bytes are left before the end: a longer piece begins at the start, and waits.
        assert_eq!(outbox.room(&mut head, 64), None);
        let first = outbox.end_of(0, 1000, 96);
        outbox.set_taken(first);
        assert_eq!((first, outbox.room(&mut head, 64)), (96, Some(1000)));
        let second = outbox.end_of(first, 1000, 64);
        assert_eq!((second, *head), (192, 192));
        // The ring reclaims a skipped range with the next piece.
        assert_eq!(outbox.room(&mut head, 64), None);
        outbox.set_taken(second);
        assert_eq!(outbox.room(&mut head, 128), Some(1000));
        assert_eq!(outbox.end_of(second, 1000, 128), 384);
    }

    #[test]
    fn the_first_reason_stays() {
        let outbox = Outbox::new(0, 128);
        outbox.fail(|| "one".into());
        outbox.fail(|| "two".into());
        assert_eq!(outbox.failure(), Some("one"));
    }
}
