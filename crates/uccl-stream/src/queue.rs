//! The operations and answers that wait to be sent, and how far each has been.

use uccl_fabric::{
    lane::{OpName, RemoteSpans, Spans},
    pieces::{Pieces as _, Stretch},
    signal::Word,
};
use uccl_wire::checked::Crc;
use uccl_wire::frame::Desc;

/// Operations of at most this many bytes are copied into their frame when they are posted, so that
/// many of them share one system call.
pub(crate) const SHORT: usize = 2 << 10;

/// One of our operations that has not been sent wholly.
pub(crate) struct OutgoingOp {
    pub(crate) name: OpName,
    pub(crate) kind: OutgoingKind,
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
    /// The GPU, if only that GPU reaches our memory.
    pub(crate) device: Option<u32>,
    /// The signal that travels with the last frame of a write.
    pub(crate) word: Option<Word>,
    /// The unsent parts here and at the peer: a read may have more pieces there.
    pub(crate) ours: Stretch,
    pub(crate) theirs: Stretch,
    pub(crate) left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OutgoingKind {
    /// Ends the write of this name, which was cut.
    Fence,
    Read,
    Write,
}

impl OutgoingOp {
    pub(crate) fn new(name: OpName, kind: OutgoingKind, local: Spans, remote: RemoteSpans) -> Self {
        let left = local.as_slice().len_bytes();
        let (ours, theirs) = (Stretch::all(&local[..]), Stretch::all(&remote[..]));
        Self { name, kind, local, remote, device: None, word: None, ours, theirs, left }
    }

    /// The same operation, from or to the memory of a GPU.
    pub(crate) fn on(self, device: Option<u32>) -> Self {
        Self { device, ..self }
    }

    /// The same operation with a signal, or without one.
    pub(crate) fn with(self, word: Option<Word>) -> Self {
        Self { word, ..self }
    }

    /// Whether it is sent as one short frame.
    pub(crate) fn is_short(&self) -> bool {
        self.kind == OutgoingKind::Write && self.left <= SHORT as u64 && !self.begun()
    }

    /// Whether its data must be fetched from a GPU.
    pub(crate) fn is_fetched(&self) -> bool {
        self.kind == OutgoingKind::Write && self.device.is_some() && self.left > 0
    }

    pub(crate) fn begun(&self) -> bool {
        self.theirs != Stretch::all(&self.remote[..])
    }
}

/// Data that the peer asked for.
pub(crate) struct Reply {
    pub(crate) op: u64,
    pub(crate) pieces: Vec<Desc>,
    /// Some of it is GPU memory.
    pub(crate) is_fetched: bool,
    /// The unsent part.
    pub(crate) rest: Stretch,
    pub(crate) left: u64,
    /// The peer has stopped its read.
    pub(crate) is_stopped: bool,
}

impl Reply {
    pub(crate) fn new(op: u64, pieces: Vec<Desc>, is_fetched: bool) -> Self {
        let (rest, left) = (Stretch::all(&pieces[..]), pieces.as_slice().len_bytes());
        Self { op, pieces, is_fetched, rest, left, is_stopped: false }
    }

    /// Ends it: no more data is sent.
    pub(crate) fn stop(&mut self) {
        self.pieces.clear();
        (self.is_fetched, self.rest, self.left, self.is_stopped) =
            (false, Stretch::default(), 0, true);
    }
}

/// A data frame with its header and descriptors written.
pub(crate) struct Frame {
    pub(crate) len: usize,
    /// The checksum of the header and descriptors.
    pub(crate) crc: Option<Crc>,
    pub(crate) turn: Turn,
}

/// Whether a frame is ours or the peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// An answer with data that the peer asked for.
    Reply,
    /// A frame of our operation `name`; `last` if it is the operation's last one.
    Own { name: OpName, last: bool },
}

impl Turn {
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Self::Own { .. })
    }
}
