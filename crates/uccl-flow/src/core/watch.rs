//! When a flow's own stream is asked about, replaced and given up.

/// Constants of a [`Watch`]; times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchParams {
    /// The receiver is asked after this time without a confirmation.
    pub(crate) ask_us: u64,
    /// The stream is replaced after this time, from a question on, in which the receiver does not
    /// answer, or waits for bytes that do not come.
    pub(crate) dead_us: u64,
    /// The flow fails after this time without a sign of life.
    pub(crate) limit_us: u64,
}

/// The state of a flow's own stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchView {
    /// The receiver is known to have so many bytes.
    pub(crate) confirmed: u64,
    /// Bytes are to come that it is not known to have.
    pub(crate) has_work: bool,
    /// There is a stream.
    pub(crate) is_up: bool,
}

/// Something to do for the user of the watch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Rest,
    /// Ask the receiver how far it is, by another way.
    Ask,
    /// Close the stream and open another one.
    Replace,
    /// The peer has been out of reach for the limit.
    Fail,
}

/// Watches the own stream of a sending flow.
pub(crate) struct Watch {
    params: WatchParams,
    confirmed: u64,
    /// When a confirmation last came, or there was no work.
    moved_us: u64,
    asked_us: u64,
    /// The question from which on the stream stands still, as far as is known.
    still_us: Option<u64>,
    /// When the peer last showed a sign of life, or there was no work.
    heard_us: u64,
}

impl Watch {
    pub(crate) fn new(params: WatchParams, now_us: u64) -> Self {
        Self {
            params,
            confirmed: 0,
            moved_us: now_us,
            asked_us: 0,
            still_us: None,
            heard_us: now_us,
        }
    }

    /// Time has passed.
    pub(crate) fn on_time(&mut self, view: WatchView, now_us: u64) -> Step {
        if view.confirmed > self.confirmed || !view.has_work {
            self.confirmed = view.confirmed;
            self.on_progress(now_us);
        }
        if !view.has_work {
            return Step::Rest;
        }
        if now_us >= self.heard_us + self.params.limit_us {
            self.heard_us = now_us;
            return Step::Fail;
        }
        if !view.is_up {
            self.still_us = None;
            return Step::Rest;
        }
        if self.still_us.is_some_and(|since| now_us >= since + self.params.dead_us) {
            self.still_us = None;
            return Step::Replace;
        }
        if now_us >= self.moved_us.max(self.asked_us) + self.params.ask_us {
            self.asked_us = now_us;
            self.still_us.get_or_insert(now_us);
            return Step::Ask;
        }
        Step::Rest
    }

    /// The receiver has answered. With `is_waiting` it waits for bytes of this stream.
    pub(crate) fn on_answer(&mut self, is_waiting: bool, now_us: u64) {
        self.heard_us = now_us;
        if !is_waiting {
            self.still_us = None;
        }
    }

    /// Another stream has taken the place of the last one.
    pub(crate) fn on_resumed(&mut self, now_us: u64) {
        self.on_progress(now_us);
    }

    fn on_progress(&mut self, now_us: u64) {
        (self.moved_us, self.heard_us) = (now_us, now_us);
        self.still_us = None;
    }

    /// The time since the last sign of life.
    pub(crate) fn silent_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.heard_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: WatchParams = WatchParams { ask_us: 200, dead_us: 1000, limit_us: 5000 };
    const BUSY: WatchView = WatchView { confirmed: 0, has_work: true, is_up: true };

    /// The steps until a time, every 100 us.
    fn steps(watch: &mut Watch, view: WatchView, times: std::ops::Range<u64>) -> Vec<(u64, Step)> {
        let taken = times.step_by(100).map(|now_us| (now_us, watch.on_time(view, now_us)));
        taken.filter(|(_, step)| *step != Step::Rest).collect()
    }

    #[test]
    fn a_stream_is_replaced_when_its_receiver_waits() {
        let mut watch = Watch::new(PARAMS, 0);
        assert_eq!(steps(&mut watch, BUSY, 0..300), [(200, Step::Ask)]);
        watch.on_answer(true, 250);
        let taken = steps(&mut watch, BUSY, 300..1300);
        assert_eq!(taken.last(), Some(&(1200, Step::Replace)));
        assert_eq!(taken.len(), 5, "it is asked every 200 us: {taken:?}");
    }

    #[test]
    fn a_receiver_that_does_not_want_bytes_keeps_its_stream() {
        let mut watch = Watch::new(PARAMS, 0);
        for now_us in (0..20_000).step_by(100) {
            let step = watch.on_time(BUSY, now_us);
            assert!(matches!(step, Step::Rest | Step::Ask), "{step:?} at {now_us} us");
            if step == Step::Ask {
                watch.on_answer(false, now_us + 50);
            }
        }
    }

    #[test]
    fn a_flow_without_work_asks_nothing() {
        let mut watch = Watch::new(PARAMS, 0);
        let idle = WatchView { has_work: false, ..BUSY };
        assert_eq!(steps(&mut watch, idle, 0..20_000), []);
        assert_eq!(steps(&mut watch, BUSY, 20_000..20_300), [(20_100, Step::Ask)]);
    }

    #[test]
    fn a_peer_that_stays_away_fails_at_the_limit() {
        let mut watch = Watch::new(PARAMS, 0);
        let down = WatchView { is_up: false, ..BUSY };
        assert_eq!(steps(&mut watch, down, 0..5100), [(5000, Step::Fail)]);
        let mut watch = Watch::new(PARAMS, 0);
        assert_eq!(steps(&mut watch, down, 0..4900), []);
        watch.on_resumed(4900);
        let taken = steps(&mut watch, BUSY, 5000..6000);
        assert!(taken.iter().all(|(_, step)| *step == Step::Ask), "{taken:?}");
    }
}
