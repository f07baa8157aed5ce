//! How a call waits for other ranks, and how often it looks whether that makes sense.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Looks without a pause, then yields, then naps. Whoever waits looks, asks whether the wait is [due](Self::due) to be judged,
/// and pauses, again and again.
pub(crate) struct Patience {
    since: Instant,
    looks: u32,
    /// When it was last time to look whether the wait makes sense.
    judged: Instant,
    /// How long the wait had lasted at the end of the last pause, if it is to be judged.
    due: Option<Duration>,
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
        Self { since, looks: 0, judged: since, due: None }
    }

    /// How long the wait had lasted before the last look, once it is time to see whether it makes sense. What has come until then
    /// was seen by that look: this process may have been stopped for long.
    pub(crate) fn due(&mut self) -> Option<Duration> {
        self.due.take()
    }

    pub(crate) fn pause(&mut self) {
        if self.looks < SPINS {
            self.looks += 1;
            return std::hint::spin_loop();
        }
        match self.since.elapsed() < YIELDING {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
        let is_due = self.judged.elapsed() >= JUDGING;
        if is_due {
            self.judged = Instant::now();
            self.due = Some(self.judged - self.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_judged_by_its_time_and_not_by_its_looks() {
        let mut patience = Patience::since(Instant::now() - JUDGING);
        let judged = (0..=SPINS).filter_map(|_| {
            patience.pause();
            patience.due()
        });
        assert_eq!(judged.count(), 1, "a yield may have taken all the time");
    }

    #[test]
    fn a_wait_is_judged_only_after_a_look_that_came_behind_all_of_it() {
        let long = Duration::from_secs(1);
        let mut patience = Patience::since(Instant::now() - long);
        assert_eq!(patience.due(), None, "nobody has looked since");
        (0..=SPINS).for_each(|_| patience.pause());
        assert!(patience.due().is_some_and(|waited| waited >= long));
    }
}
