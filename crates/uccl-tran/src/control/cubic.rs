//! CUBIC: the window is a cubic function of the time since the last loss (RFC 9438).

use super::{AckSample, CongestionControl, LinkFacts};

/// How fast the window grows, in segments per second cubed (`C`, section 5).
const C: f64 = 0.4;
/// The part of the window that a loss leaves (`beta_cubic`, section 4.6).
const BETA: f64 = 0.7;
/// The window at the start, in segments (RFC 6928).
const START: f64 = 10.0;
const FLOOR: f64 = 2.0;

/// State that a loss changes, kept to be undone (section 4.9).
#[derive(Clone, Copy, Debug)]
struct Epoch {
    /// When the first acknowledgement after the loss came.
    start_ns: Option<u64>,
    /// The window before the loss (`W_max`).
    most: f64,
    /// The time from the loss to that window (`K`), in seconds.
    k_s: f64,
    /// The window of a Reno flow in its place (`W_est`).
    reno: f64,
}

/// The window, in chunks.
#[derive(Clone, Copy, Debug)]
pub struct Cubic {
    chunk_len: f64,
    window: f64,
    threshold: f64,
    epoch: Epoch,
    rtt_ns: f64,
    lost_ns: Option<u64>,
    before_loss: Option<(f64, f64, Epoch)>,
}

impl Cubic {
    /// Begins in slow start.
    #[must_use]
    pub fn new(link: &LinkFacts) -> Self {
        Self {
            chunk_len: link.chunk_len as f64,
            window: START,
            threshold: f64::INFINITY,
            epoch: Epoch { start_ns: None, most: 0.0, k_s: 0.0, reno: 0.0 },
            rtt_ns: link.base_rtt_ns as f64,
            lost_ns: None,
            before_loss: None,
        }
    }

    /// Growth beyond slow start (sections 4.2 to 4.5).
    fn grow(&mut self, now_ns: u64, acked: f64) {
        let window = self.window;
        let epoch = &mut self.epoch;
        let start_ns = *epoch.start_ns.get_or_insert_with(|| {
            epoch.most = epoch.most.max(window);
            epoch.k_s = ((epoch.most - window) / C).cbrt();
            epoch.reno = window;
            now_ns
        });
        let after_s = (now_ns.saturating_sub(start_ns) as f64 + self.rtt_ns) / 1e9;
        let target = C * (after_s - epoch.k_s).powi(3) + epoch.most;
        let alpha = if epoch.reno < epoch.most { 3.0 * (1.0 - BETA) / (1.0 + BETA) } else { 1.0 };
        epoch.reno += alpha * acked / window;
        let target = target.clamp(window, 1.5 * window);
        self.window = (window + (target - window) / window * acked).max(epoch.reno);
    }
}

impl CongestionControl for Cubic {
    fn on_ack(&mut self, ack: &AckSample) {
        if let Some(rtt) = ack.rtt_ns {
            self.rtt_ns = (7.0 * self.rtt_ns + rtt as f64) / 8.0;
        }
        let acked = ack.bytes as f64 / self.chunk_len;
        let is_limit = 2.0 * ack.in_flight_bytes as f64 >= self.window * self.chunk_len;
        if !is_limit {
            return;
        }
        if self.window < self.threshold {
            self.window += acked;
        } else {
            self.grow(ack.now_ns, acked);
        }
    }

    fn on_loss(&mut self, now_ns: u64, _bytes: u64) {
        // One reaction to all losses of a round trip (section 4.6).
        let since = self.lost_ns.map(|at| now_ns.saturating_sub(at) as f64);
        if since.is_some_and(|since| since < self.rtt_ns) {
            return;
        }
        self.before_loss = Some((self.window, self.threshold, self.epoch));
        self.lost_ns = Some(now_ns);
        // Fast convergence (section 4.7).
        let is_less = self.window < self.epoch.most;
        let most = if is_less { self.window * (1.0 + BETA) / 2.0 } else { self.window };
        self.window = (self.window * BETA).max(FLOOR);
        self.threshold = self.window;
        self.epoch = Epoch { start_ns: None, most, k_s: 0.0, reno: 0.0 };
    }

    fn on_undo(&mut self, _now_ns: u64) {
        if let Some((window, threshold, epoch)) = self.before_loss.take() {
            self.window = self.window.max(window);
            (self.threshold, self.epoch) = (self.threshold.max(threshold), epoch);
        }
    }

    fn on_silence(&mut self, now_ns: u64) {
        self.on_loss(now_ns, 0);
        self.window = FLOOR;
    }

    fn window_bytes(&self) -> u64 {
        (self.window * self.chunk_len) as u64
    }
}
