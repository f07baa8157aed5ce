//! Counters of the streams between two processes.

use crate::error::Peer;

/// Counters of the streams for large messages from this process to another one.
#[derive(Clone, Debug)]
pub struct PeerCounters {
    /// The other process.
    pub peer: Peer,
    /// Streams that are open.
    pub open_streams: usize,
    /// Bytes that streams were given, repeats too.
    pub bytes: u64,
    /// Bytes of the stream that was given the fewest.
    pub slowest_bytes: u64,
    /// Chunks that were sent more than once.
    pub repeated_chunks: u64,
    /// Streams that ended and were replaced.
    pub lost_streams: u64,
    /// The last reason why a stream ended or could not be opened; empty if there is none.
    pub last_error: String,
}
