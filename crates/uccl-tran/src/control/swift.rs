//! Swift: a target for the delay (Kumar et al., "Swift: Delay is Simple and Effective for
//! Congestion Control in the Datacenter", SIGCOMM 2020, algorithm 1 and section 3.5).

use super::{AckSample, CongestionControl, LinkFacts};

/// Growth for each round trip below the target, in chunks (`ai`).
const INCREASE: f64 = 1.0;
/// Part of the relative excess that a decrease takes away (`beta`).
const BETA: f64 = 0.8;
/// The largest part of the window that a decrease takes away (`max_mdf`).
const MOST_DECREASE: f64 = 0.5;
/// Windows of flow scaling, in chunks (`fs_min_cwnd`, `fs_max_cwnd`).
const SCALING: (f64, f64) = (0.1, 100.0);
/// The largest addition of flow scaling, in targets (`fs_range`).
const SCALING_RANGE: f64 = 4.0;
/// The target above the round trip through empty queues, at the least. The paper's is 25 us with
/// its fabric's round trip.
const QUEUE_TARGET_NS: f64 = 10_000.0;
const WINDOW: (f64, f64) = (0.001, 65_536.0);

/// The window in chunks, which may be a fraction of one: then chunks are paced.
#[derive(Clone, Copy, Debug)]
pub struct Swift {
    chunk_len: f64,
    base_target_ns: f64,
    window: f64,
    rtt_ns: f64,
    decreased_ns: Option<u64>,
}

impl Swift {
    /// Begins with a bandwidth-delay product.
    #[must_use]
    pub fn new(link: &LinkFacts) -> Self {
        let rtt_ns = link.base_rtt_ns as f64;
        Self {
            chunk_len: link.chunk_len as f64,
            base_target_ns: rtt_ns + QUEUE_TARGET_NS.max(rtt_ns / 4.0),
            window: (link.bdp_bytes() / link.chunk_len as f64).max(1.0),
            rtt_ns,
            decreased_ns: None,
        }
    }

    /// The target delay, which is longer for small windows: more flows share the queue then.
    fn target_ns(&self) -> f64 {
        let (least, most) = (1.0 / SCALING.1.sqrt(), 1.0 / SCALING.0.sqrt());
        let range_ns = SCALING_RANGE * self.base_target_ns;
        let alpha = range_ns / (most - least);
        let added = alpha * (1.0 / self.window.sqrt() - least);
        self.base_target_ns + added.clamp(0.0, range_ns)
    }

    /// Takes a part of the window away, once for each round trip.
    fn decrease(&mut self, now_ns: u64, part: f64) {
        let since = self.decreased_ns.map(|at| now_ns.saturating_sub(at) as f64);
        if since.is_none_or(|since| since >= self.rtt_ns) {
            self.decreased_ns = Some(now_ns);
            self.set(self.window * (1.0 - part.min(MOST_DECREASE)));
        }
    }

    fn set(&mut self, window: f64) {
        self.window = window.clamp(WINDOW.0, WINDOW.1);
    }
}

impl CongestionControl for Swift {
    fn on_ack(&mut self, ack: &AckSample) {
        let Some(delay_ns) = ack.rtt_ns.map(|rtt| rtt as f64) else { return };
        self.rtt_ns = (7.0 * self.rtt_ns + delay_ns) / 8.0;
        let (acked, target_ns) = (ack.bytes as f64 / self.chunk_len, self.target_ns());
        if delay_ns < target_ns {
            self.set(self.window + INCREASE * acked / self.window.max(1.0));
        } else {
            self.decrease(ack.now_ns, BETA * (delay_ns - target_ns) / delay_ns);
        }
    }

    fn on_loss(&mut self, _now_ns: u64, _bytes: u64) {
        // Paths lose chunks for other reasons than queues, and the delay tells of queues.
    }

    fn on_silence(&mut self, now_ns: u64) {
        self.decreased_ns = Some(now_ns);
        self.set(1.0);
    }

    fn window_bytes(&self) -> u64 {
        (self.window * self.chunk_len) as u64
    }

    fn bytes_per_s(&self) -> Option<f64> {
        let is_below_one = self.window < 1.0;
        is_below_one.then(|| self.window * self.chunk_len * 1e9 / self.rtt_ns)
    }
}
