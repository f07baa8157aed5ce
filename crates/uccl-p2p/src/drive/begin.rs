//! How transfers begin: at once, or when a CUDA stream has reached a mark.

use std::sync::Arc;

use super::{
    connection::{Connection, Transfer},
    deferred::{Due, Mark, Start, Waiting},
    transfer::Carrier as _,
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
        if !self.deferred.push(Waiting { after, transfer: Arc::clone(transfer), start }) {
            return Err(self.lost_error());
        }
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

#[cfg(test)]
mod tests {
    use uccl_device::cuda::GpuError;

    use super::*;
    use crate::{Iov, Op, Request, drive::joined::Joined};

    /// A stream that never comes so far.
    struct Never;

    impl Mark for Never {
        fn is_reached(&self) -> std::result::Result<bool, GpuError> {
            Ok(false)
        }
    }

    /// The caller has found the connection open, and another thread ends it before the transfer gets its place.
    #[test]
    fn a_transfer_that_comes_after_the_end_of_its_connection_is_refused_and_keeps_nothing() {
        let pair = Joined::by_tcp();
        let mut memory = vec![7_u8; 100];
        let (ptr, len) = (memory.as_mut_ptr() as usize, memory.len());
        // SAFETY: the memory lives longer than the endpoints.
        let mr = unsafe { pair.a.register(ptr, len) }.expect("registered");
        let iovs = [Iov { mr, ptr, len }];
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        pair.a.disconnect(pair.to_b).expect("it was there");
        let request = Request::new(pair.to_b, Op::Recv, &iovs, &[]);
        let posted = pair.a.start_over(Arc::clone(&conn), &request, Some(Box::new(Never)));
        assert!(matches!(posted, Err(Error::Closed | Error::ConnectionLost { .. })));
        assert!(!conn.deferred.any());
        pair.a.deregister(mr).expect("nothing uses it");
        pair.close();
        assert_eq!(Arc::strong_count(&conn), 1, "a transfer keeps its connection");
    }
}
