//! How a call waits for other ranks, and how often it looks whether that makes sense.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::protocol::Awaited;

/// Looks without a pause, then yields, then naps. Whoever waits looks, asks whether the wait is [due](Self::due) to be judged,
/// and pauses, again and again.
pub(crate) struct Patience {
    since: Instant,
    looks: u32,
    /// When it was last time to look whether the wait makes sense.
    judged: Instant,
    /// How long the wait had lasted at the end of the last pause, if it is to be judged.
    due: Option<Duration>,
    /// Whether nothing was missing when the wait was judged last.
    pub(crate) was_idle: bool,
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
        Self { since, looks: 0, judged: since, due: None, was_idle: false }
    }

    /// How long the wait had lasted before the last look, once it is time to see whether it makes sense. What has come until then
    /// was seen by that look: this process may have been stopped for long.
    pub(crate) fn due(&mut self) -> Option<Duration> {
        self.due.take()
    }

    /// When the wait began.
    pub(crate) fn began(&self) -> Instant {
        self.since
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

/// Since when each thing is missing that a call waits for. A step that the call does meanwhile makes nobody less late: ranks that each
/// counted from their own last step would wait for a late one longer than others wait for them.
#[derive(Default)]
pub(crate) struct Clocks(Vec<(Awaited, Instant)>);

impl Clocks {
    /// How long each has been missing in a wait that `began` and has lasted so long. What was not missing when this was asked last is
    /// so since the wait began.
    pub(crate) fn times(
        &mut self,
        awaited: &[Awaited],
        began: Instant,
        waited: Duration,
    ) -> Vec<Duration> {
        // What is there instead may change, and is not what is awaited.
        let thing = |late: &Awaited| Awaited { seen: late.expected, ..*late };
        let before = std::mem::take(&mut self.0);
        let since = |thing: Awaited| {
            let known = before.iter().find(|(known, _)| *known == thing);
            (thing, known.map_or(began, |(_, since)| *since))
        };
        self.0 = awaited.iter().map(|late| since(thing(late))).collect();
        let now = began + waited;
        self.0.iter().map(|(_, since)| now.saturating_duration_since(*since)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Mark;

    #[test]
    fn a_thing_is_missing_since_it_was_first_missed_whatever_else_comes() {
        let late = |peer, round, seen| {
            let (expected, seen) =
                ([round, seen]).map(|round| Mark { call: 3, round, is_last: false }).into();
            Awaited { peer, about: peer, what: Awaited::DATA, expected, seen }
        };
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut clocks = Clocks::default();
        assert_eq!(clocks.times(&[late(1, 0, 9), late(2, 0, 9)], began, second), [second; 2]);
        // A step was done, and the wait began anew; rank 2's next round is another thing.
        let again = began + 2 * second;
        let times = clocks.times(&[late(1, 0, 8), late(2, 1, 9)], again, second);
        assert_eq!(times, [3 * second, second]);
    }

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
