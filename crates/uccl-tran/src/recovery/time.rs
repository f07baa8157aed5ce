//! Loss by time: RACK (RFC 8985).

use super::{AttemptView, Fate, LossDetection, PathProgress, Undo};

/// An attempt is lost when one that was sent later over the same path has come, and a round trip
/// and some time for reordering have passed (section 6.2). That time is a quarter of the least
/// round trip, and more after each mistake.
#[derive(Clone, Copy, Default, Debug)]
pub struct TimeDetection {
    undo: Undo,
}

impl LossDetection for TimeDetection {
    fn judge(&self, attempt: &AttemptView, path: &PathProgress, now_ns: u64) -> Fate {
        if attempt.sent_ns > path.newest_sent_ns {
            return Fate::Waits;
        }
        let window_ns = self.undo.reorder_window_ns(path.least_rtt_ns, path.smoothed_rtt_ns);
        let at_ns = attempt.sent_ns + path.rtt_ns + window_ns;
        if now_ns >= at_ns { Fate::Lost } else { Fate::LostAt(at_ns) }
    }

    fn on_undo(&mut self, _now_ns: u64) {
        self.undo.on_mistake();
    }

    fn on_round(&mut self) {
        self.undo.on_round();
    }
}
