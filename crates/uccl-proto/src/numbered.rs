//! Items with consecutive numbers. They are taken out in any order, but mostly in the order in
//! which they were added.

use std::collections::VecDeque;

/// A queue with entries that are found by their number.
pub(crate) struct NumberedQueue<T> {
    /// The number of the first entry.
    first: u64,
    entries: VecDeque<Option<T>>,
}

impl<T> Default for NumberedQueue<T> {
    fn default() -> Self {
        Self { first: 1, entries: VecDeque::new() }
    }
}

impl<T> NumberedQueue<T> {
    /// The number that the next entry gets. Never 0.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    pub(crate) fn push(&mut self, entry: T) {
        self.entries.push_back(Some(entry));
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let at = self.at(number)?;
        self.entries.get_mut(at)?.as_mut()
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let at = self.at(number)?;
        let entry = self.entries.get_mut(at)?.take();
        while let Some(None) = self.entries.front() {
            self.entries.pop_front();
            self.first += 1;
        }
        entry
    }

    /// How many there are, from the oldest that has not been taken out to the newest.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entries that have not been taken out, with their numbers.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        let entries = (self.first..).zip(&mut self.entries);
        entries.filter_map(|(number, entry)| Some((number, entry.as_mut()?)))
    }

    /// Takes out all entries.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.first = self.next();
        std::mem::take(&mut self.entries).into_iter().flatten()
    }

    fn at(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_by_number_and_only_once() {
        let mut numbered = NumberedQueue::default();
        for name in ["one", "two", "three"] {
            numbered.push(name);
        }
        assert_eq!(numbered.next(), 4);
        assert_eq!(numbered.remove(2), Some("two"));
        assert_eq!(numbered.get_mut(2), None);
        assert_eq!(numbered.get_mut(3), Some(&mut "three"));
        assert_eq!(numbered.remove(2), None);
        let left: Vec<_> = numbered.iter_mut().map(|(number, name)| (number, *name)).collect();
        assert_eq!(left, [(1, "one"), (3, "three")]);
        assert_eq!(numbered.remove(1), Some("one"));
        assert_eq!(numbered.remove(1), None);
        assert_eq!(numbered.remove(9), None);
        assert_eq!(numbered.remove(0), None);
        assert_eq!(numbered.remove(3), Some("three"));
        numbered.push("four");
        assert_eq!(numbered.remove(4), Some("four"));
        assert_eq!(numbered.next(), 5);
        numbered.push("five");
        numbered.push("six");
        assert_eq!((numbered.len(), numbered.remove(5)), (2, Some("five")));
        assert_eq!(numbered.drain().collect::<Vec<_>>(), ["six"]);
        assert_eq!((numbered.len(), numbered.next()), (0, 7));
    }
}
