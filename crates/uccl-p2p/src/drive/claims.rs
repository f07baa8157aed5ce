//! Claims: either the callers that wait on a connection make progress on it, or its workers do.
//!
//! A caller that waits *claims* its connection, and workers leave its lanes alone: a caller that
//! spins is not disturbed by threads that wake for nothing. A claim counts only while its caller
//! looks at the lanes or sleeps on them. So a caller that is held up elsewhere does not keep others
//! from being served.
//!
//! Nobody knows whether a caller that leaves comes back at once, and waking a worker at the end of
//! each short call would cost more than the call. So a worker watches the lanes, and learns from
//! the events that wake it. If it did work that no caller would have done, it goes on watching,
//! whether there are claims or not. If it was woken a few times for nothing, or for work that a
//! caller was about to do, it stays away and looks again only after some time. That is about as
//! long as callers have been coming and going, and at most a millisecond. Only if one caller has
//! been there all the while does it stay away for longer: then the end of the claim wakes the
//! worker.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*},
    time::{Duration, Instant},
};

/// A claim does not count if its caller has not looked at the lanes for this long.
const LAPSE: Duration = Duration::from_millis(1);
/// How long a worker stays away at first, and at most. The time doubles whenever callers are still
/// there. Each look costs callers some microseconds where no processor is free.
pub(super) const AWAY: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// How long it stays away while one caller is there all the time: the end of the claim wakes it,
/// and a claim may lapse.
const AWAY_LONG: Duration = Duration::from_millis(2);
/// The same for lanes that carry no messages: they show only events that callers wait for.
const AWAY_QUIET: Duration = Duration::from_millis(5);
/// Callers that were there this recently may be about to come again.
const LATELY: Duration = Duration::from_millis(10);
/// How many times a worker may be woken for nothing: at most, and how many times more after each
/// time that it was of use. More than once, because where two sides answer each other in turns,
/// each call of this side wakes it for nothing as well.
const CREDIT: u8 = 8;
const CREDIT_FOR_USE: u8 = 2;

/// The callers that make progress on a connection.
#[derive(Default)]
pub(crate) struct Claims {
    callers: AtomicU32,
    /// Claims that have ended.
    ended: AtomicU64,
    /// Number of looks at the lanes during claims. Some looks are not counted.
    beats: AtomicU64,
    /// Whether workers wait for the last caller to leave.
    is_awaited: AtomicBool,
    /// Whether a caller has gone to sleep elsewhere, and none has come since.
    is_deserted: AtomicBool,
}

impl Claims {
    pub(super) fn begin(&self) {
        self.callers.fetch_add(1, SeqCst);
        if self.is_deserted.load(Relaxed) {
            self.is_deserted.store(false, Relaxed);
        }
    }

    /// Notes that a caller will not come back before a worker has done something.
    pub(super) fn desert(&self) {
        self.is_deserted.store(true, SeqCst);
    }

    /// Whether callers come and go: one may be between two calls.
    pub(super) fn may_come(&self) -> bool {
        !self.is_deserted.load(SeqCst)
    }

    /// Notes that the caller of a claim has looked at the lanes.
    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Relaxed);
    }

    /// Ends a claim. Returns which threads wait for that.
    pub(super) fn end(&self) -> ClaimWaiters {
        self.ended.fetch_add(1, Relaxed);
        if self.callers.fetch_sub(1, SeqCst) > 1 {
            return ClaimWaiters::Others;
        }
        let is_awaited = self.is_awaited.load(SeqCst) && self.is_awaited.swap(false, SeqCst);
        if is_awaited { ClaimWaiters::Workers } else { ClaimWaiters::Nobody }
    }

    /// Whether there is any claim.
    pub(super) fn any(&self) -> bool {
        self.callers.load(SeqCst) > 0
    }

    /// Makes the end of the last claim wake the workers. Returns false if there is no claim.
    fn await_end(&self) -> bool {
        self.is_awaited.store(true, SeqCst);
        self.any()
    }
}

/// The threads that wait for the end of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ClaimWaiters {
    /// Other callers.
    Others,
    /// Workers.
    Workers,
    /// Nobody, as far as is known.
    Nobody,
}

/// A worker's knowledge of the callers of a lane.
#[derive(Debug)]
pub(crate) struct Care {
    beats: u64,
    /// When `beats` was last seen to have grown.
    beaten: Option<Instant>,
    /// Claims that had ended at the last look (`seen`), and when the worker stayed away last
    /// (`ended`).
    seen: u64,
    ended: u64,
    /// When callers were last seen there.
    called: Option<Instant>,
    /// The lane has woken the worker, which has found nothing to do yet.
    woken: bool,
    credit: u8,
    away: Duration,
}

