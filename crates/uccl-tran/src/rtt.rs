//! The estimate of the round trip, as in RFC 9002 (section 5).

use std::time::{Duration, Instant};

/// The least round trip is taken over the last one or two periods of this length.
const MIN_EPOCH: Duration = Duration::from_secs(10);
/// How late a timer may be. A probe timeout exceeds the round trip by at least this.
const GRANULARITY: Duration = Duration::from_micros(100);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    smoothed: Duration,
    variation: Duration,
    measured: Option<MinRtt>,
}

/// The least round trip lately. Older ones are forgotten, as paths change.
#[derive(Clone, Copy, Debug)]
struct MinRtt {
    since: Instant,
    before: Duration,
    now: Duration,
}

impl Rtt {
    pub(crate) fn new(initial: Duration) -> Self {
        Self { smoothed: initial, variation: initial / 2, measured: None }
    }

    /// Records a measured round trip. `held` is how long the receiver claims to have held the
    /// acknowledgement back. Returns the round trip without that time, or with it if the claim
    /// cannot be true.
    pub(crate) fn record(&mut self, now: Instant, sample: Duration, held: Duration) -> Duration {
        let Some(least) = &mut self.measured else {
            self.measured = Some(MinRtt { since: now, before: sample, now: sample });
            (self.smoothed, self.variation) = (sample, sample / 2);
            return sample;
        };
        if now.saturating_duration_since(least.since) > MIN_EPOCH {
            *least = MinRtt { since: now, before: least.now, now: sample };
        }
        least.now = least.now.min(sample);
        let without = sample.saturating_sub(held);
        // A peer that exaggerates must not bring the round trip below the least that was measured.
        let sample = if without >= least.min() { without } else { sample };
        self.variation = (self.variation * 3 + self.smoothed.abs_diff(sample)) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
        sample
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// The least round trip lately, or the assumed one before any was measured.
    pub(crate) fn least(&self) -> Duration {
        self.measured.map_or(self.smoothed, |least| least.min())
    }

    /// How long to wait for an answer before probing.
    pub(crate) fn probe_after(&self, held_at_most: Duration) -> Duration {
        self.smoothed + (self.variation * 4).max(GRANULARITY) + held_at_most
    }
}

impl MinRtt {
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
        // The claimed time does not count if it leaves less than the least round trip.
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
