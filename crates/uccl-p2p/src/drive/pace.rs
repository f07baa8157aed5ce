//! The pauses of a thread that looks at words for streams.

use std::time::{Duration, Instant};

/// How long the thread sleeps between two looks.
const NAP: Duration = Duration::from_micros(50);
/// For this long after something was added, the thread yields instead of sleeping.
const BRISK: Duration = Duration::from_millis(1);

/// The pauses of a thread between two looks: short ones soon after something was added.
#[derive(Clone, Copy, Default)]
pub(super) struct Pace {
    added: Option<Instant>,
}

impl Pace {
    /// Notes that something was added.
    pub(super) fn quicken(&mut self) {
        self.added = Some(Instant::now());
    }

    /// Makes a pause. Call it without the lock that protects this.
    pub(super) fn pause(self) {
        match self.is_brisk() {
            true => std::thread::yield_now(),
            false => nap(),
        }
    }

    fn is_brisk(self) -> bool {
        self.added.is_some_and(|added| added.elapsed() < BRISK)
    }
}

/// Makes a long pause.
pub(super) fn nap() {
    std::thread::sleep(NAP);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_short_only_soon_after_something_was_added() {
        let mut pace = Pace::default();
        assert!(!pace.is_brisk(), "nothing was added");
        pace.added = Instant::now().checked_sub(BRISK);
        assert!(!pace.is_brisk());
        pace.quicken();
        pace.pause();
        assert!(pace.added.is_some_and(|added| added.elapsed() >= BRISK) || pace.is_brisk());
    }
}
