//! A ring of commands of 128 bits: several producers push, one proxy pops.
//!
//! Nothing here needs 16 bytes to be written as one unit. Each half has a bit that says in which lap of the ring it was written, and
//! a command is there when both halves say this lap: of a pair of which only one half has landed, nothing is seen.
//! The slots begin zeroed, so the first lap writes ones.
//!
//! A producer claims a slot only where the ring has room, and so never waits with a claim that the proxy would have to wait
//! for.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use uccl_fabric::shm::{Segment, segment, sync::Word};

use super::command::LAP;

/// Where a ring lies.
pub(super) trait Storage {
    type Word: Word;
    /// All words: see [`HEAD`], [`TAIL`] and [`SLOTS_AT`].
    fn words(&self) -> &[Self::Word];
}

/// The slots that were claimed.
const HEAD: usize = 0;
/// The commands that were popped; on a cache line of its own.
const TAIL: usize = 16;
/// The first slot's first half.
const SLOTS_AT: usize = 32;

/// Words of a ring with as many slots.
const fn words_of(slots: u64) -> usize {
    SLOTS_AT + 2 * slots as usize
}

/// The bit that both halves of a command have.
const fn lap(at: u64, slots: u64) -> u64 {
    if at & slots == 0 { LAP } else { 0 }
}

/// Where producers push; of all of them together.
#[derive(Clone)]
pub(super) struct Fifo<S> {
    storage: S,
    slots: u64,
}

impl<S: Storage> Fifo<S> {
    /// A ring over zeroed words. The number of slots is a power of two.
    pub(super) fn new(storage: S, slots: u64) -> Self {
        assert!(slots.is_power_of_two() && storage.words().len() >= words_of(slots));
        Self { storage, slots }
    }

    fn word(&self, at: usize) -> &S::Word {
        &self.storage.words()[at]
    }

    fn slot(&self, at: u64) -> [&S::Word; 2] {
        let first = SLOTS_AT + 2 * (at & (self.slots - 1)) as usize;
        [self.word(first), self.word(first + 1)]
    }

    /// Pushes a command, whose upper bits are clear. False if the ring is full.
    pub(super) fn try_push(&self, halves: [u64; 2]) -> bool {
        let mut at = self.word(HEAD).load(Ordering::Relaxed);
        loop {
            // The proxy's loads of the slot come before its tail.
            let tail = self.word(TAIL).load(Ordering::Acquire);
            if at.wrapping_sub(tail) as i64 >= self.slots as i64 {
                return false;
            }
            match self.word(HEAD).compare_exchange(at, at + 1) {
                Ok(_) => break,
                Err(other) => at = other,
            }
        }
        let lap = lap(at, self.slots);
        let [first, second] = self.slot(at);
        first.store(halves[0] | lap, Ordering::Release);
        second.store(halves[1] | lap, Ordering::Release);
        true
    }

    /// The same, and waits for room until a deadline. False if it has passed.
    pub(super) fn push(&self, halves: [u64; 2], deadline: Instant) -> bool {
        while !self.try_push(halves) {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(FULL_NAP);
        }
        true
    }

    /// How many commands were pushed in all, or are being pushed.
    pub(super) fn pushed(&self) -> u64 {
        self.word(HEAD).load(Ordering::Acquire)
    }
}

const FULL_NAP: Duration = Duration::from_micros(20);

/// Where the one proxy pops.
pub(super) struct Popper<S> {
    fifo: Fifo<S>,
    tail: u64,
}

impl<S: Storage> Popper<S> {
    /// There is one for a ring, and nothing has been popped from it yet.
    pub(super) fn new(fifo: Fifo<S>) -> Self {
        Self { fifo, tail: 0 }
    }

    /// The next command, with the ring's bits in it; `None` if it is not all there.
    pub(super) fn pop(&mut self) -> Option<[u64; 2]> {
        let lap = lap(self.tail, self.fifo.slots);
        let halves = self.fifo.slot(self.tail).map(|half| half.load(Ordering::Acquire));
        if halves.iter().any(|half| half & LAP != lap) {
            return None;
        }
        self.tail += 1;
        self.fifo.word(TAIL).store(self.tail, Ordering::Release);
        Some(halves)
    }

    /// How many commands were popped in all.
    pub(super) fn popped(&self) -> u64 {
        self.tail
    }
}

/// A ring in memory of its own, whose pages a device may map too.
#[derive(Clone)]
pub(super) struct Shared(segment::Words);

impl Storage for Shared {
    type Word = AtomicU64;

    fn words(&self) -> &[AtomicU64] {
        self.0.as_slice()
    }
}

impl Fifo<Shared> {
    pub(super) fn in_memory(slots: u64) -> io::Result<Self> {
        let words = words_of(slots);
        let segment = Segment::create("uccl-ep-fifo", 8 * words)?;
        Ok(Self::new(Shared(segment::Words::new(&Arc::clone(&segment), 0, words)?), slots))
    }
}
