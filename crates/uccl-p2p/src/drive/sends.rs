//! Our sends and notifications: how they begin, and how the peer's answers end them.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use smallvec::SmallVec;
use uccl_fabric::{guarded, lane::OpError, mem::Span, region::Rights};
use uccl_proto::outgoing::SendProtocol;
use uccl_wire::message::MAX_NOTIF;

use super::{
    core::connection::{
        Connection,
        loans::source_of,
        talk::{PendingMessage, Talk},
        transfer::Transfer,
    },
    payload,
};
use crate::{
    error::{Error, Result},
    types::NotifPayload,
};

impl Connection {
    /// Starts a send. Its transfer has one operation more, which the peer's answer ends.
    pub(crate) fn post_send(&self, transfer: &Arc<Transfer>, spans: &[Span]) -> Result<()> {
        let len: usize = spans.iter().map(|span| span.len).sum();
        let is_readable = transfer.is_host_accessible();
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        self.check_open(session)?;
        message.clear();
        let outgoing = &mut session.outgoing;
        let seq = match outgoing.admit_send(len, spans.len(), is_readable)? {
            SendProtocol::Eager => {
                // SAFETY: inside registered regions, which the transfer's leases keep registered.
                // The caller may have unmapped them.
                if !spans.iter().all(|span| unsafe { guarded::is_readable(*span) }) {
                    return Err(transfer.op_error(OpError::LocalFault));
                }
                let lens = spans.iter().map(|span| span.len as u32);
                let seq = outgoing.eager_send(lens, PendingMessage::of(transfer), message);
                let mut parts: SmallVec<[&[u8]; 8]> = SmallVec::new();
                parts.push(message);
                // SAFETY: as above, and they are mapped.
                parts.extend(spans.iter().map(|span| unsafe { bytes_of(*span) }));
                self.send_message(&parts);
                seq
            }
            SendProtocol::Rendezvous => {
                let granted = self.grant(&transfer.body.lock().leases, spans, Rights::READ);
                let (sources, grants) = granted?;
                let sent = PendingMessage { grants, ..PendingMessage::of(transfer) };
                let seq = outgoing.rendezvous_send(sources.into_iter(), sent, message);
                self.send_message(&[message]);
                seq
            }
        };
        // Still under the session's lock: a cancel takes it before it reads the number.
        transfer.seq.store(seq, Relaxed);
        Ok(())
    }

    /// Sends a notification. The transfer has one operation more, which the peer's answer ends.
    pub(crate) fn post_notif(
        &self,
        transfer: &Arc<Transfer>,
        payload: NotifPayload<'_>,
    ) -> Result<()> {
        let len = payload.as_ref().len();
        if len as u64 > MAX_NOTIF {
            return Err(Error::Invalid(format!(
                "a notification of {len} bytes is longer than {MAX_NOTIF}"
            )));
        }
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        self.check_open(session)?;
        message.clear();
        match session.outgoing.admit_notif(len)? {
            SendProtocol::Eager => {
                session.outgoing.eager_notif(len, PendingMessage::of(transfer), message);
                self.send_message(&[message, payload.as_ref()]);
            }
            SendProtocol::Rendezvous => {
                let payload = payload::kept(payload);
                let span = Span { addr: payload.as_ptr() as usize, len };
                let grant = self.grant_private(span)?;
                let source = source_of(&grant.region, span);
                // When this is dropped, the grant is dropped before the payload that it is for.
                let mut sent = PendingMessage::of(transfer);
                sent.grants.push(grant);
                sent.payload = Some(payload);
                session.outgoing.rendezvous_notif(source, sent, message);
                self.send_message(&[message]);
            }
        }
        Ok(())
    }

    /// Asks the peer to give up a send, unless it has been asked, or the send has not begun. Its
    /// answer ends the transfer.
    pub(crate) fn withdraw_send(&self, transfer: &Transfer) {
        self.tell(|session, out| session.outgoing.cancel_send(transfer.seq.load(Relaxed), out));
    }
}

/// The bytes of registered memory.
///
/// # Safety
/// The span must be readable for as long as the slice is used.
unsafe fn bytes_of<'a>(span: Span) -> &'a [u8] {
    if span.len == 0 {
        return &[];
    }
    // SAFETY: readable, as the caller promises.
    unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.len) }
}

#[cfg(test)]
mod tests {
    use uccl_device::cuda::GpuError;
    use uccl_proto::limits::{EAGER_MAX, EAGER_WINDOW, MAX_PIECES};
    use uccl_wire::message::MAX_IOVS;

    use super::*;
    use crate::{
        Endpoint, Iov, NoInterrupt, Op, Request, Status, TransferId,
        drive::{
            core::connection::{
                deferred_transfers::{DueTransfer, Mark},
                transfer::Fence,
            },
            pair::{JoinedPair, post_behind},
            session::MAX_QUEUED,
        },
    };

    fn register(ep: &Endpoint, memory: &mut [u8]) -> Iov {
        let (ptr, len) = (memory.as_mut_ptr() as usize, memory.len());
        // SAFETY: the tests keep their memory for longer than their endpoints.
        let mr = unsafe { ep.register(ptr, len) }.expect("registered");
        Iov { mr, ptr, len }
    }

    impl JoinedPair {
        fn send(&self, iov: Iov) -> TransferId {
            self.a.post(&Request::new(self.to_b, Op::Send, &[iov], &[])).expect("posted")
        }

