//! Mistakes: attempts that were taken for lost and have come.

/// How long reordering is waited for: a number of quarters of the least round trip, one more after
/// each mistake, and one again after 16 round trips without one (RFC 8985, section 6.2, step 4).
#[derive(Clone, Copy, Debug)]
pub struct Undo {
    quarters: u32,
    rounds: u32,
}

/// Round trips after which mistakes are forgotten.
const MEMORY: u32 = 16;

impl Default for Undo {
    fn default() -> Self {
        Self { quarters: 1, rounds: 0 }
    }
}

impl Undo {
    /// An attempt that was taken for lost has come.
    pub fn on_mistake(&mut self) {
        self.quarters = self.quarters.saturating_add(1);
        self.rounds = 0;
    }

    /// A round trip has passed without one.
    pub fn on_round(&mut self) {
        self.rounds += 1;
        if self.rounds >= MEMORY {
            *self = Self::default();
        }
    }

    /// The time for reordering, in nanoseconds: at most a smoothed round trip.
    #[must_use]
    pub fn reorder_window_ns(&self, least_rtt_ns: u64, smoothed_rtt_ns: u64) -> u64 {
        (least_rtt_ns / 4).saturating_mul(self.quarters.into()).min(smoothed_rtt_ns)
    }
}
