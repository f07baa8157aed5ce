//! Lanes that carry messages too.

use uccl_device::MemoryKind;

use super::{Lane, LaneError, Operation, PostOutcome};
use crate::{mem::RemoteSpan, signal::Word};

/// How far the handling of a message is.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// It has ended.
    Ended,
    /// A GPU has work for it. The lane hands over nothing more until
    /// [`MessageSink::go_on`] says that it has ended.
    UnderWay,
}

/// Receives the messages of a lane, in order. The rules of [`Completion`](super::Completion) hold.
pub trait MessageSink {
    /// Handles one message. An error says why the message is invalid; it kills the lane.
    fn message(&self, bytes: &[u8]) -> Result<Handling, String>;

    /// Looks at the message that is under way.
    fn go_on(&self) -> Handling;

    /// Called when a signal that came with a write has changed a word of ours.
    fn signalled(&self);
}

/// A lane that also carries messages, in order. The first lane of a connection is one.
pub trait MessageLane: Lane {
    /// Sends a message made of parts, together at most
    /// [`Caps::max_message`](super::Caps::max_message) bytes. The caller may reuse their memory
    /// when this returns.
    ///
    /// # Errors
    /// The lane is dead.
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError>;

    /// Whether the lane can send a signal along with a write from memory of this kind to these
    /// pieces of the peer's. Otherwise the signal follows the write when that has ended.
    fn carries_signal(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool;

    /// Starts a write as [`Lane::post`] does, and sends a signal along with it. The peer's end
    /// changes the word once, when all bytes of the write are visible there and before the write
    /// ends. If the write fails at the peer, the word does not change. If the word may not be
    /// changed, the write fails, although its bytes are there.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    ///
    /// # Errors
    /// The lane is dead.
    unsafe fn post_signalled(&self, op: Operation, word: Word) -> Result<PostOutcome, LaneError>;

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
