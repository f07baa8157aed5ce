//! A connection's session, and the engine's data for each item of the session.

use std::{marker::PhantomData, sync::Arc};

use bytes::Bytes;
use uccl_proto::{Handles, Session};

use super::{
    loans::{Grants, Loan},
    transfer::{Carrier, Transfer},
};
use crate::drive::work::Work;

/// The types that the engine keeps for each item, for connections of type `C`.
pub(crate) struct Kept<C>(PhantomData<C>);

impl<C: Carrier> Handles for Kept<C> {
    type Send = Sent<C>;
    type Notif = Sent<C>;
    type Signal = Arc<Transfer<C>>;
    type Receive = Arc<Transfer<C>>;
    type Ask = Ask<C>;
    type Asked = Arc<Transfer<C>>;
    type Operation = Arc<Piece<C>>;
}

/// One end of a connection, as the protocol sees it.
pub(crate) struct Talk<C: Carrier> {
    pub(crate) session: Session<Kept<C>>,
    /// Buffer for a message or its head.
    pub(crate) message: Vec<u8>,
}

impl<C: Carrier> Talk<C> {
    /// For a connection with this number of lanes.
    pub(crate) fn new(lanes: usize) -> Self {
        Self { session: Session::new(lanes), message: Vec::new() }
    }
}

/// A send or a notification that the peer has not answered.
pub(crate) struct Sent<C: Carrier> {
    pub(in crate::drive) transfer: Arc<Transfer<C>>,
    pub(in crate::drive) grants: Grants,
    /// The payload of a notification that the peer fetches.
    pub(in crate::drive) payload: Option<Bytes>,
}

impl<C: Carrier> Sent<C> {
    pub(in crate::drive) fn of(transfer: &Arc<Transfer<C>>) -> Self {
        Self { transfer: Arc::clone(transfer), grants: Grants::new(), payload: None }
    }

    /// The memory that the peer may still be using.
    pub(in crate::drive) fn lent(self) -> impl Iterator<Item = Loan<C>> {
        let Self { transfer, grants, mut payload } = self;
        let lent = grants.into_iter().filter_map(move |grant| grant.end(&transfer));
        // A payload has only one key.
        lent.map(move |lent| Loan { _payload: payload.take(), ..lent })
    }
}

/// A copy that the peer was asked for and has not answered.
pub(crate) struct Ask<C: Carrier> {
    pub(in crate::drive) transfer: Arc<Transfer<C>>,
    /// The work for the lanes if the peer declines.
    pub(in crate::drive) work: Work,
    pub(in crate::drive) grants: Grants,
}

impl<C: Carrier> Ask<C> {
    /// The memory that the peer may still be using.
    pub(in crate::drive) fn lent(self) -> impl Iterator<Item = Loan<C>> {
        let Self { transfer, grants, .. } = self;
        grants.into_iter().filter_map(move |grant| grant.end(&transfer))
    }

    pub(in crate::drive) fn is_of(&self, transfer: &Arc<Transfer<C>>) -> bool {
        Arc::ptr_eq(&self.transfer, transfer)
    }
}

/// An operation of a connection with several lanes: it can be posted again when its lane dies.
pub(crate) struct Piece<C: Carrier> {
    pub(crate) transfer: Arc<Transfer<C>>,
    pub(crate) work: Work,
    /// The lane on which it was posted.
    pub(crate) lane: usize,
}

impl<C: Carrier> Clone for Piece<C> {
    fn clone(&self) -> Self {
        let Self { transfer, work, lane } = self;
        Self { transfer: Arc::clone(transfer), work: work.clone(), lane: *lane }
    }
}
