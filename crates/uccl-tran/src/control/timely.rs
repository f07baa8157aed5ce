//! Timely: the slope of the delay (Mittal et al., "TIMELY: RTT-based Congestion Control for the
//! Datacenter", SIGCOMM 2015), with the weight of Zhu et al. ("ECN or Delay: Lessons Learnt from
//! Analysis of DCQCN and TIMELY", CoNEXT 2016, section 4.3), by which it comes to rest.

use super::{AckSample, CongestionControl, LinkFacts};

/// The part of a new sample in the smoothed difference of delays.
const SMOOTHING: f64 = 0.125;
/// Below the low delay the rate grows, above the high one it falls, whatever the slope; both are
/// beyond the round trip through empty queues.
const LOW_NS: f64 = 10_000.0;
const HIGH_NS: f64 = 100_000.0;
/// The largest part of the rate that a delay above the high one takes away.
const BETA_HIGH: f64 = 0.8;
/// The part that the excess takes away between the two, `beta` of the patched form.
const BETA: f64 = 0.008;
/// Growth of the rate for each round trip, as part of the link's.
const INCREASE: f64 = 0.005;
/// After so many round trips of growth each is this many times as large.
const HYPER_AFTER: u32 = 5;
const HYPER: f64 = 5.0;
/// The least rate, as part of the link's.
const FLOOR: f64 = 0.001;

/// A rate, which changes once for each round trip.
#[derive(Clone, Copy, Debug)]
pub struct Timely {
    link: LinkFacts,
    rate: f64,
    last_rtt_ns: f64,
    /// Smoothed difference between two delays.
    difference_ns: f64,
    changed_ns: u64,
    grown: u32,
}

impl Timely {
    /// Begins with the link's rate.
    #[must_use]
    pub fn new(link: &LinkFacts) -> Self {
        Self {
            link: *link,
            rate: link.bytes_per_s,
            last_rtt_ns: link.base_rtt_ns as f64,
            difference_ns: 0.0,
            changed_ns: 0,
            grown: 0,
        }
    }

    fn grow(&mut self, weight: f64) {
        self.grown += 1;
        let steps = if self.grown >= HYPER_AFTER { HYPER } else { 1.0 };
        self.set(self.rate + weight * steps * INCREASE * self.link.bytes_per_s);
    }

    fn set(&mut self, rate: f64) {
        let most = self.link.bytes_per_s;
        self.rate = rate.clamp(FLOOR * most, most);
    }
}

impl CongestionControl for Timely {
    fn on_ack(&mut self, ack: &AckSample) {
        let Some(rtt_ns) = ack.rtt_ns.map(|rtt| rtt as f64) else { return };
        let difference = rtt_ns - self.last_rtt_ns;
        self.last_rtt_ns = rtt_ns;
        self.difference_ns += SMOOTHING * (difference - self.difference_ns);
        if (ack.now_ns.saturating_sub(self.changed_ns) as f64) < rtt_ns {
            return;
        }
        self.changed_ns = ack.now_ns;
        let base_ns = self.link.base_rtt_ns as f64;
        if rtt_ns < base_ns + LOW_NS {
            self.grow(1.0);
        } else if rtt_ns > base_ns + HIGH_NS {
            self.grown = 0;
            self.set(self.rate * (1.0 - BETA_HIGH * (1.0 - (base_ns + HIGH_NS) / rtt_ns)));
        } else {
            // The weight goes from growth to decrease as the slope does from falling to rising.
            let weight = (2.0 * self.difference_ns / base_ns + 0.5).clamp(0.0, 1.0);
            let excess = (rtt_ns - base_ns - LOW_NS) / (base_ns + LOW_NS);
            self.grown = 0;
            let kept = self.rate * (1.0 - BETA * weight * excess);
            self.set(kept + (1.0 - weight) * INCREASE * self.link.bytes_per_s);
        }
    }

    fn on_loss(&mut self, now_ns: u64, _bytes: u64) {
        self.grown = 0;
        // Queues that are full drop: half of the rate, once for each round trip.
        let is_full = self.last_rtt_ns > self.link.base_rtt_ns as f64 + HIGH_NS;
        if is_full && now_ns.saturating_sub(self.changed_ns) as f64 >= self.last_rtt_ns {
            self.changed_ns = now_ns;
            self.set(self.rate / 2.0);
        }
    }

    fn on_silence(&mut self, now_ns: u64) {
        (self.changed_ns, self.grown) = (now_ns, 0);
        self.set(self.rate / 2.0);
    }

    fn window_bytes(&self) -> u64 {
        // A rate alone fills every queue while acknowledgements stay away.
        (4.0 * self.link.bdp_bytes()).max(16.0 * self.link.chunk_len as f64) as u64
    }

    fn bytes_per_s(&self) -> Option<f64> {
        Some(self.rate)
    }
}
