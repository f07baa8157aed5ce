//! The messages of a call are posted.

use std::sync::Arc;

use uccl_p2p::{Op, Request};

use super::{CallOptions, Group};
use crate::{
    error::{Error, Result},
    memory::{Buffer, CallRegions},
    plan::{Direction, Message},
    work::{Part, Work},
};

/// A call's kind and options.
#[derive(Clone, Copy)]
pub(super) struct Call {
    /// Whether the other ranks depend on it.
    pub(super) is_collective: bool,
    pub(super) options: CallOptions,
}

impl Group {
    pub(super) fn post(
        &self,
        buffers: Vec<Buffer>,
        messages: &[Message],
        call: Call,
    ) -> Result<Arc<Work>> {
        self.check_open()?;
        let lens: Vec<_> = buffers.iter().map(|buffer| (buffer.ptr(), buffer.len())).collect();
        let regions = CallRegions::of(&self.shared.endpoint, &self.registry, buffers)?;
        let posting = self.posting.lock();
        let (mut parts, mut failed) = (Vec::with_capacity(messages.len()), None);
        for message in messages {
            let (peer, buffer) = (message.peer, message.piece.buffer);
            if self.needs_registration && !self.is_local(peer) && !regions.is_registered(buffer) {
                let (ptr, len) = lens[buffer];
                failed = Some(Error::NotRegistered { rank: peer, ptr, len });
                break;
            }
            match self.post_one(message, &regions, call.options) {
                Ok(part) => parts.push(part),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        drop(posting);
        let shared = Arc::clone(&self.shared);
        let id = self.ledger.next();
        let work = Arc::new(Work::new(id, shared, call.is_collective, (parts, regions)));
        if let Some(error) = failed {
            return Err(work.fail(error));
        }
        self.ledger.add(&work);
        Ok(work)
    }

    fn post_one(
        &self,
        message: &Message,
        regions: &CallRegions,
        options: CallOptions,
    ) -> Result<Part> {
        let Message { direction, peer, piece } = *message;
        let iovs = [regions.iov(piece)?];
        let (op, expected) = match direction {
            Direction::Send => (Op::Send, None),
            Direction::Recv => (Op::Recv, Some(piece.len as u64)),
        };
        let conn = self.shared.conn(peer)?;
        let CallOptions { timeout, after } = options;
        let request = Request { timeout, after, ..Request::new(conn, op, &iovs, &[]) };
        let posted = self.shared.endpoint.post_held(&request);
        let handle = posted.map_err(|e| self.shared.failure(peer, e))?;
        Ok(Part { peer, expected, handle, is_done: false })
    }
}
