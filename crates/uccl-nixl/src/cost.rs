//! How long transfers to an agent take, learned from those that were made.

use std::time::Duration;

/// The first estimate: a fixed part and a rate that fit local memory and networks roughly.
const FIRST: Model = Model { fixed_ns: 20_000.0, per_byte_ns: 0.3 };
/// The weight of one transfer in the model.
const WEIGHT: f64 = 0.25;
/// Transfers below this length correct the fixed part, longer ones the rate.
const LONG_BYTES: u64 = 256 << 10;

#[derive(Clone, Copy, Debug)]
struct Model {
    fixed_ns: f64,
    per_byte_ns: f64,
}

/// The estimate, and the relative error of past estimates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    model: Model,
    /// The relative error of the estimate.
    error: f64,
}

impl Default for Cost {
    fn default() -> Self {
        Self { model: FIRST, error: 1.0 }
    }
}

impl Cost {
    /// The estimated time of a transfer of so many bytes, and the likely error.
    pub(crate) fn estimate(&self, bytes: u64) -> (Duration, Duration) {
        let ns = self.expected_ns(bytes);
        (Duration::from_nanos(ns as u64), Duration::from_nanos((ns * self.error) as u64))
    }

    /// Records that a transfer of so many bytes took so long.
    pub(crate) fn learn(&mut self, bytes: u64, took: Duration) {
        let seen = took.as_nanos() as f64;
        let expected = self.expected_ns(bytes);
        mix(&mut self.error, (seen - expected).abs() / expected);
        if bytes < LONG_BYTES {
            mix(&mut self.model.fixed_ns, (seen - bytes as f64 * self.model.per_byte_ns).max(0.0));
        } else {
            mix(&mut self.model.per_byte_ns, (seen - self.model.fixed_ns).max(0.0) / bytes as f64);
        }
    }

    fn expected_ns(&self, bytes: u64) -> f64 {
        (self.model.fixed_ns + bytes as f64 * self.model.per_byte_ns).max(1.0)
    }
}

fn mix(known: &mut f64, seen: f64) {
    *known += WEIGHT * (seen - *known);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_to_know_a_link() {
        // 5 us and 10 GB/s.
        let link = |bytes: u64| Duration::from_nanos(5_000 + bytes / 10);
        let mut cost = Cost::default();
        for _ in 0..100 {
            cost.learn(4096, link(4096));
            cost.learn(64 << 20, link(64 << 20));
        }
        let (duration, error) = cost.estimate(16 << 20);
        let off = duration.abs_diff(link(16 << 20));
        assert!(off < link(16 << 20) / 20, "{duration:?}");
        assert!(error < duration / 10, "{error:?}");
    }

    #[test]
    fn more_bytes_take_longer_from_the_beginning() {
        let cost = Cost::default();
        assert!(cost.estimate(1 << 30).0 > cost.estimate(1 << 20).0);
        assert!(cost.estimate(0).0 > Duration::ZERO);
    }
}
