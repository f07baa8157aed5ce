//! The peer's answers to our sends, notifications, signals and asks: they end operations of
//! transfers.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use uccl_fabric::lane::{Completion as _, OpError};
use uccl_wire::{
    frame::Status,
    message::{Answer, Verdict},
};

use super::core::connection::{
    Connection,
    talk::{Ask, PendingMessage},
    transfer::{Fence, Transfer},
};
use crate::error::Error;

impl Connection {
    /// Handles the peer's answer to a send.
    pub(super) fn send_ended(&self, sent: PendingMessage, verdict: Verdict) {
        let PendingMessage { transfer, grants, .. } = sent;
        // Before the transfer ends, because its memory may be deregistered then.
        drop(grants);
        let bytes = transfer.bytes.load(Relaxed);
        match verdict {
            Verdict::Received => {}
            Verdict::Truncated { capacity } => {
                transfer.note_error(Error::Truncated { sent: bytes, capacity });
            }
            Verdict::Cancelled => {
                let fence = transfer.body.lock().fence.unwrap_or(Fence::PeerCancel);
                transfer.note_error(transfer.fence_error(fence));
            }
            Verdict::Failed => transfer.note_error(Error::RemoteAccess {
                peer: Arc::clone(&self.peer.name),
                reason: "the receiver could not take the data".into(),
            }),
        }
        transfer.op_ended();
    }

    /// Handles the peer's answer to a notification.
    pub(super) fn notif_ended(&self, sent: PendingMessage, is_delivered: bool) {
        if !is_delivered {
            sent.transfer.note_error(Error::RemoteAccess {
                peer: Arc::clone(&self.peer.name),
                reason: "the peer could not take the notification".into(),
            });
        }
        sent.transfer.op_ended();
    }

    /// Handles the peer's answer to a signal.
    pub(super) fn signal_ended(&self, transfer: &Arc<Transfer>, status: Status) {
        if status != Status::Ok {
            transfer.note_error(transfer.op_error(OpError::Remote(status)));
        }
        transfer.op_ended();
    }

    /// Handles the peer's answer to an ask: the peer is done with it.
    pub(super) fn ask_ended(self: &Arc<Self>, ask: Ask, answer: Answer) {
        let Ask { transfer, work, grants } = ask;
        drop(grants);
        let fence = transfer.body.lock().fence;
        match answer {
            Answer::Copied => transfer.complete(Ok(())),
            Answer::Refused(status) => transfer.complete(Err(OpError::Remote(status))),
            Answer::Declined if fence.is_none() => {
                let route = self.choose_lanes(&work);
                self.post(&transfer, work, route);
                transfer.op_ended();
                self.kick_if_busy();
            }
            Answer::Cancelled | Answer::Declined => {
                transfer.note_error(transfer.fence_error(fence.unwrap_or(Fence::PeerCancel)));
                transfer.op_ended();
            }
        }
    }
}
