//! Statistics of samples, for the numbers of a row.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latency of one transfer, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Latency {
    /// The median.
    pub(crate) p50: f64,
    /// Ninety-nine in a hundred were no slower.
    pub(crate) p99: f64,
    /// The fastest.
    pub(crate) min: f64,
}

/// Latencies of many transfers in bounded memory, to three digits.
pub(crate) struct Latencies {
    nanoseconds: Histogram<u64>,
    min: Option<Duration>,
}

/// Longer than any transfer may take.
const LONGEST_NS: u64 = 3_600_000_000_000;

impl Latencies {
    pub(crate) fn new() -> Self {
        let nanoseconds = Histogram::new_with_bounds(1, LONGEST_NS, 3);
        // The bounds and digits are constants that the histogram takes.
        Self { nanoseconds: nanoseconds.unwrap_or_else(|_| unreachable!()), min: None }
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(LONGEST_NS);
        self.nanoseconds.saturating_record(nanoseconds);
        self.min = Some(self.min.map_or(latency, |min| min.min(latency)));
    }

    pub(crate) fn add(&mut self, other: &Self) {
        // Both have the same bounds, so that nothing of the other's can be outside this one's.
        let _ = self.nanoseconds.add(&other.nanoseconds);
        self.min = self.min.into_iter().chain(other.min).min();
    }

    pub(crate) fn count(&self) -> u64 {
        self.nanoseconds.len()
    }

    /// `None` if nothing was recorded. `hops` is how many hops a sample made: a sample of a
    /// ping-pong makes two, and the row shows one.
    pub(crate) fn summary(&self, hops: u32) -> Option<Latency> {
        let us = |nanoseconds: u64| nanoseconds as f64 / 1e3 / f64::from(hops);
        Some(Latency {
            min: self.min?.as_secs_f64() * 1e6 / f64::from(hops),
            p50: us(self.nanoseconds.value_at_quantile(0.50)),
            p99: us(self.nanoseconds.value_at_quantile(0.99)),
        })
    }
}

/// The middle of an odd number of values, the mean of the middle two of an even one.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        1 => Some(upper),
        _ => Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0),
    }
}

/// GB/s of 1e9 bytes.
pub(crate) fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_none_odd_and_even() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn percentiles_are_to_three_digits() {
        let mut latencies = Latencies::new();
        assert!(latencies.summary(1).is_none());
        (1..=1000).for_each(|us| latencies.record(Duration::from_micros(us)));
        let Latency { p50, p99, min } = latencies.summary(1).expect("a summary");
        assert!((p50 - 500.0).abs() <= 1.0 && (p99 - 990.0).abs() <= 1.0, "{p50} {p99}");
        assert_eq!(min, 1.0);
        assert_eq!(latencies.count(), 1000);
        assert_eq!(latencies.summary(2).map(|half| half.min), Some(0.5));
    }

    #[test]
    fn latencies_out_of_range_count() {
        let mut latencies = Latencies::new();
        latencies.record(Duration::ZERO);
        latencies.record(Duration::from_secs(1_000_000));
        assert_eq!(latencies.count(), 2);
        assert_eq!(latencies.summary(1).map(|summary| summary.min), Some(0.0));
    }

    #[test]
    fn rate_is_in_decimal_gigabytes() {
        assert_eq!(gb_per_s(2_000_000_000, Duration::from_secs(1)), 2.0);
        assert!(gb_per_s(1, Duration::ZERO).is_finite());
    }
}
