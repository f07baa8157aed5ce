//! Places of requests. They are made when more are outstanding than ever before, and used again.

/// A request, as NCCL holds it: its place, at an address of its own.
pub(crate) struct Ticket {
    place: usize,
}

impl Ticket {
    pub(crate) fn place(&self) -> usize {
        self.place
    }
}

/// Places, each with a value while it is in use.
pub(crate) struct Slots<T> {
    // NCCL keeps their addresses.
    #[allow(clippy::vec_box)]
    tickets: Vec<Box<Ticket>>,
    values: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { tickets: Vec::new(), values: Vec::new(), free: Vec::new() }
    }

    /// Puts a value into a free place.
    pub(crate) fn insert(&mut self, value: T) -> *const Ticket {
        let place = self.free.pop().unwrap_or_else(|| {
            self.tickets.push(Box::new(Ticket { place: self.tickets.len() }));
            self.values.push(None);
            // As many as there are places: giving one back allocates nothing.
            self.free.reserve(self.tickets.len());
            self.tickets.len() - 1
        });
        self.values[place] = Some(value);
        &raw const *self.tickets[place]
    }

    /// The value of a place that is in use.
    pub(crate) fn get(&self, place: usize) -> Option<&T> {
        self.values.get(place)?.as_ref()
    }

    /// The value of a place that is in use.
    pub(crate) fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.values.get_mut(place)?.as_mut()
    }

    pub(crate) fn remove(&mut self, place: usize) -> Option<T> {
        let value = self.values.get_mut(place)?.take()?;
        self.free.push(place);
        Some(value)
    }

    /// The places in use, with their values.
    pub(crate) fn used(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        let values = self.values.iter_mut().enumerate();
        values.filter_map(|(place, value)| Some((place, value.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_used_once_and_keeps_its_address() {
        let mut slots = Slots::new();
        let (first, second) = (slots.insert('a'), slots.insert('b'));
        assert_ne!(first, second);
        // SAFETY: the slots keep their tickets.
        let (one, two) = unsafe { ((*first).place(), (*second).place()) };
        assert_eq!(slots.remove(one), Some('a'));
        assert_eq!((slots.remove(one), slots.get_mut(one)), (None, None), "it has ended");
        assert_eq!(slots.get_mut(two), Some(&mut 'b'));
        assert_eq!(slots.insert('c'), first, "the place is used again");
        for _ in 0..100 {
            slots.insert('d');
        }
        assert_eq!(slots.used().count(), 102);
        // SAFETY: as above.
        assert_eq!(unsafe { (*second).place() }, two);
    }
}
