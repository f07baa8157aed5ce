//! The round trip, as RFC 9002 (section 5) estimates it.

use std::time::{Duration, Instant};

/// The least round trip is that of the last one or two of these.
const MIN_EPOCH: Duration = Duration::from_secs(10);
/// What a timer may be late by; a probe timeout is no closer to the round trip.
const GRANULARITY: Duration = Duration::from_micros(100);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    smoothed: Duration,
    variation: Duration,
    measured: Option<Least>,
}

/// The least round trip, which is forgotten in time: paths change.
#[derive(Clone, Copy, Debug)]
struct Least {
    since: Instant,
    before: Duration,
    now: Duration,
}

impl Rtt {
    pub(crate) fn new(initial: Duration) -> Self {
        Self { smoothed: initial, variation: initial / 2, measured: None }
    }

    /// Takes a measurement; `held` is how long the receiver says to have kept the acknowledgement. The round trip
    /// without that, as far as it can be believed.
    pub(crate) fn record(&mut self, now: Instant, sample: Duration, held: Duration) -> Duration {
        let Some(least) = &mut self.measured else {
            self.measured = Some(Least { since: now, before: sample, now: sample });
            (self.smoothed, self.variation) = (sample, sample / 2);
            return sample;
        };
        if now.saturating_duration_since(least.since) > MIN_EPOCH {
            *least = Least { since: now, before: least.now, now: sample };
        }
        least.now = least.now.min(sample);
        let without = sample.saturating_sub(held);
        // A peer that exaggerates must not bring the round trip below what is possible.
        let sample = if without >= least.min() { without } else { sample };
        self.variation = (self.variation * 3 + self.smoothed.abs_diff(sample)) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
        sample
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// The least lately; the assumed one before any was measured.
    pub(crate) fn least(&self) -> Duration {
        self.measured.map_or(self.smoothed, |least| least.min())
    }

    /// How long an answer may take.
    pub(crate) fn probe_after(&self, held_at_most: Duration) -> Duration {
        self.smoothed + (self.variation * 4).max(GRANULARITY) + held_at_most
    }
}

impl Least {
    fn min(&self) -> Duration {
        self.before.min(self.now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_first_sample_replaces_the_guess() {
        let mut rtt = Rtt::new(100 * MS);
        rtt.record(Instant::now(), 2 * MS, Duration::ZERO);
        assert_eq!((rtt.smoothed(), rtt.least()), (2 * MS, 2 * MS));
        assert_eq!(rtt.probe_after(MS), 7 * MS);
    }

    #[test]
    fn the_time_that_the_peer_held_back_does_not_count() {
        let (mut rtt, now) = (Rtt::new(MS), Instant::now());
        rtt.record(now, 2 * MS, Duration::ZERO);
        assert_eq!(rtt.record(now, 10 * MS, 7 * MS), 3 * MS);
        // Not more than there is above the least.
        assert_eq!(rtt.record(now, 10 * MS, Duration::from_secs(4)), 10 * MS);
        assert_eq!(rtt.least(), 2 * MS);
    }

    #[test]
    fn the_least_is_forgotten() {
        let (mut rtt, now) = (Rtt::new(MS), Instant::now());
        rtt.record(now, MS, Duration::ZERO);
        for epoch in 1..=2 {
            rtt.record(now + epoch * (MIN_EPOCH + MS), 5 * MS, Duration::ZERO);
        }
        assert_eq!(rtt.least(), 5 * MS);
    }
}
