//! Payload for GPU memory: it is received into a chunk of locked host memory, and copied from there
//! while the next chunk is being received.

use uccl_fabric::{
    gpu::{CHUNK, Chunk},
    lane::OpName,
    mem::Span,
    pieces::Stretch,
    signal::Word,
};
use uccl_wire::frame::Status;

use super::ops::ReadTarget;

/// The operation that received data belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// A write of the peer's.
    Write(u64),
    /// A read of ours.
    Read(OpName),
}

/// How an operation ends once its data has landed.
pub(super) enum End {
    /// The peer gets this answer. If it is a good one, the word changes first.
    Ack(Status, Option<Word>),
    /// Our read ends.
    Data(ReadTarget),
    /// Our read, which was cancelled, ends.
    Cancelled,
}

/// The step to take when all copies before it have landed.
pub(super) struct Upload {
    pub(super) purpose: Purpose,
    /// `None`: more of its operation follows.
    pub(super) end: Option<End>,
}

/// A chunk that is being received.
pub(super) struct InboundChunk {
    pub(super) chunk: Chunk,
    /// Bytes in the chunk.
    pub(super) len: usize,
    /// The rest of its operation's memory, from the place of the first byte on.
    pub(super) rest: Stretch,
}

impl InboundChunk {
    /// The free part of the chunk.
    pub(super) fn room(&self) -> Span {
        Span { addr: self.chunk.addr() + self.len, len: CHUNK - self.len }
    }
}
