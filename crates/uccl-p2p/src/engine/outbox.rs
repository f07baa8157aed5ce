//! What we send two-sidedly: sends and notifications that the peer has not answered.
//!
//! Short ones travel with their message as long as the peer's answers keep up; the peer fetches the
//! others from our memory with a key made for just that.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use smallvec::SmallVec;
use uccl_fabric::{mem::Span, region::Rights};
use uccl_wire::message::{self, MAX_NOTIF, Verdict};

use super::{
    aftermath::Lent,
    asking::Asks,
    connection::Connection,
    grants::{Grants, source_of},
    inbox::{EAGER_WINDOW, MAX_PIECES},
    notifs::MAX_WAITING,
    numbered::Numbered,
    payload,
    transfer::{Fence, Transfer},
};
use crate::{
    endpoint::NotifPayload,
    error::{Error, Result},
};

/// Longest send or notification that travels with its message.
const EAGER_MAX: usize = 32 << 10;
/// Most iovs of a send that travels with its message.
const EAGER_IOVS: usize = 1024;

/// Bytes of messages that may wait for room on a lane before sends and notifications are refused.
pub(super) const MAX_QUEUED: usize = 32 << 20;

/// Something that the peer has not answered.
struct Sent {
    transfer: Arc<Transfer>,
    eager: usize,
    pieces: usize,
    grants: Grants,
    /// What a granted notification says.
    payload: Option<Bytes>,
}

impl Sent {
    fn of(transfer: &Arc<Transfer>) -> Self {
        let transfer = Arc::clone(transfer);
        Self { transfer, eager: 0, pieces: 0, grants: Grants::new(), payload: None }
    }

    /// What the peer may be using of it.
    fn lent(self) -> impl Iterator<Item = Lent> {
        let Self { transfer, grants, mut payload, .. } = self;
        let lent = grants.into_iter().filter_map(move |grant| grant.end(&transfer));
        // A payload has one key.
        lent.map(move |lent| Lent { _payload: payload.take(), ..lent })
    }
}

/// Sends, notifications and asks that the peer has not answered.
#[derive(Default)]
pub(crate) struct Outbox {
    pub(super) asks: Asks,
    /// Bytes that travelled with their messages and are not answered.
    eager: usize,
    /// Pieces of sends that are not answered: the peer keeps a list of them until its receives come.
    pieces: usize,
    sends: Numbered<Sent>,
    notifs: Numbered<Sent>,
    pub(super) scratch: Vec<u8>,
    closed: bool,
}

impl Outbox {
    /// Forgets everything, for a connection that ends; nothing can be added any more. Gives back what the peer
    /// may be using.
    pub(crate) fn clear(&mut self) -> Vec<Lent> {
        (self.eager, self.pieces) = (0, 0);
        self.closed = true;
        let mut lent = self.asks.clear();
        lent.extend(self.sends.drain().chain(self.notifs.drain()).flat_map(Sent::lent));
        lent
    }

    /// Refuses what would only wait: on a connection that has ended, or whose peer takes nothing in.
    pub(super) fn open_to_more(&self, conn: &Connection) -> Result<()> {
        if self.closed {
            return Err(conn.lost_error());
        }
        if conn.lanes[0].queued_bytes() > MAX_QUEUED {
            return Err(Error::Full {
                what: "the connection's queue of messages in bytes",
                limit: MAX_QUEUED,
            });
        }
        Ok(())
    }

    /// Takes out what the peer has answered.
    fn answered(
        &mut self,
        queue: impl FnOnce(&mut Self) -> &mut Numbered<Sent>,
        number: u64,
    ) -> Option<Sent> {
        let sent = queue(self).remove(number)?;
        self.eager -= sent.eager;
        self.pieces -= sent.pieces;
        Some(sent)
    }

    fn admits(&self, len: usize) -> bool {
        len <= EAGER_MAX && self.eager + len <= EAGER_WINDOW
    }
}

impl Connection {
    /// Starts a send. Its transfer expects one operation to end: the peer's answer.
    pub(crate) fn post_send(&self, transfer: &Arc<Transfer>, spans: &[Span]) -> Result<()> {
        let len: usize = spans.iter().map(|span| span.len).sum();
        let readable = transfer.is_host_accessible();
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        outbox.open_to_more(self)?;
        let pieces = outbox.pieces + spans.len();
        if pieces > MAX_PIECES {
            let what = "the list of iovs of sends that no receive has met";
            return Err(Error::Full { what, limit: MAX_PIECES });
        }
        let seq = outbox.sends.next();
        transfer.seq.store(seq, Relaxed);
        let mut sent = Sent { pieces: spans.len(), ..Sent::of(transfer) };
        outbox.scratch.clear();
        if readable && outbox.admits(len) && spans.len() <= EAGER_IOVS {
            sent.eager = len;
            outbox.eager += len;
            outbox.pieces = pieces;
            let lens = spans.iter().map(|span| span.len as u32);
            message::eager_head(seq, lens, &mut outbox.scratch);
            outbox.sends.push(sent);
            let mut parts: SmallVec<[&[u8]; 8]> = SmallVec::new();
            parts.push(&outbox.scratch);
            // SAFETY: inside registered regions, which the transfer's leases keep registered.
            parts.extend(spans.iter().map(|span| unsafe { bytes_of(*span) }));
            self.send_message(&parts);
            return Ok(());
        }
        let granted = self.grant(&transfer.body.lock().leases, spans, Rights::READ);
        let (sources, grants) = granted?;
        sent.grants = grants;
        outbox.pieces = pieces;
        message::rts(seq, sources.into_iter(), &mut outbox.scratch);
        outbox.sends.push(sent);
        self.send_message(&[&outbox.scratch]);
        Ok(())
    }

