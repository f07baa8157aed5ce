//! Ending transfers early: when their time is up, or when the caller or the peer asks for it.

use std::{
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed},
    },
    time::Instant,
};

use super::{
    core::{
        Core,
        connection::transfer::{Fence, Transfer},
    },
    timers,
};

impl Core {
    /// Fences transfers close to their deadline, and goes on with fences that are under way.
    pub(crate) fn enforce_deadlines(&self) {
        let now = Instant::now();
        let due = self.transfers.unfinished(|transfer| {
            transfer.fencing.load(Acquire) || transfer.fence_at().is_some_and(|at| at <= now)
        });
        due.iter().for_each(|transfer| enforce(transfer, now));
    }
}

impl Transfer {
    /// Whether the peer still has to do something before it can end. Otherwise only work of this
    /// process is left: copies, or publishing how it has ended.
    pub(crate) fn waits_for_peer(self: &Arc<Self>) -> bool {
        // In this order: they are cleared when none is left.
        let ops = self.body.lock().ops.clone();
        if self.ops_left() == 0 {
            return false;
        }
        let by_us = !ops.is_empty() && !self.notifying.load(Relaxed);
        !(by_us && self.conn.lanes.is_ours(&ops) && !self.conn.is_asking_for(self))
    }
}

/// Fences a transfer close to its deadline. A peer that does not let it end in time is given up:
/// once its connection is gone, no byte of the transfer moves. If only this process still copies,
/// the transfer ends by itself and nobody is given up.
pub(crate) fn enforce(transfer: &Arc<Transfer>, now: Instant) {
    if transfer.finished() {
        return;
    }
    let due = transfer.fence_at().is_some_and(|at| at <= now);
    if due || transfer.fencing.load(Acquire) {
        let by_peer = transfer.waits_for_peer();
        let why = if by_peer { Fence::Deadline } else { Fence::OwnDeadline };
        transfer.conn.fence(transfer, why);
    }
    transfer.let_streams_go(timers::TO_HOLD_STREAMS);
    let is_late = transfer.give_up_at().is_some_and(|at| at <= now);
    if is_late && !transfer.finished() && transfer.waits_for_peer() {
        let reason = "it did not let a transfer end that was called off";
        transfer.conn.fail(transfer.conn.lost_to(reason));
    }
}
