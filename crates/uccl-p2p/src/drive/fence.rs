//! Ends of transfers before their time.

use std::{
    sync::{Arc, atomic::Ordering::*},
    time::Instant,
};

use super::core::connection::{
    Connection,
    transfer::{Fence, Kind, Transfer},
};

impl Connection {
    /// Starts to end a transfer early, as far as that is possible now; may be called again until it
    /// has ended.
    pub(crate) fn fence(self: &Arc<Self>, transfer: &Arc<Transfer>, why: Fence) {
        let (why, ops) = {
            let mut body = transfer.body.lock();
            // The first reason stands: a worker may come by here with another while the first
            // caller is still at it.
            let why = *body.fence.get_or_insert(why);
            body.fenced_at.get_or_insert_with(Instant::now);
            (why, body.ops.clone())
        };
        transfer.fencing.store(true, Release);
        for (lane, op) in ops {
            let lane = usize::from(lane);
            // The operations of a lost lane end with the lane.
            if !self.lanes.lost.has(lane) {
                self.lanes.all[lane].cancel(op);
            }
        }
        self.kick_if_busy();
        if transfer.finished() || self.withdraw_deferred(transfer, transfer.fence_error(why)) {
            return;
        }
        transfer.stop_following();
        self.withdraw_asks(transfer);
        match transfer.kind {
            _ if transfer.notifying.load(Relaxed) => self.withdraw_notif(transfer),
            Kind::Recv => self.withdraw_recv(transfer),
            Kind::Send => self.withdraw_send(transfer),
            Kind::Notif => self.withdraw_notif(transfer),
            // No memory is touched for it: it need not wait for the peer's answer.
            Kind::LookUp => transfer.publish(Err(transfer.fence_error(why))),
            _ => {}
        }
    }

    /// Stops waiting for the answer to a notification. The peer may have received it already.
    fn withdraw_notif(&self, transfer: &Arc<Transfer>) {
        let fence = transfer.body.lock().fence.unwrap_or(Fence::Cancel);
        transfer.publish(Err(transfer.fence_error(fence)));
    }
}
