//! No limit, and a window that never changes.

use super::{AckSample, CongestionControl, LinkFacts};

/// Every chunk goes out at once.
#[derive(Clone, Copy, Debug)]
pub struct NoLimit;

impl CongestionControl for NoLimit {
    fn on_ack(&mut self, _ack: &AckSample) {}

    fn on_loss(&mut self, _now_ns: u64, _bytes: u64) {}

    fn window_bytes(&self) -> u64 {
        u64::MAX
    }
}

/// A window of a fixed size.
#[derive(Clone, Copy, Debug)]
pub struct FixedWindow {
    bytes: u64,
}

impl FixedWindow {
    /// Bytes that may be under way.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { bytes }
    }

    /// One and a half bandwidth-delay products, but at least two chunks.
    #[must_use]
    pub fn of_two_chunks_or_bdp(link: &LinkFacts) -> Self {
        Self::new(((1.5 * link.bdp_bytes()) as u64).max(2 * link.chunk_len))
    }
}

impl CongestionControl for FixedWindow {
    fn on_ack(&mut self, _ack: &AckSample) {}

    fn on_loss(&mut self, _now_ns: u64, _bytes: u64) {}

    fn window_bytes(&self) -> u64 {
        self.bytes
    }
}