impl Default for Care {
    fn default() -> Self {
        Self {
            beats: 0,
            beaten: None,
            seen: 0,
            ended: 0,
            called: None,
            woken: false,
            credit: CREDIT,
            away: AWAY.0,
        }
    }
}

impl Care {
    /// Notes that the lane has woken the worker.
    pub(crate) fn woken(&mut self) {
        self.woken = true;
    }

    /// Notes that the worker has done something, which it began at `begun`. If callers were there
    /// then, they would have done it: the worker has only taken a processor and the lane from them.
    /// The same holds for a caller that was between two calls: where there are enough processors, a
    /// worker that spins is faster than a caller that begins its next call.
    pub(crate) fn has_done(&mut self, were_callers_there: bool, claims: &Claims, begun: Instant) {
        self.woken = false;
        let is_between = self.called.is_some_and(|called| begun - called < AWAY.0);
        self.credit = match were_callers_there || is_between && claims.may_come() {
            true => self.credit.saturating_sub(1),
            false => CREDIT.min(self.credit + CREDIT_FOR_USE),
        };
    }

    /// Whether the worker leaves the lane to callers. `asleep`: some of them sleep on it.
    pub(crate) fn leaves(&mut self, claims: &Claims, asleep: bool, now: Instant) -> bool {
        let ended = claims.ended.load(Relaxed);
        if std::mem::replace(&mut self.seen, ended) != ended || claims.any() {
            self.called = Some(now);
        }
        self.credit == 0 && self.is_looked_after(claims, asleep, now)
    }

    fn is_looked_after(&mut self, claims: &Claims, asleep: bool, now: Instant) -> bool {
        let beats = claims.beats.load(Relaxed).wrapping_add(claims.ended.load(Relaxed));
        if asleep || beats != self.beats {
            (self.beats, self.beaten) = (beats, Some(now));
        }
        claims.any() && self.beaten.is_some_and(|beaten| now - beaten < LAPSE)
    }

    /// Whether callers were there recently.
    pub(crate) fn has_callers(&self, now: Instant) -> bool {
        self.called.is_some_and(|called| now - called < LATELY)
    }