    /// Sends a notification. The transfer expects one operation to end: the peer's answer.
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
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        outbox.open_to_more(self)?;
        // Also those that nobody waits for any more.
        if outbox.notifs.len() >= MAX_WAITING {
            let what = "the list of notifications that the peer has not taken in";
            return Err(Error::Full { what, limit: MAX_WAITING });
        }
        let id = outbox.notifs.next();
        transfer.seq.store(id, Relaxed);
        let mut sent = Sent::of(transfer);
        outbox.scratch.clear();
        if outbox.admits(len) {
            sent.eager = len;
            outbox.eager += len;
            message::notif_head(id, &mut outbox.scratch);
            outbox.notifs.push(sent);
            self.send_message(&[&outbox.scratch, payload.as_ref()]);
            return Ok(());
        }
        let payload = payload::kept(payload);
        let span = Span { addr: payload.as_ptr() as usize, len };
        let grant = self.grant_private(span)?;
        message::notif_rts(id, source_of(&grant.region, span), &mut outbox.scratch);
        // The grant goes before the payload that it is for.
        sent.grants.push(grant);
        sent.payload = Some(payload);
        outbox.notifs.push(sent);
        self.send_message(&[&outbox.scratch]);
        Ok(())
    }

    /// A transfer's data has landed: its notification goes out.
    pub(crate) fn notify_after(&self, transfer: &Arc<Transfer>, payload: Vec<u8>) {
        transfer.expect_ops(1);
        transfer.notifying.store(true, Relaxed);
        if let Err(e) = self.post_notif(transfer, payload.into()) {
            transfer.note_error(e);
            transfer.op_ended();
        }
    }

    /// The peer says how a send of ours ended.
    pub(crate) fn on_fin(&self, seq: u64, verdict: Verdict) -> Result<(), String> {
        let sent = self.outbox.lock().answered(|outbox| &mut outbox.sends, seq);
        let sent = sent.ok_or_else(|| format!("an end of send {seq}, which is not under way"))?;
        let Sent { transfer, grants, .. } = sent;
        // Before the transfer ends, whose memory may be deregistered then.
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
        Ok(())
    }

    /// The peer says that a notification arrived.
    pub(crate) fn on_notif_ack(&self, id: u64, ok: bool) -> Result<(), String> {
        let sent = self.outbox.lock().answered(|outbox| &mut outbox.notifs, id);
        let sent =
            sent.ok_or_else(|| format!("an ack of notification {id}, which is not under way"))?;
        if !ok {
            sent.transfer.note_error(Error::RemoteAccess {
                peer: Arc::clone(&self.peer.name),
                reason: "the peer could not take the notification".into(),
            });
        }
        sent.transfer.op_ended();
        Ok(())
    }

    /// Asks the peer to give a send back; its answer ends the transfer.
    pub(crate) fn withdraw_send(&self, transfer: &Transfer) {
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        let seq = transfer.seq.load(Relaxed);
        if outbox.sends.contains(seq) {
            outbox.scratch.clear();
            message::send_cancel(seq, &mut outbox.scratch);
            self.send_message(&[&outbox.scratch]);
        }
    }

    /// Stops waiting for a notification to be answered. The peer may have it already.
    pub(crate) fn withdraw_notif(&self, transfer: &Arc<Transfer>) {
        let fence = transfer.body.lock().fence.unwrap_or(Fence::Cancel);
        transfer.publish(Err(transfer.fence_error(fence)));
    }

    /// Tells the sender of something that was received how that went.
    pub(crate) fn send_fin(&self, seq: u64, error: Option<&Error>, fence: Option<Fence>) {
        let verdict = match error {
            None => Verdict::Received,
            Some(Error::Truncated { capacity, .. }) => Verdict::Truncated { capacity: *capacity },
            Some(_) if fence.is_some() => Verdict::Cancelled,
            Some(_) => Verdict::Failed,
        };
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        outbox.scratch.clear();
        message::fin(seq, verdict, &mut outbox.scratch);
        self.send_message(&[&outbox.scratch]);
    }

    /// Tells the sender of a notification that it arrived.
    pub(crate) fn send_notif_ack(&self, id: u64, ok: bool) {
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        outbox.scratch.clear();
        message::notif_ack(id, ok, &mut outbox.scratch);
        self.send_message(&[&outbox.scratch]);
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
    use uccl_wire::message::MAX_IOVS;

    use super::*;
    use crate::{
        Config, ConnId, Endpoint, Iov, Op, Request, Status, TransferId, Transport, Uninterrupted,
    };

    struct Joined {
        a: Endpoint,
        b: Endpoint,
        to_b: ConnId,
        to_a: ConnId,
    }

    fn joined() -> Joined {
        let end = || {
            let (bind, port) = (Some([127, 0, 0, 1].into()), Some(0));
            let config = Config { bind, port, transport: Transport::Tcp, ..Config::default() };
            Endpoint::new(config).expect("an endpoint")
        };
        let (a, b) = (end(), end());
        let to_b = a.connect(b.addr(), None, &mut Uninterrupted).expect("connected");
        let to_a = b.accept(None, &mut Uninterrupted).expect("accepted").conn;
        Joined { a, b, to_b, to_a }
    }

    fn register(ep: &Endpoint, memory: &mut [u8]) -> Iov {
        let (ptr, len) = (memory.as_mut_ptr() as usize, memory.len());
        // SAFETY: the tests keep their memory for longer than their endpoints.
        let mr = unsafe { ep.register(ptr, len) }.expect("registered");
        Iov { mr, ptr, len }
    }

    impl Joined {
        fn send(&self, iov: Iov) -> TransferId {
            self.a.post(&Request::new(self.to_b, Op::Send, &[iov], &[])).expect("posted")
        }

        fn recv(&self, iov: Iov) {
            let iovs = [iov];
            let recv = Request::new(self.to_a, Op::Recv, &iovs, &[]);
            self.b.run(&recv, &mut Uninterrupted).expect("received: the connection lives");
        }

        fn end_of(&self, send: TransferId) -> Status {
            self.a.wait(send, None, &mut Uninterrupted).expect("known")
        }
    }

    /// The peer keeps what has travelled with its message until a receive meets it. It ends a connection on which that
    /// is more than was agreed.
    #[test]
    fn what_travels_with_its_message_and_is_not_received_fits_a_window() {
        let (mut from, mut to) = (vec![7; EAGER_MAX], vec![0; EAGER_MAX]);
        let pair = joined();
        let (here, there) = (register(&pair.a, &mut from), register(&pair.b, &mut to));
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        // The last ones are to be fetched.
        let sends: Vec<_> = (0..EAGER_WINDOW / EAGER_MAX + 8).map(|_| pair.send(here)).collect();
        assert_eq!(conn.outbox.lock().eager, EAGER_WINDOW);
        for send in sends {
            pair.recv(there);
            assert!(matches!(pair.end_of(send), Status::Done(_)));
        }
        assert_eq!(conn.outbox.lock().eager, 0);
        drop(conn);
        [pair.a, pair.b].iter().for_each(|ep| ep.close().expect("closed"));
        assert!(from == to);
    }

    #[test]
    fn a_key_that_was_made_for_a_send_ends_with_it() {
        let (mut from, mut to) = (vec![7; 3 * EAGER_MAX], vec![0; 3 * EAGER_MAX]);
        let pair = joined();
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
        [&pair.a, &pair.b].iter().for_each(|ep| ep.close().expect("closed"));
        assert!(from == to);
    }

    /// The peer keeps a list of the pieces of what no receive has met, and both ends know how long that may get.
    #[test]
    fn sends_of_many_pieces_that_nobody_receives_are_refused_and_end_nothing() {
        let Joined { a, b, to_b, to_a } = joined();
        let memory = [7_u8; 8];
        let pieces_of = |ep: &Endpoint| {
            let (ptr, len) = (memory.as_ptr() as usize, 8);
            // SAFETY: the memory outlives the endpoints' use of it, which is none: the pieces are empty.
            let mr = unsafe { ep.register(ptr, len) }.expect("registered");
            vec![Iov { mr, ptr, len: 0 }; MAX_IOVS]
        };
        let (here, there) = (pieces_of(&a), pieces_of(&b));
        let send = Request::new(to_b, Op::Send, &here, &[]);
        let post = || loop {
            match a.post(&send) {
                // Until the lane has taken in what was posted before.
                Err(Error::Full { limit: MAX_QUEUED, .. }) => std::thread::yield_now(),
                other => return other,
            }
        };
        for _ in 0..MAX_PIECES / MAX_IOVS {
            post().expect("there is room");
        }
        assert!(matches!(post(), Err(Error::Full { limit: MAX_PIECES, .. })));
        // What is answered makes room.
        let recv = Request::new(to_a, Op::Recv, &there, &[]);
        b.run(&recv, &mut Uninterrupted).expect("received");
        while matches!(post(), Err(Error::Full { .. })) {
            std::thread::yield_now();
        }
        b.run(&recv, &mut Uninterrupted).expect("received: the connection lives");
    }
}
