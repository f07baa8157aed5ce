//! The lanes that a worker looks at in each turn, and its glances at the events of all others.
//!
//! Each look at a lane is a system call. Lanes that take turns keep a worker awake, and it would
//! come to look at all of them in every turn. So of more than a few lanes, the worker arms those
//! again that have been quiet for a while. It sees their next events by glances at its epoll, which
//! become frequent where they find some.

use std::time::{Duration, Instant};

/// The number of lanes that a worker may look at in each turn, however quiet they are.
const FEW: usize = 4;
/// How long a lane of more than a few is looked at while it shows nothing.
const QUIET: Duration = Duration::from_micros(20);
/// How often a spinning worker looks for events of other lanes, where that finds nothing.
const GLANCE: Duration = Duration::from_micros(50);
/// After a glance that has found something, a worker looks in each turn for this long.
const LIVELY: Duration = Duration::from_micros(100);

/// The lanes that are not armed, because they have just had something to do or callers look after
/// them.
pub(super) struct HotLanes<T> {
    lanes: Vec<HotLane<T>>,
}

/// A lane that is not armed.
pub(super) struct HotLane<T> {
    pub(super) lane: T,
    /// When it moved last, was heated, or could not be armed.
    moved: Instant,
}

impl<T> HotLane<T> {
    /// Notes that the lane has moved something.
    pub(super) fn moved(&mut self, now: Instant) {
        self.moved = now;
    }
}

impl<T> Default for HotLanes<T> {
    fn default() -> Self {
        Self { lanes: Vec::new() }
    }
}

impl<T> HotLanes<T> {
    /// Adds a lane, unless it is there.
    pub(super) fn add(&mut self, lane: T, now: Instant, is_it: impl Fn(&T, &T) -> bool) {
        match self.lanes.iter_mut().find(|hot| is_it(&hot.lane, &lane)) {
            Some(hot) => hot.moved(now),
            None => self.lanes.push(HotLane { lane, moved: now }),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.lanes.iter().map(|hot| &hot.lane)
    }

    /// The lanes, the one that was added last first: it has something to do.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut HotLane<T>> {
        self.lanes.iter_mut().rev()
    }

    pub(super) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.lanes.retain(|hot| keep(&hot.lane));
    }

    /// Of more than a few lanes, arms those that have been quiet for a while. `arm` says whether it
    /// has armed a lane; one that it could not arm is asked again after as long a time.
    pub(super) fn cool(&mut self, now: Instant, mut arm: impl FnMut(&T) -> bool) {
        if self.lanes.len() <= FEW {
            return;
        }
        self.lanes.retain_mut(|hot| {
            if now.saturating_duration_since(hot.moved) < QUIET {
                return true;
            }
            hot.moved = now;
            !arm(&hot.lane)
        });
    }
}

/// When a spinning worker looks for events of lanes that it does not look at.
#[derive(Debug, Default)]
pub(super) struct EventPace {
    last: Option<Instant>,
    /// When a glance last found something.
    found: Option<Instant>,
}

impl EventPace {
    /// The worker begins to spin: it has just looked at its events.
    pub(super) fn begin(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// Whether to look now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        since(self.found).is_some_and(|since| since < LIVELY)
            || since(self.last).is_none_or(|since| since >= GLANCE)
    }

    /// Notes that the worker has looked, and whether there was something.
    pub(super) fn note(&mut self, now: Instant, has_found: bool) {
        self.last = Some(now);
        if has_found {
            self.found = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn lanes(count: usize, now: Instant) -> HotLanes<usize> {
        let mut lanes = HotLanes::default();
        (0..count).for_each(|lane| lanes.add(lane, now, usize::eq));
        lanes
    }

    /// Of lanes that take turns, only the latest are looked at.
    #[test]
    fn a_worker_looks_at_few_of_many_lanes_that_take_turns() {
        let start = Instant::now();
        let mut hot = lanes(0, start);
        let mut most = 0;
        for turn in 0..1000_u32 {
            let now = start + 10 * US * turn;
            hot.add(turn as usize, now, usize::eq);
            hot.cool(now, |_| true);
            most = most.max(hot.iter().count());
        }
        assert!((2..=FEW).contains(&most), "{most} at a time");
    }

    #[test]
    fn few_lanes_and_lanes_that_move_stay() {
        let start = Instant::now();
        let late = start + QUIET * 100;
        let mut few = lanes(FEW, start);
        few.cool(late, |_| true);
        assert_eq!(few.iter().count(), FEW);
        let mut many = lanes(FEW + 3, start);
        many.iter_mut().filter(|hot| hot.lane % 2 == 0).for_each(|hot| hot.moved(late));
        many.cool(late, |_| true);
        assert!(many.iter().all(|lane| lane % 2 == 0) && many.iter().count() == FEW);
    }

    #[test]
    fn a_lane_that_cannot_be_armed_stays_and_is_asked_again_later() {
        let (start, mut asked) = (Instant::now(), 0);
        let mut hot = lanes(FEW + 1, start);
        for now in [QUIET, QUIET + US, QUIET * 2].map(|later| start + later) {
            hot.cool(now, |lane| {
                asked += usize::from(*lane == 0);
                false
            });
        }
        assert_eq!((asked, hot.iter().count()), (2, FEW + 1));
    }

    #[test]
    fn a_lane_is_there_once() {
        let start = Instant::now();
        let mut hot = lanes(2, start);
        hot.add(1, start, usize::eq);
        assert_eq!(hot.iter().copied().collect::<Vec<_>>(), [0, 1]);
        hot.retain(|lane| *lane > 0);
        assert_eq!(hot.iter().copied().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn glances_are_frequent_where_they_find_something() {
        let (start, mut glances) = (Instant::now(), EventPace::default());
        glances.begin(start);
        assert!(!glances.is_due(start + GLANCE - US) && glances.is_due(start + GLANCE));
        glances.note(start + GLANCE, false);
        assert!(!glances.is_due(start + GLANCE + US), "it has found nothing");
        let found = start + GLANCE * 2;
        glances.note(found, true);
        for after in [US, LIVELY - US] {
            assert!(glances.is_due(found + after));
            glances.note(found + after, false);
        }
        assert!(!glances.is_due(found + LIVELY), "the last one was a microsecond ago");
    }
}
