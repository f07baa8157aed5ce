//! Sets of ranks.

use std::ops::{BitAnd, BitOr, Sub};

use uccl_kernels::{cpp::Struct, kernel_struct};

/// The most ranks of a group. The largest groups that are known have 320 ranks; with 512 each rank
/// still has a thread of a block, and the kernels' shared memory has room for the words of all.
pub const MAX_RANKS: usize = 512;
/// The most ranks of a group whose sets are one word.
pub(crate) const NARROW_RANKS: usize = u64::BITS as usize;
/// Words of a set.
pub(crate) const RANK_WORDS: usize = MAX_RANKS.div_ceil(NARROW_RANKS);

kernel_struct! {
    /// A set of ranks: a bit for each.
    #[derive(Clone, Copy, PartialEq, Eq, Default)]
    pub struct RankSet = "UcclEpRankSet" (pub(crate)) {
        words: [u64; RANK_WORDS],
    }
}

/// A set of ranks in C++.
pub(crate) const RANK_SET: Struct = RankSet::STRUCT;

impl RankSet {
    /// The set without ranks.
    pub const EMPTY: Self = Self { words: [0; RANK_WORDS] };

    /// The first `count` ranks, [`MAX_RANKS`] at most.
    #[must_use]
    pub fn first(count: usize) -> Self {
        (0..count.min(MAX_RANKS)).collect()
    }

    /// The set of one rank; empty if no group has such a rank.
    #[must_use]
    pub fn of(rank: usize) -> Self {
        [rank].into_iter().collect()
    }

    /// Whether it has a rank.
    #[must_use]
    pub fn has(&self, rank: usize) -> bool {
        let (word, bit) = place_of(rank);
        self.words.get(word).is_some_and(|word| word >> bit & 1 == 1)
    }

    /// Whether it has no rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// The number of ranks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Its ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_RANKS).filter(|rank| self.has(*rank))
    }
}

/// The index of the word with a rank's bit, and that of the bit.
pub(crate) fn place_of(rank: usize) -> (usize, usize) {
    (rank / NARROW_RANKS, rank % NARROW_RANKS)
}

impl std::fmt::Debug for RankSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Ranks that no group has are left out.
impl FromIterator<usize> for RankSet {
    fn from_iter<T: IntoIterator<Item = usize>>(ranks: T) -> Self {
        let mut set = Self::EMPTY;
        for rank in ranks {
            let (word, bit) = place_of(rank);
            if let Some(word) = set.words.get_mut(word) {
                *word |= 1 << bit;
            }
        }
        set
    }
}

impl BitOr for RankSet {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self { words: std::array::from_fn(|at| self.words[at] | other.words[at]) }
    }
}

impl BitAnd for RankSet {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self { words: std::array::from_fn(|at| self.words[at] & other.words[at]) }
    }
}

/// The ranks that the other set does not have.
impl Sub for RankSet {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { words: std::array::from_fn(|at| self.words[at] & !other.words[at]) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{collection::btree_set, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn sets_are_those_of_the_standard_library(
            one in btree_set(0..MAX_RANKS, 0..40), other in btree_set(0..MAX_RANKS, 0..40)
        ) {
            let set = |ranks: &BTreeSet<usize>| ranks.iter().copied().collect::<RankSet>();
            let (a, b) = (set(&one), set(&other));
            prop_assert_eq!(a.iter().collect::<BTreeSet<_>>(), one.clone());
            prop_assert_eq!((a.len(), a.is_empty()), (one.len(), one.is_empty()));
            prop_assert_eq!(a | b, set(&(&one | &other)));
            prop_assert_eq!(a & b, set(&(&one & &other)));
            prop_assert_eq!(a - b, set(&(&one - &other)));
            prop_assert!((0..MAX_RANKS).all(|rank| a.has(rank) == one.contains(&rank)));
        }
    }

    #[test]
    fn a_set_has_the_ranks_of_a_group_and_no_more() {
        for count in [0, 1, 63, 64, 65, 128, MAX_RANKS - 1, MAX_RANKS] {
            let all = RankSet::first(count);
            assert_eq!((all.len(), all.has(count)), (count, false));
            assert!(all.iter().eq(0..count));
        }
        assert_eq!(RankSet::first(MAX_RANKS + 1), RankSet::first(MAX_RANKS));
        assert!(RankSet::of(MAX_RANKS).is_empty() && !RankSet::EMPTY.has(usize::MAX));
        assert_eq!(RankSet::of(64).words[..3], [0, 1, 0]);
        assert_eq!(format!("{:?}", RankSet::of(70) | RankSet::of(3)), "{3, 70}");
    }
}
