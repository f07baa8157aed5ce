//! A ring of commands of 128 bits: several producers push, one proxy pops.
//!
//! Nothing here needs 16 bytes to be written as one unit. Each half has a bit for the lap of the
//! ring in which it was written. A command is there when both halves have the bit of this lap, so a
//! pair of which one half has landed is not seen. The slots begin zeroed, so the first lap writes
//! ones.
//!
//! A producer claims a slot only where the ring has room, and so never waits with a claim that the
//! proxy would have to wait for.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use uccl_fabric::shm::{Mapping, Segment, segment, sync::Word};

use super::command::LAP;

/// The memory of a ring.
pub(super) trait Storage {
    type Word: Word;
    /// All words: see [`HEAD`], [`TAIL`] and [`SLOTS_AT`].
    fn words(&self) -> &[Self::Word];
}

/// The number of slots that were claimed.
const HEAD: usize = 0;
/// The tail as a producer saw it last: the proxy's own line is read only where the ring seems full.
const SEEN: usize = 1;
/// The number of commands that were popped; on a cache line of its own.
pub(crate) const TAIL: usize = 16;
/// The first slot's first half.
pub(crate) const SLOTS_AT: usize = 32;

/// Words of a ring with `slots` slots.
const fn words_of(slots: u64) -> usize {
    SLOTS_AT + 2 * slots as usize
}

/// The lap's bit in both halves of the command at a position.
const fn lap(at: u64, slots: u64) -> u64 {
    if at & slots == 0 { LAP } else { 0 }
}

