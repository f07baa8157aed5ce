//! The parameters of a transfer: its kind, its memory, and its steps.

use std::{sync::Arc, time::Duration};

use smallvec::SmallVec;
use uccl_fabric::{mem::Span, signal::Word};

use super::super::Connection;
use crate::{
    drive::{payload::Payload, regions::Lease},
    types::Op,
};

/// The kind of a transfer. It decides how the transfer ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A copy that the peer asked this process to make.
    PeerCopy,
    /// The fetch of a notification's payload from the peer that sent it; no caller here asked for
    /// it.
    Fetch,
    /// The peer is asked for its published regions, on the way to a caller's read or write.
    LookUp,
    Notif,
    Read,
    Recv,
    Send,
    Write,
}

impl Kind {
    /// Whether a caller of this process started it. The peer caused the other kinds; a look-up is a
    /// part of a caller's transfer.
    pub(crate) fn is_callers(self) -> bool {
        !matches!(self, Self::PeerCopy | Self::Fetch | Self::LookUp)
    }

    /// The operation that the caller asked for; `None` for a notification, and where there is no
    /// caller.
    pub(crate) fn op(self) -> Option<Op> {
        match self {
            Self::PeerCopy | Self::Fetch | Self::LookUp | Self::Notif => None,
            Self::Read => Some(Op::Read),
            Self::Recv => Some(Op::Recv),
            Self::Send => Some(Op::Send),
            Self::Write => Some(Op::Write),
        }
    }
}

impl From<Op> for Kind {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Recv => Self::Recv,
            Op::Send => Self::Send,
            Op::Write => Self::Write,
        }
    }
}

/// Takes the fetched payload of the notification of this number; `None`: it could not be fetched.
/// It fetches the next notification, by a transfer of its own: so it is given from above.
pub(crate) type NotifTaker = fn(&Arc<Connection>, u64, Option<Payload>);

/// The step that follows when all operations have ended.
pub(crate) enum After {
    /// Publish the result.
    Publish,
    /// Send a notification, and wait until it has arrived.
    Notify(Vec<u8>),
    /// Change a word of the peer's memory, then send the notification, if there is one.
    Signal(Word, Option<Vec<u8>>),
    /// Tell the peer how the receive of its send of this number has ended.
    Fin(u64),
    /// Tell the peer how the copy for its ask of this number has ended.
    Answer(u64),
    /// Hand over the payload of this notification, after it was fetched.
    Deliver { id: u64, payload: Payload, to: NotifTaker },
}

impl After {
    /// Changes the word if there is one, then sends the notification if there is one.
    pub(crate) fn of(word: Option<Word>, notif: Option<Vec<u8>>) -> Self {
        match (word, notif) {
            (Some(word), notif) => Self::Signal(word, notif),
            (None, Some(notif)) => Self::Notify(notif),
            (None, None) => Self::Publish,
        }
    }
}

/// Why a transfer is being ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fence {
    Cancel,
    /// Its deadline is near, and the peer still has something to do for it.
    Deadline,
    /// Its deadline is near, and only copies that this process makes are left.
    OwnDeadline,
    PeerCancel,
}

/// The parameters of a new transfer.
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) context: u32,
    pub(crate) conn: Arc<Connection>,
    pub(crate) bytes: u64,
    pub(crate) timeout: Option<Duration>,
    pub(crate) leases: SmallVec<[Lease; 1]>,
    pub(crate) after: After,
    pub(crate) targets: SmallVec<[Span; 1]>,
}
