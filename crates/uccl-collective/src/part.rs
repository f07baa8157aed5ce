//! A message under way.

use std::time::Duration;

use uccl_p2p::{ConnId, CudaStream, Op, Request, Status, TransferHandle};

use crate::{
    error::Result,
    memory::CallRegions,
    plan::{Direction, Message},
    shared::GroupCore,
};

/// Options of a call.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallOptions {
    /// How long its messages may take; `None` takes the endpoint's time, zero is no limit.
    pub timeout: Option<Duration>,
    /// It begins after the work that is on this stream.
    pub after: Option<CudaStream>,
}

/// A message under way.
pub(crate) struct Part {
    pub(crate) peer: usize,
    /// The length of a receive.
    pub(crate) expected: Option<u64>,
    pub(crate) handle: TransferHandle,
    pub(crate) is_done: bool,
}

impl Part {
    /// Posts a message over a connection.
    pub(crate) fn post(
        (shared, regions): (&GroupCore, &CallRegions),
        conn: ConnId,
        message: &Message,
        options: CallOptions,
    ) -> Result<Self> {
        let Message { direction, peer, piece } = *message;
        let iovs = [regions.iov(piece)?];
        let (op, expected) = match direction {
            Direction::Send => (Op::Send, None),
            Direction::Recv => (Op::Recv, Some(piece.len as u64)),
        };
        let CallOptions { timeout, after } = options;
        let request = Request { timeout, after, ..Request::new(conn, op, &iovs, &[]) };
        let posted = shared.endpoint.post_held(&request);
        let handle = posted.map_err(|e| shared.failure(peer, e))?;
        Ok(Self { peer, expected, handle, is_done: false })
    }

    /// Whether all bytes of a receive have come; without progress.
    pub(crate) fn has_come(&self) -> bool {
        let is_whole = |bytes| self.expected == Some(bytes);
        self.is_done
            || matches!(self.handle.status(), Ok(Status::Done(outcome)) if is_whole(outcome.bytes))
    }
}
