//! Paths in turns, without those that were marked last, as STrack does (Le et al., "STrack: A
//! Reliable Multipath Transport for AI/ML Clusters", arXiv 2407.15266, section 3.1) and Ultra
//! Ethernet's transport allows (UET 1.0).

use super::{Candidates, PathChoice};

/// A bit for each path, set by a marked acknowledgement or a loss. A path with the bit loses its
/// turn once, and the bit.
#[derive(Clone, Debug)]
pub struct MarkAvoidance {
    skips: Vec<bool>,
    next: usize,
}

impl MarkAvoidance {
    /// No path is marked.
    #[must_use]
    pub fn new(paths: usize) -> Self {
        Self { skips: vec![false; paths], next: 0 }
    }
}

impl PathChoice for MarkAvoidance {
    fn choose(&mut self, candidates: &Candidates<'_>) -> Option<usize> {
        // One round clears all bits, so a second one finds a path if there is any.
        for _ in 0..=self.skips.len() {
            let path = candidates.next_from(self.next)?;
            self.next = path + 1;
            if !std::mem::take(self.skips.get_mut(path)?) {
                return Some(path);
            }
        }
        candidates.next_from(self.next)
    }

    fn on_ack(&mut self, path: usize, is_marked: bool) {
        if let Some(skips) = self.skips.get_mut(path).filter(|_| is_marked) {
            *skips = true;
        }
    }

    fn on_loss(&mut self, path: usize) {
        self.on_ack(path, true);
    }
}
