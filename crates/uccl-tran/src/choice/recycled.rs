//! Entropies that were good are used again, as in REPS (Bonato et al., "REPS: Recycled Entropy
//! Packet Spraying for Adaptive Load Balancing and Failure Mitigation", arXiv 2407.21625).

use std::collections::VecDeque;

use super::{Candidates, PathChoice};

/// Keeps the path of each acknowledgement without a mark for one more chunk, and drops the others.
/// Without a kept path it explores in turns.
#[derive(Clone, Debug)]
pub struct RecycledEntropies {
    kept: VecDeque<usize>,
    most_kept: usize,
    next: usize,
}

impl RecycledEntropies {
    /// Keeps at most as many as there are paths.
    #[must_use]
    pub fn new(paths: usize) -> Self {
        Self { kept: VecDeque::with_capacity(paths), most_kept: paths, next: 0 }
    }
}

impl PathChoice for RecycledEntropies {
    fn choose(&mut self, candidates: &Candidates<'_>) -> Option<usize> {
        while let Some(path) = self.kept.pop_front() {
            if candidates.can_take(path) {
                return Some(path);
            }
        }
        let path = candidates.next_from(self.next)?;
        self.next = path + 1;
        Some(path)
    }

    fn on_ack(&mut self, path: usize, is_marked: bool) {
        if !is_marked && self.kept.len() < self.most_kept {
            self.kept.push_back(path);
        }
    }

    fn on_loss(&mut self, path: usize) {
        self.kept.retain(|kept| *kept != path);
    }
}
