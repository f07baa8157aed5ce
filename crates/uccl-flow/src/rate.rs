//! The rate of the streams to a process, from times in which they always had work.

/// The least bytes of a sample. Less would measure the time of a round trip.
const SAMPLE_LEN: u64 = 16 << 20;

/// The greatest rate of a time with messages outstanding.
#[derive(Default, Debug)]
pub(crate) struct BusyRate {
    /// When the sample began.
    since_us: u64,
    /// Bytes of messages that have ended since.
    bytes: u64,
    /// Bytes per second.
    greatest: u64,
}

impl BusyRate {
    /// There is work again after there was none.
    pub(crate) fn on_busy(&mut self, now_us: u64) {
        (self.since_us, self.bytes) = (now_us, 0);
    }

    /// A message has ended. The greatest rate until now, if this was the end of a sample.
    pub(crate) fn on_sent(&mut self, len: u64, now_us: u64) -> Option<u64> {
        self.bytes += len;
        if self.bytes < SAMPLE_LEN {
            return None;
        }
        let rate = self.bytes.saturating_mul(1_000_000) / (now_us - self.since_us).max(1);
        self.greatest = self.greatest.max(rate);
        self.on_busy(now_us);
        Some(self.greatest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_does_not_count() {
        let mut rate = BusyRate::default();
        rate.on_busy(0);
        assert_eq!(rate.on_sent(SAMPLE_LEN - 1, 10), None, "too few bytes");
        // Idle until then.
        rate.on_busy(1_000_000);
        assert_eq!(rate.on_sent(SAMPLE_LEN / 2, 1_005_000), None);
        assert_eq!(rate.on_sent(SAMPLE_LEN / 2, 1_010_000), Some(SAMPLE_LEN * 100));
        // A slow peer is no slow link.
        assert_eq!(rate.on_sent(SAMPLE_LEN, 9_000_000), Some(SAMPLE_LEN * 100));
    }
}
