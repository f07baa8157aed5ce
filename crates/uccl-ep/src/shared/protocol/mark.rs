//! Marks: the contents of the protocol's words.

/// A call's number and how far it is; eight bytes in a window. No call has the number 0, so a
/// zeroed word is no mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The call.
    pub call: u64,
    /// The round, from 0.
    pub round: u16,
    /// Of `arrived`: no other round follows. Of `taken`: the peer has ended the call.
    pub is_last: bool,
}

impl Mark {
    /// The mark as a word. The upper bit is always 0.
    #[must_use]
    pub fn to_word(self) -> u64 {
        self.call << 17 | u64::from(self.round) << 1 | u64::from(self.is_last)
    }

    /// The mark in a word.
    #[must_use]
    pub fn of_word(word: u64) -> Self {
        Self { call: word >> 17, round: (word >> 1) as u16, is_last: word & 1 == 1 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_mark_survives_its_word(call in 1u64..1 << 46, round: u16, is_last: bool) {
            let mark = Mark { call, round, is_last };
            prop_assert_eq!(Mark::of_word(mark.to_word()), mark);
            prop_assert!(mark.to_word() != 0 && mark.to_word() >> 63 == 0);
        }
    }
}
