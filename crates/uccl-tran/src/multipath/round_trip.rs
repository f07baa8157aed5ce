//! The round trip of a path in nanoseconds, as in RFC 9002 (section 5).

/// Samples and their averages.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundTrip {
    pub(super) smoothed_ns: u64,
    pub(super) variation_ns: u64,
    pub(super) last_ns: u64,
    pub(super) least_ns: u64,
    pub(super) is_measured: bool,
}

impl RoundTrip {
    pub(super) fn new(initial_ns: u64) -> Self {
        Self {
            smoothed_ns: initial_ns,
            variation_ns: initial_ns / 4,
            last_ns: initial_ns,
            least_ns: initial_ns,
            is_measured: false,
        }
    }

    /// Records a round trip, of which the receiver claims to have held the acknowledgement back for
    /// `held_ns`. Returns it without that time, if the claim can be true.
    pub(super) fn record(&mut self, whole_ns: u64, held_ns: u64) -> u64 {
        if !self.is_measured {
            let sample_ns = whole_ns.max(1);
            *self = Self {
                smoothed_ns: sample_ns,
                variation_ns: sample_ns / 2,
                last_ns: sample_ns,
                least_ns: sample_ns,
                is_measured: true,
            };
            return sample_ns;
        }
        self.least_ns = self.least_ns.min(whole_ns.max(1));
        let without = whole_ns.saturating_sub(held_ns);
        let sample_ns = if without >= self.least_ns { without } else { whole_ns };
        self.variation_ns = (3 * self.variation_ns + self.smoothed_ns.abs_diff(sample_ns)) / 4;
        self.smoothed_ns = (7 * self.smoothed_ns + sample_ns) / 8;
        self.last_ns = sample_ns;
        sample_ns
    }
}
