//! The mark of a rank: which version its bytes are of, and how many of them are there.

/// The highest version.
pub const MAX_VERSION: u64 = (1 << 48) - 1;
/// The number of steps that says: all.
const WHOLE: u16 = u16::MAX;
/// The most steps of a plan.
pub(crate) const MOST_STEPS: usize = WHOLE as usize - 1;

/// A version, and how much of it a rank has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Mark {
    version: u64,
    steps: u16,
}

impl Mark {
    /// The mark of a rank that has all bytes of a version.
    #[must_use]
    pub fn whole(version: u64) -> Self {
        Self { version, steps: WHOLE }
    }

    /// The mark of a rank that has the bytes of this many steps.
    pub(crate) fn partial(version: u64, steps: usize) -> Self {
        let steps = u16::try_from(steps).unwrap_or(WHOLE).min(WHOLE - 1);
        Self { version, steps }
    }

    /// The version.
    #[must_use]
    pub fn version(self) -> u64 {
        self.version
    }

    /// Whether all bytes are of the version.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.steps == WHOLE
    }

    /// Whether the bytes of this many steps of a version are there.
    pub(crate) fn has(self, version: u64, steps: usize) -> bool {
        self.version == version && usize::from(self.steps) >= steps
    }

    /// The mark as one word.
    pub(crate) fn word(self) -> u64 {
        self.version << 16 | u64::from(self.steps)
    }

    /// The mark in a word and its complement. `None`: it is changing, and a copy took some of its
    /// bytes before the change and some after it.
    pub(crate) fn of([word, complement]: [u64; 2]) -> Option<Self> {
        (word == !complement).then_some(Self { version: word >> 16, steps: word as u16 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_a_word_and_its_complement() {
        for mark in [Mark::default(), Mark::whole(MAX_VERSION), Mark::partial(7, 3)] {
            assert_eq!(Mark::of([mark.word(), !mark.word()]), Some(mark));
            assert_eq!(Mark::of([mark.word(), !mark.word() ^ 0x100]), None, "half a change");
        }
        assert!(Mark::whole(5).has(5, MOST_STEPS) && !Mark::whole(5).has(4, 0));
        assert!(!Mark::partial(5, usize::MAX).is_whole());
    }
}
