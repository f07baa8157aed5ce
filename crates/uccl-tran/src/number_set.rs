//! A set of numbers that have come.

/// Numbers from 0 on of which most come in the end, such as those of a message's chunks. It has a
/// bit for each number up to the largest: its user bounds them.
#[derive(Clone, Debug, Default)]
pub struct NumberSet {
    words: Vec<u64>,
    len: u64,
}

impl NumberSet {
    /// Whether a number is there.
    #[must_use]
    pub fn has(&self, number: u64) -> bool {
        let word = self.words.get((number / 64) as usize);
        word.is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    /// Adds a number. False if it was there.
    pub fn insert(&mut self, number: u64) -> bool {
        let is_new = !self.has(number);
        let at = (number / 64) as usize;
        if self.words.len() <= at {
            self.words.resize(at + 1, 0);
        }
        self.words[at] |= 1 << (number % 64);
        self.len += u64::from(is_new);
        is_new
    }

    /// Removes all numbers, and keeps the memory.
    pub fn clear(&mut self) {
        self.words.clear();
        self.len = 0;
    }

    /// The number of numbers.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no number is there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_there_once_they_have_come_and_count_once() {
        let mut set = NumberSet::default();
        assert!(set.is_empty() && !set.has(0) && !set.has(1 << 40));
        for number in [130, 0, 63, 64, 130, 63] {
            set.insert(number);
        }
        let there: Vec<_> = (0..200).filter(|number| set.has(*number)).collect();
        assert_eq!((there, set.len()), (vec![0, 63, 64, 130], 4));
        assert!(set.insert(1) && !set.insert(1));
        set.clear();
        assert!(set.is_empty() && !set.has(64) && set.insert(64));
    }
}
