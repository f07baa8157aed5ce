//! Peers and lanes that fall silent although something waits for them.

use std::sync::{Arc, atomic::Ordering::Acquire};

use uccl_fabric::clock;

use super::connection::Connection;

/// We may have been stopped ourselves: some looks must have gone by since a peer was asked, not only time.
const LOOKS: u32 = 5;
/// Looks count that are so far apart, as a part of the timeout: whoever waits looks, and many may wait.
const LOOKS_A_TIMEOUT: u64 = 20;

/// What is known of a lane's being alive.
#[derive(Default)]
pub(crate) struct Watch {
    /// Since when something waits for it.
    waiting_since_ms: Option<u64>,
    ping_ms: Option<u64>,
    looks_since_ping: u32,
    /// When the last look was that counted.
    looked_ms: u64,
}

/// What a look at a lane says.
#[derive(PartialEq, Eq, Debug)]
enum Look {
    Fine,
    /// It is to be asked for a sign of life.
    Ping,
    /// It has not answered for so many milliseconds.
    Silent(u64),
}

impl Watch {
    /// A look at a lane that was last heard at `heard`; both times are in milliseconds.
    fn look(&mut self, now: u64, heard: u64, timeout_ms: u64) -> Look {
        let since = *self.waiting_since_ms.get_or_insert(now);
        let silent = now.saturating_sub(heard.max(since));
        if now.saturating_sub(self.looked_ms) >= timeout_ms / LOOKS_A_TIMEOUT {
            (self.looked_ms, self.looks_since_ping) = (now, self.looks_since_ping + 1);
        }
        match self.ping_ms {
            Some(sent) if heard >= sent => self.ping_ms = None,
            Some(_) if silent > timeout_ms && self.looks_since_ping > LOOKS => {
                return Look::Silent(silent);
            }
            Some(_) => {}
            None if silent > timeout_ms / 4 => {
                (self.ping_ms, self.looks_since_ping, self.looked_ms) = (Some(now), 0, now);
                return Look::Ping;
            }
            None => {}
        }
        Look::Fine
    }
}

impl Connection {
    /// Gives up what has been silent for too long although something waits for it: with the first lane
    /// the peer, and another lane if the peer is heard on the first.
    pub(crate) fn check_liveness(self: &Arc<Self>) {
        let timeout_ms = self.core.config.timeout.as_millis() as u64;
        if timeout_ms == 0 || self.pending.load(Acquire) == 0 || self.is_failed() {
            return;
        }
        for (n, lane) in self.living() {
            let look = {
                let mut watches = self.liveness.lock();
                let watch = &mut watches[n];
                if n > 0 && lane.load() == 0 {
                    *watch = Watch::default();
                    continue;
                }
                watch.look(clock::coarse_ms(), lane.last_heard_ms(), timeout_ms)
            };
            match look {
                Look::Fine => {}
                Look::Ping => {
                    // A lane that cannot be pinged is dead, which the next progress notices.
                    let _ = lane.ping();
                    self.kick_if_busy();
                }
                Look::Silent(ms) if n == 0 => {
                    let reason = format!("no sign of life for {}", seconds(ms));
                    return self.fail(self.lost_to(reason));
                }
                // Pinged as often as this lane, the first one has answered or will be given up.
                Look::Silent(ms) if self.heard_first_within(timeout_ms / 2) => {
                    self.lose_lane(n, format_args!("silent for {}", seconds(ms)));
                }
                Look::Silent(_) => {}
            }
        }
        self.check_debts(timeout_ms);
    }

    fn heard_first_within(&self, ms: u64) -> bool {
        clock::coarse_ms().saturating_sub(self.lanes[0].last_heard_ms()) < ms
    }

    /// A peer that does not give up its end of a lane that died keeps transfers from ending.
    fn check_debts(self: &Arc<Self>, timeout_ms: u64) {
        let Some(since) = self.fates.peer_owes_since_ms() else { return };
        let owed = clock::coarse_ms().saturating_sub(since);
        // It has been heard lately, so it is not we who were stopped.
        if owed > timeout_ms && self.heard_first_within(timeout_ms / 2) {
            let reason = format!("it did not give up a lane that died, for {}", seconds(owed));
            self.fail(self.lost_to(reason));
        }
    }
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT_MS: u64 = 1000;

    /// Looks every 10 ms by so many threads, from when the peer was heard last; says when it is given up.
    fn given_up_at(watch: &mut Watch, from: u64, threads: u32) -> u64 {
        for now in (from..).step_by(10) {
            for _ in 0..threads {
                if let Look::Silent(_) = watch.look(now, 0, TIMEOUT_MS) {
                    return now;
                }
            }
            assert!(now < from + 10 * TIMEOUT_MS, "it is never given up");
        }
        unreachable!("time has no end")
    }

    #[test]
    fn a_silent_peer_is_given_up_when_its_time_is_over() {
        for threads in [1, 100] {
            let at = given_up_at(&mut Watch::default(), 0, threads);
            assert!((TIMEOUT_MS..TIMEOUT_MS + 50).contains(&at), "{threads} threads: {at} ms");
        }
    }

    #[test]
    fn a_peer_has_time_to_answer_after_we_were_stopped_however_many_look() {
        for threads in [1, 100] {
            let mut watch = Watch::default();
            assert_eq!(watch.look(0, 0, TIMEOUT_MS), Look::Fine);
            // We did not run for long: the peer could not be asked.
            let resumed = 20 * TIMEOUT_MS;
            let at = given_up_at(&mut watch, resumed, threads);
            assert!(at - resumed >= TIMEOUT_MS / 5, "{threads} threads: after {} ms", at - resumed);
        }
    }

    #[test]
    fn a_peer_that_answers_lives() {
        let mut watch = Watch::default();
        assert_eq!(watch.look(0, 0, TIMEOUT_MS), Look::Fine);
        assert_eq!(watch.look(300, 0, TIMEOUT_MS), Look::Ping);
        for now in (300..5000).step_by(10) {
            let heard = now - now % 200;
            assert!(!matches!(watch.look(now, heard, TIMEOUT_MS), Look::Silent(_)), "at {now} ms");
        }
    }
}
