//! The better of two paths at random (Mitzenmacher, "The Power of Two Choices in Randomized Load
//! Balancing", 1996), by their round trips, as UCCL-Tran chooses (arXiv 2504.17307).

use super::{Candidates, PathChoice, PathState};

/// Draws two paths and takes the one with the shorter smoothed round trip. A path that was not
/// measured yet counts as the shortest, or nobody would measure it.
#[derive(Clone, Copy, Debug)]
pub struct TwoChoices {
    state: u64,
}

impl TwoChoices {
    /// Draws from this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A number below `end`, by SplitMix64 (Steele et al., OOPSLA 2014).
    fn draw(&mut self, end: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * end as u128) >> 64) as usize
    }
}

/// Paths with the same round trip, which are all at first, are told apart by their load.
fn cost(path: &PathState) -> (u64, u64) {
    (path.rtt_ns, path.in_flight_bytes)
}

impl PathChoice for TwoChoices {
    fn choose(&mut self, candidates: &Candidates<'_>) -> Option<usize> {
        let count = candidates.paths.len();
        if count == 0 {
            return None;
        }
        let (from, other) = (self.draw(count), self.draw(count));
        let first = candidates.next_from(from)?;
        let second = candidates.next_from(other)?;
        let is_better = cost(&candidates.paths[second]) < cost(&candidates.paths[first]);
        Some(if is_better { second } else { first })
    }
}
