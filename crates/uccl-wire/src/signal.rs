//! The change that a signal makes to a word of its owner's memory.

/// Bytes of the word that a signal changes. It is aligned to as many.
pub const SIGNAL_LEN: u64 = 8;

/// The change of a word: a little-endian integer of [`SIGNAL_LEN`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The word becomes this.
    Set(u64),
    /// This is added to the word, which wraps around.
    Add(u64),
}

impl Change {
    /// The word's value after the change.
    #[must_use]
    pub fn of(self, word: u64) -> u64 {
        match self {
            Self::Set(value) => value,
            Self::Add(value) => word.wrapping_add(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_set_or_added_to() {
        assert_eq!(Change::Set(5).of(9), 5);
        assert_eq!(Change::Add(5).of(u64::MAX), 4, "it wraps around");
    }
}
