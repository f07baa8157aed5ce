//! The waits of a call for other ranks, and the checks whether such a wait still makes sense.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::shared::protocol::MissingMark;

/// Polls without a pause at first, then yields, then sleeps. A waiting loop polls, asks whether the
/// wait is [due](Self::due) for a check, and pauses.
pub(crate) struct Backoff {
    since: Instant,
    polls: u32,
    /// The time of the last check.
    checked: Instant,
    /// The length of the wait at the end of the last pause, if a check is due.
    due: Option<Duration>,
    /// Whether no word was missing at the last check.
    pub(crate) was_idle: bool,
}

/// Polls before the processor is yielded: a peer may be waiting for it.
const SPINS: u32 = 64;
/// The time for which a wait only yields. Counting yields does not work: on a busy machine each
/// takes milliseconds.
const YIELDING: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);
/// The time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

impl Backoff {
    pub(crate) fn new() -> Self {
        Self::since(Instant::now())
    }

    fn since(since: Instant) -> Self {
        Self { since, polls: 0, checked: since, due: None, was_idle: false }
    }

    /// The length of the wait before the last poll, if a check is due. That poll has seen all words
    /// that came until then, even if this process was stopped for long.
    pub(crate) fn due(&mut self) -> Option<Duration> {
        self.due.take()
    }

    /// The start of the wait.
    pub(crate) fn began(&self) -> Instant {
        self.since
    }

    pub(crate) fn pause(&mut self) {
        if self.polls < SPINS {
            self.polls += 1;
            return std::hint::spin_loop();
        }
        match self.since.elapsed() < YIELDING {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
        let is_due = self.checked.elapsed() >= CHECK_INTERVAL;
        if is_due {
            self.checked = Instant::now();
            self.due = Some(self.checked - self.since);
        }
    }
}

/// The time since which each awaited word is missing. A step of the call meanwhile does not reset
/// it: otherwise ranks that each count from their own last step would wait for a late rank longer
/// than others wait for them.
#[derive(Default)]
pub(crate) struct MissingTimes(Vec<(MissingMark, Instant)>);

impl MissingTimes {
    /// The time for which each word has been missing, in a wait that `began` and has lasted so
    /// long. A word that was not missing at the last call is missing since the wait began.
    pub(crate) fn times(
        &mut self,
        awaited: &[MissingMark],
        began: Instant,
        waited: Duration,
    ) -> Vec<Duration> {
        // The value that is there instead may change, and is no part of the identity.
        let thing = |late: &MissingMark| MissingMark { seen: late.expected, ..*late };
        let before = std::mem::take(&mut self.0);
        let since = |thing: MissingMark| {
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
    use crate::shared::protocol::Mark;

    #[test]
    fn a_mark_is_missing_since_it_was_first_missed_though_others_come() {
        let late = |peer, round, seen| {
            let (expected, seen) =
                ([round, seen]).map(|round| Mark { call: 3, round, is_last: false }).into();
            MissingMark { peer, owner: peer, what: MissingMark::DATA, expected, seen }
        };
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut missing_times = MissingTimes::default();
        assert_eq!(
            missing_times.times(&[late(1, 0, 9), late(2, 0, 9)], began, second),
            [second; 2]
        );
        // The call did a step, and a new wait began; rank 2's next round is another word.
        let again = began + 2 * second;
        let times = missing_times.times(&[late(1, 0, 8), late(2, 1, 9)], again, second);
        assert_eq!(times, [3 * second, second]);
    }

    #[test]
    fn a_wait_is_judged_by_its_time_and_not_by_its_looks() {
        let mut backoff = Backoff::since(Instant::now() - CHECK_INTERVAL);
        let checked = (0..=SPINS).filter_map(|_| {
            backoff.pause();
            backoff.due()
        });
        assert_eq!(checked.count(), 1, "a yield may have taken all the time");
    }

    #[test]
    fn a_wait_is_judged_only_after_a_look_that_came_behind_all_of_it() {
        let long = Duration::from_secs(1);
        let mut backoff = Backoff::since(Instant::now() - long);
        assert_eq!(backoff.due(), None, "nobody has looked since");
        (0..=SPINS).for_each(|_| backoff.pause());
        assert!(backoff.due().is_some_and(|waited| waited >= long));
    }
}
