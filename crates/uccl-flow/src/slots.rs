//! The requests of a flow: a fixed number of slots.

use crate::error::FlowError;

/// The most requests of a flow that can be outstanding.
pub const MAX_OUTSTANDING: usize = 32;

/// A request of a flow, until `test` has reported its end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    index: u8,
    generation: u32,
}

impl Slot {
    /// Its place, below [`MAX_OUTSTANDING`]. No two outstanding requests of a flow share one.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.index)
    }
}

/// Slots, each with a value while it is in use.
pub(crate) struct Slots<T> {
    entries: [(u32, Option<T>); MAX_OUTSTANDING],
    /// A bit for each slot in use.
    used: u32,
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { entries: std::array::from_fn(|_| (0, None)), used: 0 }
    }

    /// Puts a value into a free slot; `None` if there is none.
    pub(crate) fn insert(&mut self, value: T) -> Option<Slot> {
        let index = self.used.trailing_ones() as usize;
        let (generation, entry) = self.entries.get_mut(index)?;
        *generation = generation.wrapping_add(1);
        *entry = Some(value);
        self.used |= 1 << index;
        Some(Slot { index: index as u8, generation: *generation })
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used == u32::MAX
    }

    /// The value of a slot in use.
    pub(crate) fn get(&self, slot: Slot) -> Result<&T, FlowError> {
        match &self.entries[slot.index()] {
            (generation, Some(value)) if *generation == slot.generation => Ok(value),
            _ => Err(FlowError::Slot(slot.index())),
        }
    }

    /// The value at a place, if that is in use.
    pub(crate) fn at(&mut self, index: usize) -> Option<&mut T> {
        self.entries.get_mut(index).and_then(|(_, value)| value.as_mut())
    }

    /// The place of the first value that is looked for.
    pub(crate) fn place(&self, is_it: impl Fn(&T) -> bool) -> Option<usize> {
        self.entries.iter().position(|(_, value)| value.as_ref().is_some_and(&is_it))
    }

    /// The first value that is looked for.
    pub(crate) fn find(&mut self, is_it: impl Fn(&T) -> bool) -> Option<&mut T> {
        let index = self.place(is_it)?;
        self.at(index)
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> Option<T> {
        self.get(slot).ok()?;
        self.used &= !(1 << slot.index);
        self.entries[slot.index()].1.take()
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|(_, value)| value.as_ref())
    }
}

/// Places of slots in the order of their requests.
pub(crate) struct Order {
    places: [u8; MAX_OUTSTANDING],
    head: usize,
    len: usize,
}

impl Order {
    pub(crate) fn new() -> Self {
        Self { places: [0; MAX_OUTSTANDING], head: 0, len: 0 }
    }

    /// Adds a place; there are at most as many as slots, so there is room.
    pub(crate) fn push(&mut self, index: usize) {
        debug_assert!(self.len < MAX_OUTSTANDING);
        self.places[(self.head + self.len) % MAX_OUTSTANDING] = index as u8;
        self.len += 1;
    }

    pub(crate) fn front(&self) -> Option<usize> {
        (self.len > 0).then(|| usize::from(self.places[self.head]))
    }

    pub(crate) fn pop(&mut self) {
        if self.len > 0 {
            self.head = (self.head + 1) % MAX_OUTSTANDING;
            self.len -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_once() {
        let mut slots = Slots::new();
        let first = slots.insert(1).expect("a free slot");
        assert_eq!(slots.remove(first), Some(1));
        let second = slots.insert(2).expect("a free slot");
        assert_eq!(second.index(), first.index());
        assert!(slots.get(first).is_err(), "its end has been reported");
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get(second).expect("in use"), &2);
        for _ in 1..MAX_OUTSTANDING {
            assert!(slots.insert(0).is_some());
        }
        assert!(slots.is_full() && slots.insert(0).is_none());
    }

    #[test]
    fn the_order_goes_round() {
        let mut order = Order::new();
        for round in 0..100 {
            order.push(round % MAX_OUTSTANDING);
            order.push(7);
            assert_eq!(order.front(), Some(round % MAX_OUTSTANDING));
            order.pop();
            assert_eq!(order.front(), Some(7));
            order.pop();
            assert_eq!(order.front(), None);
        }
    }
}