        fn recv(&self, iov: Iov) {
            let iovs = [iov];
            let recv = Request::new(self.to_a, Op::Recv, &iovs, &[]);
            self.b.run(&recv, &mut NoInterrupt).expect("received: the connection lives");
        }

        fn end_of(&self, send: TransferId) -> Status {
            self.a.wait(send, None, &mut NoInterrupt).expect("known")
        }
    }

    /// The peer keeps data that came with its message until a receive takes it. It ends the
    /// connection if there is more of that than was agreed.
    #[test]
    fn data_that_came_with_messages_and_are_not_received_fit_a_window() {
        let (mut from, mut to) = (vec![7; EAGER_MAX], vec![0; EAGER_MAX]);
        let pair = JoinedPair::by_tcp();
        let (here, there) = (register(&pair.a, &mut from), register(&pair.b, &mut to));
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        // The peer has to fetch the last ones.
        let sends: Vec<_> = (0..EAGER_WINDOW / EAGER_MAX + 8).map(|_| pair.send(here)).collect();
        assert_eq!(conn.talk.lock().session.outgoing.eager_bytes(), EAGER_WINDOW);
        for send in sends {
            pair.recv(there);
            assert!(matches!(pair.end_of(send), Status::Done(_)));
        }
        assert_eq!(conn.talk.lock().session.outgoing.eager_bytes(), 0);
        drop(conn);
        pair.close();
        assert!(from == to);
    }

    #[test]
    fn a_key_that_was_made_for_a_send_ends_with_it() {
        let (mut from, mut to) = (vec![7; 3 * EAGER_MAX], vec![0; 3 * EAGER_MAX]);
        let pair = JoinedPair::by_tcp();
        let (here, there) = (register(&pair.a, &mut from), register(&pair.b, &mut to));
        let table = &pair.a.core().mrs.table;
        let send = pair.send(here);
        assert_eq!(table.len(), 2, "the region's key, and the send's");
        pair.recv(there);
        assert!(matches!(pair.end_of(send), Status::Done(_)));
        assert_eq!(table.len(), 1, "it was received");
        let send = pair.send(here);
        let ended = pair.a.cancel(send).expect("known");
        assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{ended:?}");
        assert_eq!(table.len(), 1, "it was called off");
        pair.close();
        assert!(from == to);
    }

    /// A stream that has reached its mark.
    struct ReachedMark;

    impl Mark for ReachedMark {
        fn is_reached(&self) -> std::result::Result<bool, GpuError> {
            Ok(true)
        }
    }

    /// The thread that begins the send has already taken it out of the waiting ones when the caller
    /// cancels it: the first look of the cancel finds nothing to withdraw.
    #[test]
    fn a_send_that_begins_while_it_is_cancelled_ends() {
        let pair = JoinedPair::by_tcp();
        let mut from = vec![7; 100];
        let iovs = [register(&pair.a, &mut from)];
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        let nobody_else = conn.deferred.beginning.lock();
        let request = Request::new(pair.to_b, Op::Send, &iovs, &[]);
        let send = post_behind(&pair.a, &request, Some(Box::new(ReachedMark))).expect("posted").id;
        let due = conn.deferred.take_due();
        let [DueTransfer { first, .. }] = &due[..] else { panic!("{} may begin", due.len()) };
        conn.fence(&first.transfer, Fence::Cancel);
        due.into_iter().for_each(|due| conn.begin_one(due));
        drop(nobody_else);
        let ended = pair.a.cancel(send).expect("known");
        assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{ended:?}");
        pair.a.check_connection(pair.to_b).expect("the connection lives");
        drop(conn);
        pair.close();
    }

    /// The peer keeps a list of the pieces of sends that no receive has met. Both ends know how
    /// long it may get.
    #[test]
    fn sends_of_many_pieces_that_nobody_receives_are_refused_and_end_nothing() {
        let JoinedPair { a, b, to_b, to_a } = JoinedPair::by_tcp();
        let memory = [7_u8; 8];
        let pieces_of = |ep: &Endpoint| {
            let (ptr, len) = (memory.as_ptr() as usize, 8);
            // SAFETY: the memory outlives the endpoints' use of it, which is none: the pieces are
            // empty.
            let mr = unsafe { ep.register(ptr, len) }.expect("registered");
            vec![Iov { mr, ptr, len: 0 }; MAX_IOVS]
        };
        let (here, there) = (pieces_of(&a), pieces_of(&b));
        let send = Request::new(to_b, Op::Send, &here, &[]);
        let post = || loop {
            match a.post(&send) {
                // The lane has to send earlier messages first.
                Err(Error::Full { limit: MAX_QUEUED, .. }) => std::thread::yield_now(),
                other => return other,
            }
        };
        for _ in 0..MAX_PIECES / MAX_IOVS {
            post().expect("there is room");
        }
        assert!(matches!(post(), Err(Error::Full { limit: MAX_PIECES, .. })));
        // An answered send makes room.
        let recv = Request::new(to_a, Op::Recv, &there, &[]);
        b.run(&recv, &mut NoInterrupt).expect("received");
        while matches!(post(), Err(Error::Full { .. })) {
            std::thread::yield_now();
        }
        b.run(&recv, &mut NoInterrupt).expect("received: the connection lives");
    }
}
