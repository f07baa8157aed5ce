//! The rate at which messages were lost lately.

/// A moving average over messages that have ended.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LossRate {
    rate: f64,
    seen: u32,
}

/// The newest message has a weight of one in this many.
const MEMORY: u32 = 128;

impl LossRate {
    pub(crate) fn record(&mut self, lost: bool) {
        // A plain average until this many messages have ended.
        self.seen = (self.seen + 1).min(MEMORY);
        self.rate += (f64::from(u8::from(lost)) - self.rate) / f64::from(self.seen);
    }

    pub(crate) fn get(&self) -> f64 {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_the_losses() {
        let mut rate = LossRate::default();
        for n in 0..1000 {
            rate.record(n % 10 == 0);
        }
        assert!((0.07..0.13).contains(&rate.get()), "{}", rate.get());
        for _ in 0..1000 {
            rate.record(false);
        }
        assert!(rate.get() < 0.001, "{}", rate.get());
    }
}
