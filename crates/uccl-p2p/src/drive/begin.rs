//! How transfers begin: at once, or when a CUDA stream has reached a mark.

use std::sync::Arc;

use super::core::connection::{
    Connection,
    deferred_transfers::{DeferredTransfer, DueTransfer, Mark, Start},
    transfer::Transfer,
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
        if !self.deferred.push(DeferredTransfer { after, transfer: Arc::clone(transfer), start }) {
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

    /// Begins a transfer that may begin. Another thread may be ending it already, but has not found
    /// it among the deferred ones.
    pub(super) fn begin_one(self: &Arc<Self>, due: DueTransfer) {
        let DueTransfer { first: DeferredTransfer { transfer, start, .. }, hold, failed } = due;
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
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use uccl_device::cuda::GpuError;

    use super::*;
    use crate::{Endpoint, Iov, NoInterrupt, Op, Request, drive::pair::JoinedPair};

    /// A stream that never reaches its mark.
    struct Never;

    impl Mark for Never {
        fn is_reached(&self) -> std::result::Result<bool, GpuError> {
            Ok(false)
        }
    }

    /// The caller has found the connection open, and another thread ends it before the transfer
    /// gets its place.
    #[test]
    fn a_transfer_that_comes_after_the_end_of_its_connection_is_refused_and_keeps_nothing() {
        let pair = JoinedPair::by_tcp();
        let mut memory = vec![7_u8; 100];
        let (ptr, len) = (memory.as_mut_ptr() as usize, memory.len());
        // SAFETY: the memory lives longer than the endpoints.
        let mr = unsafe { pair.a.register(ptr, len) }.expect("registered");
        let iovs = [Iov { mr, ptr, len }];
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        pair.a.disconnect(pair.to_b).expect("it was there");
        let request = Request::new(pair.to_b, Op::Recv, &iovs, &[]);
        let posted = pair.a.start(Arc::clone(&conn), &request, Some(Box::new(Never)));
        assert!(matches!(posted, Err(Error::Closed | Error::ConnectionLost { .. })));
        assert!(!conn.deferred.any());
        pair.a.deregister(mr).expect("nothing uses it");
        pair.close();
        assert_eq!(Arc::strong_count(&conn), 1, "a transfer keeps its connection");
    }

    /// A mark that a stream has reached when the flag is set.
    #[derive(Clone, Default)]
    struct FlagMark(Arc<AtomicBool>);

    impl Mark for FlagMark {
        fn is_reached(&self) -> std::result::Result<bool, GpuError> {
            Ok(self.0.load(SeqCst))
        }
    }

    /// Receives, each into memory of its own, on one end of a connection, and sends of numbers on
    /// the other.
    struct Receives {
        pair: JoinedPair,
        memory: Vec<Vec<u8>>,
        conn: Arc<Connection>,
    }

    impl Receives {
        fn new(count: usize) -> Self {
            let pair = JoinedPair::by_tcp();
            let conn = pair.a.core().conn(pair.to_b).expect("a connection");
            Self { pair, memory: vec![vec![0; 8]; count], conn }
        }

        fn iov(endpoint: &Endpoint, memory: &[u8]) -> Iov {
            let (ptr, len) = (memory.as_ptr() as usize, memory.len());
            // SAFETY: the memory lives longer than the endpoints.
            Iov { mr: unsafe { endpoint.register(ptr, len) }.expect("registered"), ptr, len }
        }

        /// Posts the receive of this number behind a stream, if there is one.
        fn post(&self, at: usize, after: Option<&FlagMark>) -> Arc<Transfer> {
            let iovs = [Self::iov(&self.pair.a, &self.memory[at])];
            let request = Request::new(self.pair.to_b, Op::Recv, &iovs, &[]);
            let after = after.map(|told| Box::new(told.clone()) as Box<dyn Mark>);
            self.pair.a.start(Arc::clone(&self.conn), &request, after).expect("posted")
        }

        /// Sends a number to the oldest receive, and waits until that has taken it.
        fn send(&self, number: u8) {
            let bytes = [number; 8];
            let iovs = [Self::iov(&self.pair.b, &bytes)];
            let request = Request::new(self.pair.to_a, Op::Send, &iovs, &[]);
            self.pair.b.run(&request, &mut NoInterrupt).expect("received");
        }
    }

    #[test]
    fn receives_begin_in_order_whichever_stream_comes_first() {
        let (late, soon) = (FlagMark::default(), FlagMark::default());
        let all = Receives::new(3);
        let posted = [all.post(0, Some(&late)), all.post(1, Some(&soon)), all.post(2, None)];
        soon.0.store(true, SeqCst);
        all.conn.begin_due();
        assert!(all.conn.deferred.holds_back(&Start::Recv) && all.conn.deferred.any());
        late.0.store(true, SeqCst);
        (1..=3).for_each(|number| all.send(number));
        for (transfer, memory) in posted.iter().zip(&all.memory) {
            all.pair.a.wait(transfer.id, None, &mut NoInterrupt).expect("known");
            assert!(transfer.finished(), "{memory:?}");
        }
        let seen: Vec<_> =
            all.memory.iter().map(|memory| std::hint::black_box(memory)[0]).collect();
        assert_eq!(seen, [1, 2, 3], "a later receive has the send of an earlier one");
        assert!(!all.conn.deferred.any());
        all.pair.close();
    }

    #[test]
    fn a_receive_that_was_cancelled_while_it_waited_holds_nobody_back() {
        let all = Receives::new(2);
        let first = all.post(0, Some(&FlagMark::default()));
        assert!(all.conn.deferred.holds_back(&Start::Recv));
        all.pair.a.cancel(first.id).expect("known");
        assert!(first.finished());
        assert!(!all.conn.deferred.any() && !all.conn.deferred.holds_back(&Start::Recv));
        all.post(1, None);
        all.send(7);
        assert_eq!(std::hint::black_box(&all.memory)[1], [7; 8]);
        all.pair.close();
    }
}
