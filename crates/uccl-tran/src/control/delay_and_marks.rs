//! Delay and marks together, as the sender's side of Ultra Ethernet's transport (UET 1.0, section
//! 3.6, "network signalled congestion control"; Bonato et al., "SMaRTT-REPS: Sender-based Marked
//! Rapidly-adapting Trimmed & Timed Transport", arXiv 2404.01630).
//!
//! | the acknowledged chunk | short delay | long delay |
//! | --- | --- | --- |
//! | not marked | grow in proportion to the room below the target | grow by a constant |
//! | marked | no change: the queue is draining | shrink in proportion to the excess |

use super::{AckSample, CongestionControl, LinkFacts};

/// The part of the relative excess that a decrease takes away (`gamma`).
const GAMMA: f64 = 0.8;
/// The largest part of the window that one decrease takes away.
const MOST_DECREASE: f64 = 0.5;
/// The bytes and the round trip for which the standard's constants are given: 100 Gbit/s, 12 us.
const REFERENCE_BDP: f64 = 150_000.0;
const REFERENCE_RTT_NS: f64 = 12_000.0;
/// The part of a new sample in the average delay (`delay_alpha`).
const SMOOTHING: f64 = 0.0125;
/// A path with a shorter delay than this in queues is empty.
const EMPTY_NS: f64 = 1_000.0;
/// The part of acknowledged bytes by which the window grows over empty paths (`fi_scale`).
const FAST: f64 = 0.25;
/// The largest window, in bandwidth-delay products.
const CEILING: f64 = 1.5;

/// The window, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct DelayAndMarks {
    link: LinkFacts,
    /// The target for the time in queues.
    target_ns: f64,
    window: f64,
    /// Growth per acknowledged byte and nanosecond below the target, times the window (`alpha`).
    alpha: f64,
    /// Growth per acknowledged byte, times the window (`fi`).
    fair: f64,
    delay_ns: f64,
    decreased_ns: Option<u64>,
    /// Bytes acknowledged in a row over empty paths.
    empty: f64,
    lost: f64,
}

impl DelayAndMarks {
    /// Begins with the largest window.
    #[must_use]
    pub fn new(link: &LinkFacts) -> Self {
        let (bdp, chunk) = (link.bdp_bytes(), link.chunk_len as f64);
        let target_ns = link.base_rtt_ns as f64;
        let scale = bdp / REFERENCE_BDP;
        Self {
            link: *link,
            target_ns,
            window: CEILING * bdp.max(chunk),
            alpha: 4.0 * scale * (target_ns / REFERENCE_RTT_NS) * chunk / target_ns,
            fair: 5.0 * scale * chunk,
            delay_ns: 0.0,
            decreased_ns: None,
            empty: 0.0,
            lost: 0.0,
        }
    }

    fn grow(&mut self, bytes: f64, delay_ns: f64) {
        if delay_ns < EMPTY_NS {
            self.empty += bytes;
            if self.empty > self.window {
                self.set(self.window + FAST * bytes);
                return;
            }
        } else {
            self.empty = 0.0;
        }
        let room_ns = (self.target_ns - delay_ns).max(0.0);
        self.set(self.window + (self.alpha * room_ns + self.fair) * bytes / self.window);
    }

    fn shrink(&mut self, now_ns: u64, part: f64) {
        let since = self.decreased_ns.map(|at| now_ns.saturating_sub(at));
        if since.is_none_or(|since| since > self.link.base_rtt_ns) {
            self.decreased_ns = Some(now_ns);
            self.set(self.window * (1.0 - part.min(MOST_DECREASE)));
        }
    }

    fn set(&mut self, window: f64) {
        let chunk = self.link.chunk_len as f64;
        self.window = window.clamp(chunk, (CEILING * self.link.bdp_bytes()).max(2.0 * chunk));
    }
}

impl CongestionControl for DelayAndMarks {
    fn on_ack(&mut self, ack: &AckSample) {
        self.lost *= 0.9;
        let base_ns = self.link.base_rtt_ns.min(ack.least_rtt_ns) as f64;
        let bytes = ack.bytes as f64;
        let is_marked = 2 * ack.marked_bytes >= ack.bytes && ack.marked_bytes > 0;
        let Some(delay_ns) = ack.rtt_ns.map(|rtt| rtt as f64 - base_ns) else { return };
        let weight = (SMOOTHING * bytes / self.link.chunk_len as f64).min(1.0);
        self.delay_ns += weight * (delay_ns - self.delay_ns);
        match (is_marked, delay_ns > self.target_ns) {
            (false, false) => self.grow(bytes, delay_ns),
            (false, true) => self.set(self.window + self.fair * bytes / self.window),
            (true, false) => self.empty = 0.0,
            (true, true) => {
                self.empty = 0.0;
                // The average alone would shrink the window long after the queue has gone.
                let delay_ns = self.delay_ns.max((delay_ns + self.delay_ns) / 2.0);
                let excess = (delay_ns - self.target_ns) / delay_ns;
                self.shrink(ack.now_ns, GAMMA * excess.max(0.0));
            }
        }
    }

    fn on_loss(&mut self, now_ns: u64, bytes: u64) {
        // One chunk of many may be lost on a bad link. A part of the window means full queues.
        self.lost += bytes as f64;
        if self.lost > self.window / 4.0 {
            self.lost = 0.0;
            self.shrink(now_ns, MOST_DECREASE);
        }
    }

    fn on_silence(&mut self, now_ns: u64) {
        self.shrink(now_ns, MOST_DECREASE);
    }

    fn window_bytes(&self) -> u64 {
        self.window as u64
    }
}
