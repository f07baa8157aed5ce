//! Pings peers and lanes that are silent although something waits for them, and gives them up.

use std::sync::{Arc, atomic::Ordering::Acquire};

use uccl_fabric::clock;
use uccl_proto::liveness::LaneVerdict;

use super::core::connection::Connection;

impl Connection {
    /// Gives up lanes that have been silent for too long while something waits for them. If that is
    /// the first lane, gives up the peer; if it is another lane, gives up only the lane, provided
    /// that the peer is heard on the first.
    pub(crate) fn check_liveness(self: &Arc<Self>) {
        let timeout_ms = self.core.config.timeout.as_millis() as u64;
        if timeout_ms == 0 || self.pending.load(Acquire) == 0 || self.is_failed() {
            return;
        }
        // The rail lane finds by itself which of its paths are silent.
        for (n, lane) in self.lanes.living_streams() {
            let (is_idle, now) = (n > 0 && lane.load() == 0, clock::coarse_ms());
            let look = {
                let liveness = &mut self.talk.lock().session.liveness;
                if is_idle {
                    liveness.rest(n);
                    continue;
                }
                liveness.look(n, now, lane.last_heard_ms(), timeout_ms)
            };
            match look {
                LaneVerdict::Fine => {}
                LaneVerdict::Ping => {
                    // A lane that cannot be pinged is dead. The next progress notices that.
                    let _ = lane.ping();
                    self.kick_if_busy();
                }
                LaneVerdict::Silent(ms) if n == 0 => {
                    let reason = format!("no sign of life for {}", seconds(ms));
                    return self.fail(self.lost_to(reason));
                }
                // The first lane is pinged as often as this one, so it answers as well or is given
                // up.
                LaneVerdict::Silent(ms) if self.heard_first_within(timeout_ms / 2) => {
                    self.lose_lane(n, format_args!("silent for {}", seconds(ms)));
                }
                LaneVerdict::Silent(_) => {}
            }
        }
        self.check_debts(timeout_ms);
    }

    fn heard_first_within(&self, ms: u64) -> bool {
        clock::coarse_ms().saturating_sub(self.lanes.messages().last_heard_ms()) < ms
    }

    /// Gives up a peer that does not end its side of a dead lane: it keeps transfers from ending.
    fn check_debts(self: &Arc<Self>, timeout_ms: u64) {
        let Some(since) = self.peer_owes_since_ms() else { return };
        let owed = clock::coarse_ms().saturating_sub(since);
        // The peer was heard recently, so it was not this process that was stopped.
        if owed > timeout_ms && self.heard_first_within(timeout_ms / 2) {
            let reason = format!("it did not give up a lane that died, for {}", seconds(owed));
            self.fail(self.lost_to(reason));
        }
    }
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1e3)
}
