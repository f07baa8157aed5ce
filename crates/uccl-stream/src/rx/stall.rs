//! Watches the peer while nothing of it is received, because work of GPUs must end first.

use uccl_fabric::pipe::Backlog;

/// How long the work may go on after the peer's end. All that the peer sent before its end is
/// received if the work ends in this time.
const LAST_WORK_MS: u64 = 200;
/// The time between two signs of life for the peer: its pings are not answered meanwhile. By
/// default an endpoint pings after 2.5 s, and gives a peer up after 10 s.
const SIGN_MS: u64 = 250;

/// The looks at a pipe since its lane receives nothing.
#[derive(Default)]
pub(super) struct StallWatch {
    /// The time of the latest look, and the bytes that it found.
    looked: Option<(u64, usize)>,
    ended_ms: Option<u64>,
    /// When the latest sign of life was sent, or the stall began.
    signed_ms: Option<u64>,
}

/// The result of a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PeerSign {
    None,
    /// More bytes have come.
    Heard,
    /// The peer has ended, and the work goes on.
    Ended,
}

impl StallWatch {
    /// Looks at the pipe, once in a tick of the clock: a look may cost system calls.
    pub(super) fn look(&mut self, now_ms: u64, backlog: impl FnOnce() -> Backlog) -> PeerSign {
        if self.looked.is_some_and(|(looked_ms, _)| looked_ms == now_ms) {
            return PeerSign::None;
        }
        let Backlog { bytes, has_ended } = backlog();
        let before = self.looked.replace((now_ms, bytes));
        let since_end = |ended_ms: u64| now_ms.saturating_sub(ended_ms);
        if has_ended && since_end(*self.ended_ms.get_or_insert(now_ms)) >= LAST_WORK_MS {
            return PeerSign::Ended;
        }
        match before {
            Some((_, before)) if before < bytes => PeerSign::Heard,
            _ => PeerSign::None,
        }
    }

    /// Whether the peer is to be sent a sign of life now.
    pub(super) fn owes_sign(&mut self, now_ms: u64) -> bool {
        let since_ms = now_ms.saturating_sub(*self.signed_ms.get_or_insert(now_ms));
        let is_due = since_ms >= SIGN_MS;
        if is_due {
            self.signed_ms = Some(now_ms);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sign of each look, at these times, at pipes that have this many bytes and an end or not.
    fn signs(looks: &[(u64, usize, bool)]) -> Vec<PeerSign> {
        let mut watch = StallWatch::default();
        let look = |(now_ms, bytes, has_ended): &(u64, usize, bool)| {
            watch.look(*now_ms, || Backlog { bytes: *bytes, has_ended: *has_ended })
        };
        looks.iter().map(look).collect()
    }

    #[test]
    fn a_peer_is_heard_when_more_bytes_have_come() {
        use PeerSign::{Heard, None};
        // The bytes that the first look finds may be from before the stall.
        let looks = [(5, 100, false), (6, 100, false), (7, 101, false), (8, 101, false)];
        assert_eq!(signs(&looks), [None, None, Heard, None]);
    }

    #[test]
    fn the_pipe_is_looked_at_once_in_a_tick() {
        let mut watch = StallWatch::default();
        assert_eq!(watch.look(5, Backlog::default), PeerSign::None);
        assert_eq!(watch.look(5, || unreachable!("no second look")), PeerSign::None);
    }

    #[test]
    fn an_end_leaves_time_for_the_last_work() {
        use PeerSign::{Ended, None};
        let end = 1000 + LAST_WORK_MS;
        let looks = [(999, 9, false), (1000, 9, true), (end - 1, 9, true), (end, 9, true)];
        assert_eq!(signs(&looks), [None, None, None, Ended]);
    }

    #[test]
    fn signs_of_life_come_at_intervals() {
        let mut watch = StallWatch::default();
        let mut due = |now_ms| watch.owes_sign(now_ms);
        assert!(!due(1000), "the stall begins");
        assert!(!due(999 + SIGN_MS) && due(1000 + SIGN_MS) && !due(1001 + SIGN_MS));
        assert!(due(1000 + 3 * SIGN_MS) && !due(1000 + 3 * SIGN_MS));
    }
}
