//! A rank's header of a call, sent before its data: sizes that all ranks must agree on, and counts.
//!
//! Headers lie beside the words and not with the data, because the data's place depends on the
//! sizes: ranks that disagree on them still find each other's headers.

use crate::shared::error::{Error, Phase};

/// Words of a header.
pub(crate) const WORDS: usize = 8;

/// A header as it lies in a window, once for each rank and each call that may be in flight.
pub(crate) type Words = [u64; WORDS];

/// The name of the first word in errors.
pub(crate) const KINDS: &str =
    "as kind of call (1 dispatch, 2 combine, 3 dispatch whose rows stay, 4 barrier)";
/// The third kind of call, which only GPUs make.
pub(crate) const ZERO_COPY: u64 = 3;

/// A rank's header of a call.
pub(crate) struct Header<const AGREED: usize, const VALUES: usize> {
    pub(crate) phase: Phase,
    /// Sizes that all ranks must agree on.
    pub(crate) agreed: [(&'static str, usize); AGREED],
    /// Values of the sender.
    pub(crate) values: [usize; VALUES],
}

impl<const AGREED: usize, const VALUES: usize> Header<AGREED, VALUES> {
    /// As words: the kind of call, the agreed sizes, and this rank's values.
    pub(crate) fn to_words(&self) -> Words {
        const { assert!(1 + AGREED + VALUES <= WORDS) };
        let agreed = self.agreed.iter().map(|(_, value)| *value as u64);
        let all =
            [self.kind()].into_iter().chain(agreed).chain(self.values.map(|value| value as u64));
        let mut words = [0; WORDS];
        words.iter_mut().zip(all).for_each(|(word, value)| *word = value);
        words
    }

    fn kind(&self) -> u64 {
        match self.phase {
            Phase::Join => 0,
            Phase::Dispatch => 1,
            Phase::Combine => 2,
            Phase::Barrier => 4,
        }
    }

    /// The values of a peer, if it agrees on the sizes.
    pub(crate) fn values_of(
        &self,
        rank: usize,
        peer: usize,
        theirs: Words,
    ) -> Result<[u64; VALUES], Error> {
        let ours = self.to_words();
        let names = [KINDS].into_iter();
        let names = names.chain(self.agreed.iter().map(|(name, _)| *name));
        for ((what, theirs), ours) in names.zip(theirs).zip(ours) {
            if theirs != ours {
                return Err(Error::Disagree { phase: self.phase, rank, peer, what, theirs, ours });
            }
        }
        let mut values = [0; VALUES];
        values.copy_from_slice(&theirs[1 + AGREED..][..VALUES]);
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(phase: Phase, sizes: [usize; 2]) -> Header<2, 1> {
        let [payload, slots] = sizes;
        Header { phase, agreed: [("bytes", payload), ("slots", slots)], values: [9] }
    }

    #[test]
    fn the_first_value_that_differs_is_named() {
        let ours = header(Phase::Dispatch, [5, 6]);
        let said = |theirs: Header<2, 1>| {
            ours.values_of(0, 1, theirs.to_words()).map_err(|e| e.to_string())
        };
        assert_eq!(said(header(Phase::Dispatch, [5, 6])), Ok([9]));
        let why = said(header(Phase::Dispatch, [5, 7])).unwrap_err();
        assert_eq!(why, "dispatch on rank 0: rank 1 has slots 7, this rank 6");
        let why = said(header(Phase::Combine, [4, 7])).unwrap_err();
        assert!(why.contains(&format!("has {KINDS} 2, this rank 1")), "{why}");
    }
}
