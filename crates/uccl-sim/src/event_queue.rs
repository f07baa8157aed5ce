//! Events in the order of their times.
//!
//! A wheel of slots, each some nanoseconds wide, holds the near future, and a heap the rest. A slot
//! is sorted when its time comes. Events are small values in vectors that keep their memory, so an
//! event costs neither an allocation nor a path through a large heap.

use std::{cmp::Reverse, collections::BinaryHeap};

/// A slot is two to the power of this many nanoseconds wide.
const SLOT_BITS: u32 = 5;
const SLOTS: usize = 1 << 14;
const WORDS: usize = SLOTS / 64;

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    at_ns: u64,
    /// Events of one time come in the order in which they were pushed.
    order: u64,
    event: T,
}

impl<T> Entry<T> {
    fn key(&self) -> (u64, u64) {
        (self.at_ns, self.order)
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl<T> Eq for Entry<T> {}
impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// A queue of events.
#[derive(Debug)]
pub struct EventQueue<T> {
    /// Entries of the slot that is being worked off, the next one last.
    current: Vec<Entry<T>>,
    slots: Vec<Vec<Entry<T>>>,
    /// A bit for each slot with entries.
    filled: [u64; WORDS],
    far: BinaryHeap<Reverse<Entry<T>>>,
    /// The slot of `current`, counted from time 0.
    slot: u64,
    order: u64,
    len: usize,
}

impl<T: Copy> Default for EventQueue<T> {
    fn default() -> Self {
        Self {
            current: Vec::new(),
            slots: (0..SLOTS).map(|_| Vec::new()).collect(),
            filled: [0; WORDS],
            far: BinaryHeap::new(),
            slot: 0,
            order: 0,
            len: 0,
        }
    }
}

impl<T: Copy> EventQueue<T> {
    /// Adds an event. A time before that of the last event counts as that time.
    pub fn push(&mut self, at_ns: u64, event: T) {
        self.order += 1;
        self.len += 1;
        let entry = Entry { at_ns, order: self.order, event };
        let slot = at_ns >> SLOT_BITS;
        if slot <= self.slot {
            let place = self.current.partition_point(|other| other.key() > entry.key());
            self.current.insert(place, entry);
        } else if slot < self.slot + SLOTS as u64 {
            let place = slot as usize % SLOTS;
            self.slots[place].push(entry);
            self.filled[place / 64] |= 1 << (place % 64);
        } else {
            self.far.push(Reverse(entry));
        }
    }

    /// Takes the earliest event and its time.
    pub fn pop(&mut self) -> Option<(u64, T)> {
        if self.current.is_empty() {
            self.turn()?;
        }
        let entry = self.current.pop()?;
        self.len -= 1;
        Some((entry.at_ns, entry.event))
    }

    /// How many events there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no event.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Goes on to the next slot with events.
    fn turn(&mut self) -> Option<()> {
        let far = self.far.peek().map(|Reverse(entry)| entry.at_ns >> SLOT_BITS);
        let slot = match (self.next_filled(), far) {
            (Some(near), Some(far)) => near.min(far),
            (near, far) => near.or(far)?,
        };
        self.slot = slot;
        let place = slot as usize % SLOTS;
        std::mem::swap(&mut self.current, &mut self.slots[place]);
        self.filled[place / 64] &= !(1 << (place % 64));
        while self.far.peek().is_some_and(|Reverse(entry)| entry.at_ns >> SLOT_BITS == slot) {
            self.current.extend(self.far.pop().map(|Reverse(entry)| entry));
        }
        self.current.sort_unstable_by_key(|entry| Reverse(entry.key()));
        Some(())
    }

    /// The next slot of the wheel with events.
    fn next_filled(&self) -> Option<u64> {
        let first = (self.slot + 1) as usize % SLOTS;
        let (word, bit) = (first / 64, first % 64);
        let rest = self.filled[word] >> bit;
        if rest != 0 {
            return Some(self.slot + 1 + u64::from(rest.trailing_zeros()));
        }
        let mut ahead = (64 - bit) as u64;
        for step in 1..=WORDS {
            let bits = self.filled[(word + step) % WORDS];
            if bits != 0 {
                return Some(self.slot + 1 + ahead + u64::from(bits.trailing_zeros()));
            }
            ahead += 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_time_and_then_of_pushing() {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut queue = EventQueue::default();
        let mut model = std::collections::BTreeMap::new();
        let mut now_ns = 0;
        for order in 0..200_000u64 {
            let reach = [0, 10, 300, 5_000, 400_000, 3_000_000, 40_000_000][rng.usize(..7)];
            let at_ns = now_ns + rng.u64(0..=reach);
            queue.push(at_ns, order);
            model.insert((at_ns, order), ());
            if rng.u32(..3) > 0 {
                let ((at_ns, order), ()) = model.pop_first().expect("an event");
                assert_eq!(queue.pop(), Some((at_ns, order)));
                now_ns = at_ns;
            }
        }
        assert_eq!(queue.len(), model.len());
        for (at_ns, order) in model.into_keys() {
            assert_eq!(queue.pop(), Some((at_ns, order)));
        }
        assert!(queue.is_empty() && queue.pop().is_none());
    }
}
