//! Ending transfers early: when their time is up, or when somebody asks.

use std::{
    sync::{Arc, atomic::Ordering::Acquire},
    time::{Duration, Instant},
};

use super::{
    connection::Connection,
    core::Core,
    transfer::{Fence, Transfer},
};
use crate::error::Error;

/// A transfer is fenced this long before its deadline (or a tenth of its time, if that is less), so
/// that it has ended by then.
const FENCE_GRACE: Duration = Duration::from_millis(250);

impl Core {
    /// Fences transfers whose deadline is near, and carries on with fences that are under way.
    pub(crate) fn enforce_deadlines(&self) {
        let now = Instant::now();
        let due = self.transfers.unfinished(|transfer| {
            transfer.fencing.load(Acquire) || fence_at(transfer).is_some_and(|at| at <= now)
        });
        due.iter().for_each(|transfer| enforce(transfer, now));
    }
}

/// When a transfer must begin to end, so that it has ended by its deadline.
pub(crate) fn fence_at(transfer: &Transfer) -> Option<Instant> {
    Some(transfer.deadline()? - FENCE_GRACE.min(transfer.timeout? / 10))
}

/// When a peer that does not let a transfer end is given up: at the deadline, if it has had time to
/// answer, which a busy machine may need.
fn give_up_at(transfer: &Transfer) -> Option<Instant> {
    let fenced_at = transfer.body.lock().fenced_at?;
    Some(transfer.deadline()?.max(fenced_at + FENCE_GRACE))
}

/// Ends a transfer if its time is up. A peer that does not let it end in time is given up: with its
/// connection gone nothing of the transfer moves either.
pub(crate) fn enforce(transfer: &Arc<Transfer>, now: Instant) {
    if transfer.finished() {
        return;
    }
    let due = fence_at(transfer).is_some_and(|at| at <= now);
    if due || transfer.fencing.load(Acquire) {
        transfer.conn.fence(transfer, Fence::Deadline);
    }
    if !transfer.finished() && give_up_at(transfer).is_some_and(|at| at <= now) {
        give_up_peer(transfer, "it did not let a transfer end by its deadline");
    }
}

/// The peer does not answer a fence: the connection is cut.
pub(crate) fn give_up_peer(transfer: &Transfer, reason: &str) {
    give_up(&transfer.conn, reason);
}

/// The peer does not let something end: the connection is cut.
pub(crate) fn give_up(conn: &Arc<Connection>, reason: &str) {
    conn.fail(Error::ConnectionLost {
        peer: Arc::clone(&conn.peer.name),
        reason: reason.to_owned(),
    });
}