/// The producers' end of a ring; all of them share it.
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

    /// Pushes a command with clear upper bits. False if the ring is full.
    pub(super) fn try_push(&self, halves: [u64; 2]) -> bool {
        let mut at = self.word(HEAD).load(Ordering::Relaxed);
        loop {
            if !self.has_room(at) {
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

    /// Whether the proxy is done with the slot: its loads of the slot come before its store of the
    /// tail, and that comes before the tail that is seen here.
    fn has_room(&self, at: u64) -> bool {
        let is_free = |tail: u64| (at.wrapping_sub(tail) as i64) < self.slots as i64;
        if is_free(self.word(SEEN).load(Ordering::Acquire)) {
            return true;
        }
        let tail = self.word(TAIL).load(Ordering::Acquire);
        self.word(SEEN).store(tail, Ordering::Release);
        is_free(tail)
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
}

const FULL_NAP: Duration = Duration::from_micros(20);

/// The proxy's end of a ring.
pub(super) struct Popper<S> {
    fifo: Fifo<S>,
    tail: u64,
    published: u64,
}

/// The proxy publishes its tail this often in a lap, and whenever the ring is empty.
const PUBLISHED_PER_LAP: u64 = 8;

impl<S: Storage> Popper<S> {
    /// A ring has one popper, and nothing has been popped from it yet.
    pub(super) fn new(fifo: Fifo<S>) -> Self {
        Self { fifo, tail: 0, published: 0 }
    }

    /// The next command, with the ring's bits in it; `None` unless both halves have landed.
    pub(super) fn pop(&mut self) -> Option<[u64; 2]> {
        let lap = lap(self.tail, self.fifo.slots);
        let halves = self.fifo.slot(self.tail).map(|half| half.load(Ordering::Acquire));
        if halves.iter().any(|half| half & LAP != lap) {
            self.publish();
            return None;
        }
        self.tail += 1;
        if self.tail.is_multiple_of((self.fifo.slots / PUBLISHED_PER_LAP).max(1)) {
            self.publish();
        }
        Some(halves)
    }

    /// Publishes the number of popped commands to producers.
    fn publish(&mut self) {
        if self.published != self.tail {
            self.published = self.tail;
            self.fifo.word(TAIL).store(self.tail, Ordering::Release);
        }
    }
}

/// A ring in memory of its own; a device may map its pages too.
#[derive(Clone)]
pub(super) struct RingMemory {
    words: segment::Words,
    memory: Arc<Mapping>,
}

impl Storage for RingMemory {
    type Word = AtomicU64;

    fn words(&self) -> &[AtomicU64] {
        self.words.as_slice()
    }
}

impl Fifo<RingMemory> {
    pub(super) fn in_memory(slots: u64) -> io::Result<Self> {
        // A device's driver locks whole pages.
        const PAGE: usize = 4096;
        let words = words_of(slots);
        let segment = Segment::create("uccl-ep-fifo", (8 * words).next_multiple_of(PAGE))?;
        let memory = Arc::clone(&segment);
        Ok(Self::new(RingMemory { words: segment::Words::new(&memory, 0, words)?, memory }, slots))
    }

    /// All of the ring, for a device that pushes to it.
    pub(super) fn memory(&self) -> &Arc<Mapping> {
        &self.storage.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(slots: u64) -> (Fifo<RingMemory>, Popper<RingMemory>) {
        let fifo = Fifo::in_memory(slots).unwrap();
        (fifo.clone(), Popper::new(fifo))
    }

    #[test]
    fn a_full_ring_takes_nothing_until_something_is_popped() {
        let (fifo, mut popper) = ring(4);
        for lap in 0..5 {
            for at in 0..4 {
                assert!(fifo.try_push([lap, at]));
            }
            assert!(!fifo.try_push([9, 9]) && !fifo.push([9, 9], Instant::now()));
            for at in 0..4 {
                assert_eq!(
                    popper.pop().map(|halves| halves.map(|half| half & !LAP)),
                    Some([lap, at])
                );
            }
            assert_eq!(popper.pop(), None);
        }
    }

    #[test]
    fn half_a_command_is_not_seen_in_any_lap() {
        let (fifo, mut popper) = ring(2);
        for at in 0..9 {
            // A device's stores of eight bytes land one by one, in either order.
            let bit = lap(at, 2);
            let order = if at % 3 == 0 { [1, 0] } else { [0, 1] };
            fifo.word(HEAD).store(at + 1, Ordering::Relaxed);
            assert_eq!(popper.pop(), None, "nothing has landed");
            fifo.slot(at)[order[0]].store(5 | bit, Ordering::Release);
            assert_eq!(popper.pop(), None, "half {} of command {at} has landed", order[0]);
            fifo.slot(at)[order[1]].store(5 | bit, Ordering::Release);
            assert_eq!(popper.pop(), Some([5 | bit; 2]));
        }
    }

    #[test]
    fn producers_that_push_at_once_lose_nothing() {
        let (fifo, mut popper) = ring(8);
        const EACH: u64 = 20_000;
        let deadline = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            for producer in 0..3 {
                let fifo = fifo.clone();
                scope.spawn(move || {
                    for number in 0..EACH {
                        assert!(fifo.push([producer, number], deadline));
                    }
                });
            }
            let mut next = [0; 3];
            while next != [EACH; 3] {
                assert!(Instant::now() < deadline);
                let Some([producer, number]) = popper.pop().map(|all| all.map(|half| half & !LAP))
                else {
                    thread::yield_now();
                    continue;
                };
                assert_eq!(number, next[producer as usize], "of producer {producer}");
                next[producer as usize] += 1;
            }
        });
        assert_eq!(popper.pop(), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{sync::atomic::AtomicU64, thread};
    use uccl_fabric::shm::sync::explore;

    use super::*;

    #[derive(Clone)]
    struct LoomMemory(loom::sync::Arc<Vec<AtomicU64>>);

    impl Storage for LoomMemory {
        type Word = AtomicU64;

        fn words(&self) -> &[AtomicU64] {
            &self.0
        }
    }

    fn ring(slots: u64) -> Fifo<LoomMemory> {
        let words = (0..words_of(slots)).map(|_| AtomicU64::new(0)).collect();
        Fifo::new(LoomMemory(loom::sync::Arc::new(words)), slots)
    }

    /// Pops `count` commands, and checks that both halves of each are equal.
    fn popped(fifo: Fifo<LoomMemory>, count: usize) -> Vec<u64> {
        let mut popper = Popper::new(fifo);
        let mut all = Vec::new();
        while all.len() < count {
            match popper.pop().map(|halves| halves.map(|half| half & !LAP)) {
                Some([first, second]) => {
                    assert_eq!(first, second, "two commands are mixed");
                    all.push(first);
                }
                None => thread::yield_now(),
            }
        }
        all
    }

    #[test]
    fn loom_a_command_is_seen_whole_in_every_lap() {
        explore(|| {
            let fifo = ring(1);
            let producer = fifo.clone();
            let pushing = thread::spawn(move || {
                for number in 1..=3 {
                    while !producer.try_push([number, number]) {
                        thread::yield_now();
                    }
                }
            });
            assert_eq!(popped(fifo, 3), [1, 2, 3]);
            pushing.join().unwrap();
        });
    }

    #[test]
    fn loom_two_producers_share_a_ring() {
        explore(|| {
            let fifo = ring(2);
            let pushing = [1, 2].map(|number| {
                let producer = fifo.clone();
                thread::spawn(move || {
                    while !producer.try_push([number, number]) {
                        thread::yield_now();
                    }
                })
            });
            let mut all = popped(fifo, 2);
            all.sort_unstable();
            assert_eq!(all, [1, 2]);
            pushing.into_iter().for_each(|pushing| pushing.join().unwrap());
        });
    }
}
