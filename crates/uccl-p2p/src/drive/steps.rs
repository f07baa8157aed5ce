//! The steps of a transfer. Its operations end; then it changes a word of the peer's and sends its
//! notification, or tells the peer how a receive or a copy has ended; at last its result is
//! published, and the strong signals that wait for it are told.
//!
//! Each step may end another transfer, so they stand together. A transfer keeps its state
//! (`core/connection/transfer.rs`) and knows none of them.

mod followers;

use std::sync::{Arc, atomic::Ordering::*};

use uccl_fabric::{
    lane::{Completion, OpResult},
    signal::Word,
};
use uccl_proto::asked::CopyEnd;
use uccl_wire::message::Verdict;

use super::core::connection::{
    Connection,
    transfer::{After, Fence, Hold, Listeners, Step, Transfer},
};
use crate::error::{Error, Result};

impl Transfer {
    /// An operation (or the post itself) has ended, and with the last one all of them: takes the
    /// next step.
    pub(crate) fn op_ended(self: &Arc<Self>) {
        if self.count_ended_op() {
            self.go_on();
        }
    }

    /// Takes the next step, once no operation is left.
    fn go_on(self: &Arc<Self>) {
        let conn = &self.conn;
        let Step { after, verdict, fence } = self.take_step();
        let verdict = verdict.and_then(|()| conn.show_received(self));
        match after {
            After::Publish => {}
            After::Notify(payload) if verdict.is_ok() && fence.is_none() => {
                return self.notify(payload);
            }
            After::Signal(word, notif) if verdict.is_ok() && fence.is_none() => {
                return self.signal(word, notif);
            }
            After::Notify(_) | After::Signal(..) => {
                let fenced = fence.map_or(Ok(()), |fence| Err(self.fence_error(fence)));
                return self.publish(verdict.and(fenced));
            }
            After::Fin(seq) => conn.finish_receive(seq, verdict.as_ref().err(), fence),
            After::Answer(id) => conn.finish_copy(id, verdict.as_ref().err(), fence),
            After::Deliver { id, payload, to } => to(conn, id, verdict.is_ok().then_some(payload)),
        }
        self.publish(verdict);
    }

    /// Sends its notification after its data has landed.
    fn notify(self: &Arc<Self>, payload: Vec<u8>) {
        self.expect_ops(1);
        self.notifying.store(true, Relaxed);
        if let Err(e) = self.conn.post_notif(self, payload.into()) {
            self.note_error(e);
            self.op_ended();
        }
    }

    /// Sends its signal after its bytes are visible at the peer. Its notification, if any, follows.
    fn signal(self: &Arc<Self>, word: Word, notif: Option<Vec<u8>>) {
        self.body.lock().after = notif.map_or(After::Publish, After::Notify);
        if let Some(changed) = self.conn.try_signal(word) {
            if let Err(e) = changed {
                self.note_error(self.op_error(e));
            }
            // No operation was expected meanwhile: a change that we make ourselves does not wait
            // for the peer.
            return self.go_on();
        }
        self.expect_ops(1);
        if let Err(e) = self.conn.post_signal(self, word) {
            self.note_error(e);
            self.op_ended();
        }
    }

    /// Ends the transfer with this result, unless it has one already.
    pub(crate) fn publish(self: &Arc<Self>, verdict: Result<()>) {
        let ok = verdict.is_ok();
        let Some(Listeners { waiters, followers }) = self.set_result(verdict) else { return };
        self.conn.transfer_ended(self, ok);
        waiters.iter().for_each(|waiter| waiter.ring());
        // It does not wait for other transfers any more.
        drop(self.take_following());
        followers::tell_all(followers, !ok);
    }

    /// Ends it because its connection has ended, unless it has ended already or something holds it.
    pub(crate) fn end_with_connection(self: &Arc<Self>) {
        if !self.finished() && !self.is_held() {
            self.publish(Err(self.unanswered_error()));
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // The connection may end at the same time: either this sees its end, or its end sees no
        // hold.
        if self.count_out() && self.transfer().conn.has_ended() {
            self.transfer().end_with_connection();
        }
    }
}

impl Completion for Transfer {
    fn complete(self: Arc<Self>, result: OpResult) {
        if let Err(e) = result {
            let error = self.op_error(e);
            self.note_error(error);
        }
        self.op_ended();
    }
}

impl Connection {
    /// Tells the sender how the receive of its data has ended.
    fn finish_receive(&self, seq: u64, error: Option<&Error>, fence: Option<Fence>) {
        let verdict = match error {
            None => Verdict::Received,
            Some(Error::Truncated { capacity, .. }) => Verdict::Truncated { capacity: *capacity },
            Some(_) if fence.is_some() => Verdict::Cancelled,
            Some(_) => Verdict::Failed,
        };
        self.tell(|session, out| session.incoming.finish(seq, verdict, out));
    }

    /// Tells the peer how a copy for it has ended.
    fn finish_copy(&self, id: u64, error: Option<&Error>, fence: Option<Fence>) {
        let end = match error {
            None => CopyEnd::Copied,
            Some(_) if fence.is_some() => CopyEnd::Fenced,
            Some(e) => {
                tracing::debug!(conn = %self.id, "cannot copy for the peer: {e}");
                CopyEnd::Failed
            }
        };
        if end == CopyEnd::Copied {
            self.core.counters.copied_for_peers.fetch_add(1, Relaxed);
        }
        self.tell(|session, out| session.asked.ended(id, end, out));
    }
}
