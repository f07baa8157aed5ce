//! Short pieces over a stream for callers that wait for them: mostly the peer's answer is there
//! before a transfer could be made.

use std::sync::Arc;

use super::{Endpoint, PostedPiece, Single, StartOutcome};
use crate::{
    drive::{
        core::connection::{talk::Piece, transfer::Transfer},
        work::Work,
    },
    error::Result,
};

/// Bytes. A longer piece takes longer than the looks.
pub(super) const MOST_BYTES: usize = 32 << 10;
/// How often a call looks at the stream before it makes a transfer of the operation. An answer over
/// loopback takes about as many looks, each of which is a system call, as half of this. A caller
/// that looked for much longer would keep a processor from the peer's thread.
const LOOKS: u32 = 48;

impl Endpoint {
    /// Posts one short piece on a stream, and looks at it for a moment. If it has not succeeded by
    /// then, it becomes a transfer. `None`: it has to become one right away.
    pub(super) fn stream_now(&self, single: &Single, work: Work) -> Result<Option<StartOutcome>> {
        let conn = &single.conn;
        // Before the post: a worker that sees no claim consumes the answer.
        let _claim = conn.claim();
        let place = conn.least_loaded();
        let lane = &conn.lanes.all[place];
        // SAFETY: `post_now` keeps the memory.
        let posted = self.post_now(single, work.clone(), |op| unsafe { lane.post(op) });
        let PostedPiece { now, name, room } = match posted? {
            Ok(under_way) => under_way,
            Err(over) => return Ok(over),
        };
        (0..LOOKS).take_while(|_| !now.has_ended()).for_each(|_| {
            conn.progress_lane(place);
        });
        if let Some(Ok(())) = now.result() {
            let checksummed = conn.lanes.all[0].caps().checksum;
            return Ok(Some(StartOutcome::Done(self.done_now(single, checksummed))));
        }
        // The peer's thread may be waiting for this processor.
        std::thread::yield_now();
        let successor = |transfer: &Arc<Transfer>| {
            transfer.note_checksum(conn.lanes.all[0].caps().checksum);
            match conn.lanes.all.len() {
                1 => Arc::clone(transfer) as _,
                // If its lane is lost, another one takes over.
                _ => Arc::new(Piece { transfer: Arc::clone(transfer), work, lane: place }) as _,
            }
        };
        self.outlast(single, room, (place as u16, name), &now, successor).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use uccl_fabric::lane::{OpError, OpResult};
    use uccl_wire::{advert::Advert, frame::Status};

    use super::*;
    use crate::{
        ConnId, Error, Iov, NoInterrupt, Op, Outcome, Request,
        drive::{
            fake_stream::{FakeStream, INSTANCE},
            pair::on_loopback,
        },
    };

    /// An endpoint with a connection that ends its first operation at this look.
    fn answering(look: u32, result: OpResult) -> (Endpoint, Arc<FakeStream>, ConnId) {
        let endpoint = Endpoint::new(on_loopback()).expect("an endpoint");
        let (lane, conn) = FakeStream::connect(&endpoint, look, result);
        (endpoint, lane, conn)
    }

    fn write(endpoint: &Endpoint, conn: ConnId, memory: &[u8]) -> Result<Outcome> {
        let (ptr, len) = (memory.as_ptr() as usize, memory.len());
        // SAFETY: nothing touches it: the stream moves nothing.
        let mr = unsafe { endpoint.register(ptr, len) }.expect("registered");
        let iovs = [Iov { mr, ptr, len }];
        let adverts = [Advert { instance: INSTANCE, addr: 4096, len: len as u64, key: 7, slot: 3 }];
        let ran = endpoint.run(&Request::new(conn, Op::Write, &iovs, &adverts), &mut NoInterrupt);
        endpoint.deregister(mr).expect("nothing uses it any more");
        ran
    }

    /// How many transfers an endpoint has listed so far.
    fn listed(endpoint: &Endpoint) -> u32 {
        endpoint.core().transfers.listed()
    }

    #[test]
    fn a_piece_that_is_answered_soon_is_no_transfer() {
        for (look, transfers) in [(1, 0), (LOOKS, 0), (LOOKS + 1, 1), (10 * LOOKS, 1)] {
            let (endpoint, lane, conn) = answering(look, Ok(()));
            let outcome = write(&endpoint, conn, &[7; 64]).expect("it was answered");
            assert_eq!((outcome.bytes, outcome.checksummed), (64, true), "look {look}");
            assert_eq!(listed(&endpoint), transfers, "look {look}");
            assert_eq!(lane.posts.load(SeqCst), 1, "look {look}: a piece is posted once");
            let stats = endpoint.stats().expect("open");
            let counts = (stats.transfers_posted, stats.transfers_done, stats.bytes_sent);
            assert_eq!(counts, (1, 1, 64), "look {look}");
        }
    }

    #[test]
    fn a_long_piece_is_a_transfer_at_once() {
        let (endpoint, lane, conn) = answering(1, Ok(()));
        write(&endpoint, conn, &vec![7; MOST_BYTES + 1]).expect("it was answered");
        assert_eq!((listed(&endpoint), lane.posts.load(SeqCst)), (1, 1));
    }

    #[test]
    fn a_piece_that_is_refused_is_not_posted_again() {
        for look in [1, 2 * LOOKS] {
            let (endpoint, lane, conn) = answering(look, Err(OpError::Remote(Status::UnknownKey)));
            let refused = write(&endpoint, conn, &[7; 64]);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{refused:?}");
            assert_eq!(lane.posts.load(SeqCst), 1, "look {look}");
            assert_eq!(endpoint.stats().expect("open").transfers_failed, 1, "look {look}");
        }
    }
}