    /// Called before the worker sleeps: how long it stays away, if it leaves the lane to callers.
    pub(crate) fn stays_away(
        &mut self,
        claims: &Claims,
        asleep: bool,
        hears: bool,
        now: Instant,
    ) -> Option<Duration> {
        if std::mem::take(&mut self.woken) {
            self.credit = self.credit.saturating_sub(1);
        }
        let is_left = self.leaves(claims, asleep, now);
        let ended = claims.ended.load(Relaxed);
        let same = std::mem::replace(&mut self.ended, ended) == ended;
        let is_cared_for = is_left || !same && claims.may_come();
        if self.credit > 0 || !is_cared_for {
            self.away = AWAY.0;
            return None;
        }
        if same && self.away == AWAY.1 {
            let long = if hears { AWAY_LONG } else { AWAY_QUIET };
            return claims.await_end().then_some(long);
        }
        let away = self.away;
        self.away = AWAY.1.min(away * 2);
        Some(away)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// The care of a worker that was woken for nothing so often that it stays away.
    fn weary(claims: &Claims, now: Instant) -> Care {
        let mut care = Care::default();
        for _ in 0..CREDIT {
            claims.beat();
            assert!(!care.leaves(claims, false, now));
            care.woken();
            care.stays_away(claims, false, true, now);
        }
        claims.beat();
        assert!(care.leaves(claims, false, now));
        care
    }

    #[test]
    fn a_claim_counts_while_its_caller_looks() {
        let (claims, start) = (Claims::default(), Instant::now());
        claims.begin();
        let mut care = weary(&claims, start);
        for i in 1..100 {
            claims.beat();
            assert!(care.leaves(&claims, false, start + LAPSE * i));
        }
        let last = start + LAPSE * 99;
        assert!(care.leaves(&claims, false, last + LAPSE / 2));
        assert!(!care.leaves(&claims, false, last + LAPSE), "it has looked at nothing for long");
        assert_eq!(care.stays_away(&claims, false, true, last + LAPSE), None);
        assert!(care.leaves(&claims, true, last + LAPSE * 2), "it sleeps on the lanes");
    }

    /// Checks how long it stays away from a caller that makes one call after another during this
    /// time.
    fn stays_away_from_calls(
        care: &mut Care,
        claims: &Claims,
        start: Instant,
        calls_for: Duration,
    ) -> Instant {
        let mut now = start;
        while now - start < calls_for {
            claims.begin();
            assert_eq!(claims.end(), ClaimWaiters::Nobody);
            let away = care.stays_away(claims, false, true, now).expect("callers were there");
            assert!(away <= AWAY.1.min(AWAY.0.max(now - start) * 2), "{away:?}");
            now += away;
        }
        now
    }

    #[test]
    fn a_worker_stays_away_from_callers_that_come_and_go_for_as_long_as_they_do() {
        let (claims, start) = (Claims::default(), Instant::now());
        claims.begin();
        let mut care = weary(&claims, start);
        claims.end();
        for calls_for in [10 * US, 100 * US, 1000 * US, 10_000 * US] {
            let now = stays_away_from_calls(&mut care, &claims, start, calls_for);
            assert_eq!(care.stays_away(&claims, false, true, now), None, "they have left");
        }
    }

    #[test]
    fn a_worker_watches_at_once_for_a_caller_that_sleeps_elsewhere() {
        let (claims, start) = (Claims::default(), Instant::now());
        claims.begin();
        let mut care = weary(&claims, start);
        claims.end();
        claims.desert();
        assert_eq!(care.stays_away(&claims, false, true, start), None);
        claims.begin();
        claims.end();
        assert!(care.stays_away(&claims, false, true, start).is_some(), "callers come again");
    }

    #[test]
    fn the_end_of_a_long_claim_wakes_the_workers() {
        let (claims, start) = (Claims::default(), Instant::now());
        claims.begin();
        let mut care = weary(&claims, start);
        let long = (0..10).find(|_| {
            claims.beat();
            care.stays_away(&claims, false, true, start) == Some(AWAY_LONG)
        });
        assert!(long.is_some());
        claims.begin();
        assert_eq!(claims.end(), ClaimWaiters::Others);
        assert_eq!(claims.end(), ClaimWaiters::Workers);
        claims.begin();
        assert_eq!(claims.end(), ClaimWaiters::Nobody, "they have been told");
    }

    #[test]
    fn a_worker_that_is_of_use_watches_on() {
        let (claims, start) = (Claims::default(), Instant::now());
        claims.begin();
        let mut care = weary(&claims, start);
        claims.end();
        care.leaves(&claims, false, start);
        care.has_done(false, &claims, start + AWAY.0);
        // The last caller has left long ago, and the work that callers waited for is the worker's
        // own now: it goes on watching.
        let mut now = start;
        for _ in 0..100 {
            claims.begin();
            care.woken();
            assert_eq!(care.stays_away(&claims, false, true, now), None);
            claims.end();
            now += AWAY.0;
            care.woken();
            care.has_done(false, &claims, now);
            care.leaves(&claims, false, now);
            assert_eq!(care.stays_away(&claims, false, true, now), None);
            now += AWAY.0;
        }
    }

    #[test]
    fn a_worker_that_does_the_work_of_the_next_call_stays_away() {
        let (claims, start) = (Claims::default(), Instant::now());
        let mut care = Care::default();
        for calls in 0..u32::from(CREDIT) {
            claims.begin();
            claims.end();
            let now = start + 5 * US * calls;
            assert!(!care.leaves(&claims, false, now));
            care.has_done(false, &claims, now + 2 * US);
        }
        assert!(care.stays_away(&claims, false, true, start + 100 * US).is_some());
    }

    #[test]
    fn a_worker_is_of_use_to_callers_that_sleep_elsewhere() {
        let (claims, start) = (Claims::default(), Instant::now());
        let mut care = Care::default();
        for calls in 0..2 * u32::from(CREDIT) {
            claims.begin();
            claims.end();
            claims.desert();
            let now = start + 5 * US * calls;
            assert!(!care.leaves(&claims, false, now));
            care.has_done(false, &claims, now + 2 * US);
        }
        assert_eq!(care.stays_away(&claims, false, true, start + 100 * US), None);
    }

    #[test]
    fn a_worker_that_takes_the_work_of_waiting_callers_stays_away() {
        let (claims, start) = (Claims::default(), Instant::now());
        let mut care = Care::default();
        for _ in 0..CREDIT {
            claims.begin();
            claims.beat();
            assert!(!care.leaves(&claims, false, start));
            care.has_done(true, &claims, start);
            claims.end();
        }
        assert!(care.stays_away(&claims, false, true, start).is_some());
    }
}
