//! Counters of the streams between two processes, and of all messages.

use std::fmt;

use crate::error::Peer;

/// Counters of the streams for large messages from this process to another one.
#[derive(Clone, Debug)]
pub struct PeerCounters {
    /// The other process.
    pub peer: Peer,
    /// Streams that carry bytes: as many as help.
    pub streams: usize,
    /// Streams that are open, also those that rest.
    pub open_streams: usize,
    /// Bytes that streams were given, repeats too.
    pub bytes: u64,
    /// Bytes of the stream that was given the fewest, of those that carry bytes.
    pub slowest_bytes: u64,
    /// Chunks that were sent more than once.
    pub repeated_chunks: u64,
    /// Streams that ended and were replaced.
    pub lost_streams: u64,
    /// The last reason why a stream ended or could not be opened; empty if there is none.
    pub last_error: String,
}

impl fmt::Display for PeerCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "streams to {}: {} bytes (the fewest of a stream: {}), {} chunks repeated, {} streams lost",
            self.peer, self.bytes, self.slowest_bytes, self.repeated_chunks, self.lost_streams
        )?;
        match self.last_error.as_str() {
            "" => Ok(()),
            error => write!(f, ", the last since {error}"),
        }
    }
}

/// Messages of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// Messages that their user's thread carried itself, in one system call where the socket had
    /// room, or by a ring.
    pub small_messages: u64,
    /// Bytes of these.
    pub small_bytes: u64,
    /// Messages that went in chunks over the streams of all flows.
    pub large_messages: u64,
    /// Bytes of these.
    pub large_bytes: u64,
}

impl Traffic {
    pub(crate) fn add_small(&mut self, bytes: usize) {
        self.small_messages += 1;
        self.small_bytes += bytes as u64;
    }

    pub(crate) fn add_large(&mut self, bytes: usize) {
        self.large_messages += 1;
        self.large_bytes += bytes as u64;
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.small_messages += other.small_messages;
        self.small_bytes += other.small_bytes;
        self.large_messages += other.large_messages;
        self.large_bytes += other.large_bytes;
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { small_messages, small_bytes, large_messages, large_bytes } = self;
        write!(
            f,
            "{small_messages} messages of {small_bytes} bytes in one piece, {large_messages} of \
             {large_bytes} bytes in chunks"
        )
    }
}

/// Messages of all flows that have been closed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Totals {
    /// Messages that were posted.
    pub sent: Traffic,
    /// Messages that have come.
    pub received: Traffic,
}
