//! How transfers begin: at once, or when a CUDA stream has reached a mark.

use std::sync::Arc;

use super::{
    connection::{Connection, Transfer},
    deferred::{Due, Mark, Start, Waiting},
};
use crate::error::{Error, Result};

impl Connection {
    /// Begins a transfer, now or when the mark is reached.
    pub(crate) fn begin(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        start: Start,
        after: Option<Box<dyn Mark>>,
    ) -> Result<()> {
        if after.is_none() && !self.deferred.holds_back(&start) {
            return self.begin_now(transfer, start);
        }
        transfer.expect_ops(1);
        self.deferred.push(Waiting { after, transfer: Arc::clone(transfer), start });
        self.begin_due();
        Ok(())
    }

    fn begin_now(self: &Arc<Self>, transfer: &Arc<Transfer>, start: Start) -> Result<()> {
        match start {
            Start::OneSided(op, pieces) => {
                self.post_ops(transfer, op, pieces.local, pieces.remote);
                self.call_help();
                Ok(())
            }
            Start::Send(spans) => {
                transfer.expect_ops(1);
                self.post_send(transfer, &spans)
            }
            Start::Recv => {
                transfer.expect_ops(1);
                self.post_recv(transfer)
            }
        }
    }

    /// Begins transfers that need not wait any longer; returns whether there were any.
    pub(crate) fn begin_due(self: &Arc<Self>) -> bool {
        if !self.deferred.any() {
            return false;
        }
        let Some(_beginning) = self.deferred.beginning.try_lock() else { return false };
        let due = self.deferred.take_due();
        let any = !due.is_empty();
        due.into_iter().for_each(|due| self.begin_one(due));
        any
    }

    /// Begins a transfer that may begin. Somebody may be ending it already, but has not found it where it waited.
    pub(super) fn begin_one(self: &Arc<Self>, due: Due<Self>) {
        let Due { first: Waiting { transfer, start, .. }, hold, failed } = due;
        let order = start.order();
        let begun = match failed {
            Some(e) => {
                let reason = format!("the stream that it waited for failed: {e}");
                Err(Error::Gpu { peer: Arc::clone(&self.peer.name), reason })
            }
            None => self.begin_now(&transfer, start),
        };
        if let Err(e) = begun {
            transfer.note_error(e.clone());
            transfer.publish(Err(e));
        }
        transfer.op_ended();
        drop(hold);
        self.deferred.ended(order);
    }

    /// Ends a transfer that has not begun; false if it has begun.
    pub(crate) fn withdraw_deferred(&self, transfer: &Arc<Transfer>, error: Error) -> bool {
        let is_there = self.deferred.remove(transfer);
        if is_there {
            transfer.note_error(error);
            transfer.op_ended();
        }
        is_there
    }
}
