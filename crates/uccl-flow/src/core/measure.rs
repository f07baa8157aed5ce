//! Rate and round trip of a stream.

/// Rate and round trip of a stream, from its acknowledgements.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Measure {
    /// Smoothed bytes per millisecond; 0 before the first sample.
    rate: u64,
    /// Smoothed time from giving a chunk to its acknowledgement.
    pub(super) round_us: u64,
    /// Bytes acknowledged since the last sample, and the time with work under way.
    bytes: u64,
    busy_us: u64,
    /// Until when that time has been counted.
    mark_us: u64,
}

/// The shortest time over which a rate is measured.
const SPAN_US: u64 = 1000;

impl Measure {
    /// The stream gets work after it had none. Idle time does not count.
    pub(super) fn on_busy(&mut self, now_us: u64) {
        self.mark_us = now_us;
    }

    /// A chunk that was given at `since_us` has been acknowledged.
    pub(super) fn on_ack(&mut self, len: u64, since_us: u64, now_us: u64) {
        let round = now_us.saturating_sub(since_us).max(1);
        self.round_us = if self.round_us == 0 { round } else { (7 * self.round_us + round) / 8 };
        self.bytes += len;
        self.busy_us += now_us.saturating_sub(self.mark_us);
        self.mark_us = now_us;
        if self.busy_us >= SPAN_US {
            let sample = (self.bytes * 1000 / self.busy_us).max(1);
            self.rate = if self.rate == 0 { sample } else { (3 * self.rate + sample) / 4 };
            (self.bytes, self.busy_us) = (0, 0);
        }
    }

    /// The time for so many bytes; `None` while the rate is unknown.
    pub(super) fn time_us(&self, bytes: u64) -> Option<u64> {
        (self.rate > 0).then(|| bytes.saturating_mul(1000) / self.rate)
    }

    /// The bytes that keep the stream busy for two round trips.
    pub(super) fn window(&self) -> Option<u64> {
        (self.rate > 0).then(|| self.rate.saturating_mul(2 * self.round_us.max(SPAN_US)) / 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_acknowledgements() {
        let mut measure = Measure::default();
        assert_eq!(measure.time_us(1), None);
        measure.on_busy(0);
        for ms in 1..100 {
            measure.on_ack(5000, ms * 1000 - 400, ms * 1000);
        }
        assert_eq!(measure.time_us(50_000), Some(10_000));
        assert_eq!(measure.round_us, 400);
        assert_eq!(measure.window(), Some(10_000));
    }
}
