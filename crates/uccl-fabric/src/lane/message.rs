//! Lanes that carry messages too.

use super::{Lane, LaneError};

/// Receives the messages of a lane, in order. The rules of [`Completion`](super::Completion) hold.
pub trait MessageSink {
    /// Handles one message. An error says why the message is invalid; it kills the lane.
    fn message(&self, bytes: &[u8]) -> Result<(), String>;
}

/// A lane that also carries messages, in order. The first lane of a connection is one.
pub trait MessageLane: Lane {
    /// Sends a message made of parts, together at most [`Caps::max_message`](super::Caps::max_message) bytes. The
    /// caller may reuse their memory when this returns.
    ///
    /// # Errors
    /// The lane is dead.
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError>;

    /// Bytes of messages that wait for room. A sender that can wait should, while there are many.
    fn queued_bytes(&self) -> usize;

    /// When the peer was last heard, as [`coarse_ms`](crate::clock::coarse_ms).
    fn last_heard_ms(&self) -> u64;

    /// Asks the peer for a sign of life.
    ///
    /// # Errors
    /// The lane is dead.
    fn ping(&self) -> Result<(), LaneError>;

    /// Says goodbye to the peer, if that is possible without blocking.
    fn bye(&self);
}
