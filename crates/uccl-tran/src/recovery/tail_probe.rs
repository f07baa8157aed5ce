//! Probes into silence (RFC 8985, section 7; the timeout of RFC 9002, section 6.2).

/// When a silent path is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TailProbe {
    /// The shortest silence, in nanoseconds.
    pub least_ns: u64,
    /// The longest silence, in nanoseconds, however often the time was doubled.
    pub most_ns: u64,
}

impl Default for TailProbe {
    fn default() -> Self {
        Self { least_ns: 20_000, most_ns: 200_000_000 }
    }
}

impl TailProbe {
    /// The silence before the next probe: the smoothed round trip, four times its variation and the
    /// time for which the receiver holds acknowledgements back, doubled by each probe before.
    #[must_use]
    pub fn after_ns(&self, smoothed_ns: u64, variation_ns: u64, held_ns: u64, before: u32) -> u64 {
        let once = smoothed_ns + 4 * variation_ns + held_ns;
        let factor = 1u64.checked_shl(before).unwrap_or(u64::MAX);
        once.max(self.least_ns).saturating_mul(factor).min(self.most_ns)
    }
}
