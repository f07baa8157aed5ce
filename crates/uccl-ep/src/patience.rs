//! How a call waits for other ranks, and how often it looks whether that makes sense.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Looks without a pause, then yields, then naps.
pub(crate) struct Patience {
    pub(crate) since: Instant,
    looks: u32,
    /// When it was last time to look whether the wait makes sense.
    judged: Instant,
}

/// Looks before the processor is offered to others: a peer may be waiting for it.
const SPINS: u32 = 64;
/// How long a wait only yields. Yields cannot be counted instead: on a busy machine each takes milliseconds.
const YIELDING: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);
/// How often a wait looks whether it makes sense.
const JUDGING: Duration = Duration::from_millis(2);

impl Patience {
    pub(crate) fn new() -> Self {
        Self::since(Instant::now())
    }

    fn since(since: Instant) -> Self {
        Self { since, looks: 0, judged: since }
    }

    /// Whether it is time to look whether the wait makes sense.
    pub(crate) fn pause(&mut self) -> bool {
        if self.looks < SPINS {
            self.looks += 1;
            std::hint::spin_loop();
            return false;
        }
        match self.since.elapsed() < YIELDING {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
        let is_due = self.judged.elapsed() >= JUDGING;
        if is_due {
            self.judged = Instant::now();
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_judged_by_its_time_and_not_by_its_looks() {
        let mut patience = Patience::since(Instant::now() - JUDGING);
        let judged = (0..=SPINS).map(|_| patience.pause());
        assert_eq!(
            judged.filter(|is_due| *is_due).count(),
            1,
            "a yield may have taken all the time"
        );
    }
}
