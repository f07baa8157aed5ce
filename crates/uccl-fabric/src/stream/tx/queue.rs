//! What waits to be sent, and how far it has been.

use uccl_wire::checked::Crc;
use uccl_wire::frame::Desc;

use super::SHORT;
use crate::{
    lane::{OpName, RemoteSpans, Spans},
    stream::cursor::Cursor,
};

/// One of our operations, not wholly sent.
pub(in crate::stream) struct Own {
    pub(in crate::stream) name: OpName,
    pub(in crate::stream) kind: OwnKind,
    pub(in crate::stream) local: Spans,
    pub(in crate::stream) remote: RemoteSpans,
    /// The GPU that alone reaches our memory.
    pub(super) device: Option<u32>,
    pub(super) local_at: Cursor,
    pub(super) remote_at: Cursor,
    pub(super) left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::stream) enum OwnKind {
    /// Ends the cut write of this name.
    Fence,
    Read,
    Write,
}

impl Own {
    pub(in crate::stream) fn new(
        name: OpName,
        kind: OwnKind,
        local: Spans,
        remote: RemoteSpans,
    ) -> Self {
        let left = local.iter().map(|span| span.len as u64).sum();
        let (local_at, remote_at) = (Cursor::default(), Cursor::default());
        Self { name, kind, local, remote, device: None, local_at, remote_at, left }
    }

    /// The same, from or to the memory of a GPU.
    pub(in crate::stream) fn on(self, device: Option<u32>) -> Self {
        Self { device, ..self }
    }

    /// Whether it is sent as one short frame.
    pub(super) fn is_short(&self) -> bool {
        self.kind == OwnKind::Write && self.left <= SHORT as u64 && !self.begun()
    }

    /// Whether its data is a GPU's.
    pub(super) fn is_fetched(&self) -> bool {
        self.kind == OwnKind::Write && self.device.is_some() && self.left > 0
    }

    pub(super) fn begun(&self) -> bool {
        self.local_at.index + self.local_at.offset + self.remote_at.index + self.remote_at.offset
            > 0
    }
}

/// Data that the peer asked for.
pub(in crate::stream) struct Reply {
    pub(in crate::stream) op: u64,
    pub(in crate::stream) pieces: Vec<Desc>,
    /// Some of it is a GPU's.
    pub(super) is_fetched: bool,
    pub(super) at: Cursor,
    pub(super) left: u64,
    /// The peer wants no more of it.
    pub(super) is_stopped: bool,
}

impl Reply {
    pub(in crate::stream) fn new(op: u64, pieces: Vec<Desc>, is_fetched: bool) -> Self {
        let left = pieces.iter().map(|piece| piece.len).sum();
        Self { op, pieces, is_fetched, at: Cursor::default(), left, is_stopped: false }
    }

    /// Ends it with what has been sent.
    pub(super) fn stop(&mut self) {
        self.pieces.clear();
        (self.is_fetched, self.at, self.left, self.is_stopped) =
            (false, Cursor::default(), 0, true);
    }
}

/// A data frame whose start has been written.
pub(in crate::stream) struct Frame {
    pub(super) len: usize,
    /// Of the start.
    pub(super) crc: Option<Crc>,
    pub(in crate::stream) turn: Turn,
}

/// Whose frame it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::stream) enum Turn {
    /// The peer's: data it asked for.
    Reply,
    /// Ours: of which operation, and whether that has been sent with it.
    Own { name: OpName, last: bool },
}

impl Turn {
    pub(in crate::stream) fn is_own(self) -> bool {
        matches!(self, Self::Own { .. })
    }
}
