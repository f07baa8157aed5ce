//! Constants of the scheduler.

use super::width::WidthParams;

/// Constants of the scheduler; times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    /// The most streams.
    pub(crate) streams: usize,
    /// The number of streams that carry chunks.
    pub(crate) width: WidthParams,
    /// Bytes of a chunk.
    pub(crate) chunk_len: u64,
    /// Bytes of a flow that may be sent before their receives are known to be posted. The receiver
    /// has as much memory for them.
    pub(crate) early_len: u64,
    /// A stream is late after this time and three round trips.
    pub(crate) late_us: u64,
    /// A stream is replaced after this time without progress.
    pub(crate) dead_us: u64,
    /// All fails after this time without progress.
    pub(crate) limit_us: u64,
    /// A stream that is passed over is tried again after this time.
    pub(crate) probe_us: u64,
}

impl Params {
    /// Bytes that a flow may send early, for chunks of some length.
    pub(crate) fn early_len(chunk_len: u64) -> u64 {
        (2 * chunk_len).max(256 << 10)
    }
}
