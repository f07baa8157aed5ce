//! One path after the other.

use super::{Candidates, PathChoice};

/// One path after the other, whatever they do.
#[derive(Clone, Copy, Default, Debug)]
pub struct RoundRobin {
    next: usize,
}

impl PathChoice for RoundRobin {
    fn choose(&mut self, candidates: &Candidates<'_>) -> Option<usize> {
        let path = candidates.next_from(self.next)?;
        self.next = path + 1;
        Some(path)
    }
}
