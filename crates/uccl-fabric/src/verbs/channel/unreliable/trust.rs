//! Whether a rail's writes go over queue pairs that are not reliable.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What is known of a rail that was told to use such queue pairs (UC).
pub(in crate::verbs) struct Trust {
    rail: String,
    is_given_up: AtomicBool,
}

impl Trust {
    pub(in crate::verbs) fn new(rail: &str) -> Self {
        Self { rail: rail.to_owned(), is_given_up: AtomicBool::new(false) }
    }

    /// Whether new channels may have them.
    pub(in crate::verbs) fn holds(&self) -> bool {
        !self.is_given_up.load(Relaxed)
    }

    /// They are not used on this rail any more.
    pub(in crate::verbs) fn give_up(&self, why: impl std::fmt::Display) {
        if !self.is_given_up.swap(true, Relaxed) {
            let rail = &self.rail;
            tracing::warn!(
                "{rail} cannot be used with UCCL_RCMODE=0, from now on its writes go over reliable queue pairs (RC): {why}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_stays_so() {
        let trust = Trust::new("rxe0:1");
        assert!(trust.holds());
        trust.give_up("packets overtake each other");
        trust.give_up("once more");
        assert!(!trust.holds());
    }
}
