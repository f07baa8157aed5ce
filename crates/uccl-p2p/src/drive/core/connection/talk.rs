//! A connection's session, and the engine's data for each item of the session.

use std::sync::Arc;

use bytes::Bytes;
use uccl_proto::Handles;

use super::{
    loans::{Grants, Loan},
    transfer::Transfer,
};
use crate::drive::work::Work;

/// The types that the engine keeps for each item of a session.
pub(crate) struct EngineHandles;

pub(crate) type Session = uccl_proto::Session<EngineHandles>;

impl Handles for EngineHandles {
    type Send = PendingMessage;
    type Notif = PendingMessage;
    type Signal = Arc<Transfer>;
    type LookUp = Arc<Transfer>;
    type Receive = Arc<Transfer>;
    type Ask = Ask;
    type PeerCopy = Arc<Transfer>;
    type Operation = Arc<Piece>;
}

/// One end of a connection, as the protocol sees it.
pub(crate) struct Talk {
    pub(crate) session: Session,
    /// Buffer for a message or its head.
    pub(crate) message: Vec<u8>,
}

impl Talk {
    /// For a connection with this number of lanes.
    pub(crate) fn new(lanes: usize) -> Self {
        Self { session: Session::new(lanes), message: Vec::new() }
    }
}

/// A send or a notification that the peer has not answered.
pub(crate) struct PendingMessage {
    pub(in crate::drive) transfer: Arc<Transfer>,
    pub(in crate::drive) grants: Grants,
    /// The payload of a notification that the peer fetches.
    pub(in crate::drive) payload: Option<Bytes>,
}

impl PendingMessage {
    pub(in crate::drive) fn of(transfer: &Arc<Transfer>) -> Self {
        Self { transfer: Arc::clone(transfer), grants: Grants::new(), payload: None }
    }

    /// The memory that the peer may still be using.
    pub(in crate::drive) fn lent(self) -> impl Iterator<Item = Loan> {
        let Self { transfer, grants, mut payload } = self;
        let lent = grants.into_iter().filter_map(move |grant| grant.end(&transfer));
        // A payload has only one key.
        lent.map(move |lent| Loan { _payload: payload.take(), ..lent })
    }
}

/// A copy that the peer was asked for and has not answered.
pub(crate) struct Ask {
    pub(in crate::drive) transfer: Arc<Transfer>,
    /// The work for the lanes if the peer declines.
    pub(in crate::drive) work: Work,
    pub(in crate::drive) grants: Grants,
}

impl Ask {
    /// The memory that the peer may still be using.
    pub(in crate::drive) fn lent(self) -> impl Iterator<Item = Loan> {
        let Self { transfer, grants, .. } = self;
        grants.into_iter().filter_map(move |grant| grant.end(&transfer))
    }

    pub(in crate::drive) fn is_of(&self, transfer: &Arc<Transfer>) -> bool {
        Arc::ptr_eq(&self.transfer, transfer)
    }
}

/// An operation of a connection with several lanes: it can be posted again when its lane dies.
#[derive(Clone)]
pub(crate) struct Piece {
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) work: Work,
    /// The lane on which it was posted.
    pub(crate) lane: usize,
}
