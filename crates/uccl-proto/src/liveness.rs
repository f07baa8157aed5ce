//! Decides when to ask a silent lane for a sign of life, and when to give it up. Silence counts
//! only while something waits for the lane.

use smallvec::SmallVec;

/// How many looks must have gone by since the ping before a lane is given up. Time alone does not
/// suffice: this process may have been stopped.
const LOOKS: u32 = 5;
/// Only looks count that are at least this part of the timeout apart: every thread that waits
/// looks, and there may be many.
const LOOKS_A_TIMEOUT: u64 = 20;

/// The signs of life of each lane of a connection.
pub struct Liveness {
    watches: SmallVec<[LaneSilence; 1]>,
}

impl Liveness {
    pub(crate) fn new(lanes: usize) -> Self {
        Self { watches: (0..lanes).map(|_| LaneSilence::default()).collect() }
    }

    pub(crate) fn lanes(&self) -> usize {
        self.watches.len()
    }

    /// Notes that nothing waits for a lane.
    pub fn rest(&mut self, lane: usize) {
        self.watches[lane] = LaneSilence::default();
    }

    /// Looks at a lane that something waits for. It was last heard at `heard`. All times are in
    /// milliseconds.
    pub fn look(&mut self, lane: usize, now: u64, heard: u64, timeout_ms: u64) -> LaneVerdict {
        self.watches[lane].look(now, heard, timeout_ms)
    }
}

/// The signs of life of one lane.
#[derive(Default)]
struct LaneSilence {
    /// Since when something waits for it.
    waiting_since_ms: Option<u64>,
    ping_ms: Option<u64>,
    looks_since_ping: u32,
    /// The time of the last look that counted.
    looked_ms: u64,
}

/// The result of a look at a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneVerdict {
    /// There is nothing to do.
    Fine,
    /// Ask it for a sign of life.
    Ping,
    /// It has been silent for this many milliseconds.
    Silent(u64),
}

impl LaneSilence {
    /// Looks at a lane that was last heard at `heard`; all times are in milliseconds.
    fn look(&mut self, now: u64, heard: u64, timeout_ms: u64) -> LaneVerdict {
        let since = *self.waiting_since_ms.get_or_insert(now);
        let silent = now.saturating_sub(heard.max(since));
        if now.saturating_sub(self.looked_ms) >= timeout_ms / LOOKS_A_TIMEOUT {
            (self.looked_ms, self.looks_since_ping) = (now, self.looks_since_ping + 1);
        }
        match self.ping_ms {
            Some(sent) if heard >= sent => self.ping_ms = None,
            Some(_) if silent > timeout_ms && self.looks_since_ping > LOOKS => {
                return LaneVerdict::Silent(silent);
            }
            Some(_) => {}
            None if silent > timeout_ms / 4 => {
                (self.ping_ms, self.looks_since_ping, self.looked_ms) = (Some(now), 0, now);
                return LaneVerdict::Ping;
            }
            None => {}
        }
        LaneVerdict::Fine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT_MS: u64 = 1000;

    /// Lets `threads` threads look every 10 ms, from when the peer was last heard. Returns when the
    /// peer is given up.
    fn given_up_at(watch: &mut LaneSilence, from: u64, threads: u32) -> u64 {
        for now in (from..).step_by(10) {
            for _ in 0..threads {
                if let LaneVerdict::Silent(_) = watch.look(now, 0, TIMEOUT_MS) {
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
            let at = given_up_at(&mut LaneSilence::default(), 0, threads);
            assert!((TIMEOUT_MS..TIMEOUT_MS + 50).contains(&at), "{threads} threads: {at} ms");
        }
    }

    #[test]
    fn a_peer_has_time_to_answer_after_we_were_stopped_however_many_look() {
        for threads in [1, 100] {
            let mut watch = LaneSilence::default();
            assert_eq!(watch.look(0, 0, TIMEOUT_MS), LaneVerdict::Fine);
            // This process did not run for long, so the peer could not be asked.
            let resumed = 20 * TIMEOUT_MS;
            let at = given_up_at(&mut watch, resumed, threads);
            assert!(at - resumed >= TIMEOUT_MS / 5, "{threads} threads: after {} ms", at - resumed);
        }
    }

    #[test]
    fn a_peer_that_answers_lives() {
        let mut watch = LaneSilence::default();
        assert_eq!(watch.look(0, 0, TIMEOUT_MS), LaneVerdict::Fine);
        assert_eq!(watch.look(300, 0, TIMEOUT_MS), LaneVerdict::Ping);
        for now in (300..5000).step_by(10) {
            let heard = now - now % 200;
            assert!(
                !matches!(watch.look(now, heard, TIMEOUT_MS), LaneVerdict::Silent(_)),
                "at {now} ms"
            );
        }
    }
}
