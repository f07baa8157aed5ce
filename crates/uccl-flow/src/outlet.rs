//! The state of a sending flow, which its user and the thread that keeps own streams alive share.

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use uccl_wire::flow::HEAD_LEN;

use crate::{
    counters::Traffic,
    error::{Backlog, FlowError, Peer},
    own_stream::OwnStream,
    ring::RingSender,
    slots::{Order, Slots},
    socket::Span,
};

/// The name of a flow, and the address at which it was first taken.
#[derive(Clone, Copy)]
pub(crate) struct FlowName {
    pub(crate) flow: u64,
    pub(crate) to: SocketAddr,
}

/// The state of a sending flow. The thread that keeps own streams alive shares it.
pub(crate) struct SendState {
    pub(crate) own: OwnStream,
    /// The other way of small messages, to a process of the same host.
    ring: Option<RingSender>,
    /// Bytes that the receiver had taken out of the ring when that ended.
    taken: u64,
    pub(crate) slots: Slots<Message>,
    /// Messages of which bytes are left to be sent.
    pub(crate) queue: Order,
    /// The number of the next message.
    pub(crate) next: u64,
    pub(crate) failure: Option<FlowError>,
    pub(crate) traffic: Traffic,
}

pub(crate) struct Message {
    pub(crate) head: [u8; HEAD_LEN],
    pub(crate) payload: Span,
    /// Bytes of head and payload that have been sent over the own stream or by the ring.
    pub(crate) sent: usize,
    /// It goes by the ring.
    pub(crate) is_local: bool,
    /// The streams of the bundle carry it.
    pub(crate) is_large: bool,
}

// SAFETY: the spans are the caller's memory, which it leaves to the flow until a message has ended,
// on any thread.
unsafe impl Send for SendState {}

impl Message {
    pub(crate) fn is_sent(&self) -> bool {
        self.sent == HEAD_LEN + self.payload.len
    }
}

impl SendState {
    /// The state of a new flow. Its ring, if it has one, is named over its stream.
    pub(crate) fn new(stream: TcpStream, small_max: usize, ring: Option<RingSender>) -> Self {
        let mut own = OwnStream::new(stream, small_max);
        if let Some(ring) = &ring {
            own.tell(&ring.note());
        }
        Self {
            own,
            ring,
            taken: 0,
            slots: Slots::new(),
            queue: Order::new(),
            next: 0,
            failure: None,
            traffic: Traffic::default(),
        }
    }

    /// Whether messages may go by a ring.
    pub(crate) fn has_ring(&mut self) -> bool {
        self.ring.as_mut().is_some_and(RingSender::is_open)
    }

    /// Sends as much as the socket and the ring take.
    pub(crate) fn flush(&mut self, peer: &Peer) -> Result<(), FlowError> {
        while let Some(index) = self.queue.front() {
            let Some(message) = self.slots.at(index) else {
                self.queue.pop();
                continue;
            };
            let head = Span::of(&message.head).after(message.sent);
            let payload = message.payload.after(message.sent.saturating_sub(HEAD_LEN));
            let sent = match self.ring.as_mut().filter(|_| message.is_local) {
                // SAFETY: the head lives in the slot; the caller of `post` keeps the payload
                // readable.
                Some(ring) => unsafe { ring.send(&[head, payload]) },
                // SAFETY: as above.
                None => Ok(unsafe { self.own.send(head, payload) }),
            };
            match sent {
                Ok(Some(count)) => message.sent += count,
                Ok(None) => return self.check(),
                Err(error) => {
                    let what = format!("its ring: {error}");
                    self.end(FlowError::Protocol { peer: peer.clone(), what });
                    return self.check();
                }
            }
            if message.is_sent() {
                self.queue.pop();
            }
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), FlowError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.failure, Some(FlowError::Closed))
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Whether bytes are to come that the receiver is not known to have.
    pub(crate) fn has_work(&self) -> bool {
        let is_ring_empty = self.ring.as_ref().is_none_or(RingSender::is_empty);
        self.queue.front().is_some() || self.own.history().unconfirmed() > 0 || !is_ring_empty
    }

    /// Whether some of these are the own stream's.
    pub(crate) fn has_stream_work(&mut self) -> bool {
        let front = self.queue.front().and_then(|index| self.slots.at(index));
        front.is_some_and(|message| !message.is_local) || self.own.history().unconfirmed() > 0
    }

    /// Bytes that the receiver is known to have, of the own stream and the ring.
    pub(crate) fn confirmed(&self) -> u64 {
        self.own.history().confirmed() + self.ring.as_ref().map_or(self.taken, RingSender::taken)
    }

    /// Cuts the messages, but for the rest of one that has begun on the own stream, and says the
    /// end.
    pub(crate) fn finish(&mut self) {
        let mut rest = [Span::EMPTY; 2];
        if let Some(message) = self.queue.front().and_then(|index| self.slots.at(index))
            && message.sent > 0
            && !message.is_local
        {
            let payload = message.payload.after(message.sent.saturating_sub(HEAD_LEN));
            rest = [Span::of(&message.head).after(message.sent), payload];
        }
        // SAFETY: the head lives in the slot; the caller of `post` keeps the payload readable until
        // the flow is closed.
        unsafe { self.own.finish(rest) };
        self.queue = Order::new();
        self.taken = self.ring.take().map_or(0, |ring| ring.taken());
    }

    /// The peer is out of reach. `silent`: for so long.
    pub(crate) fn lose(&mut self, peer: &Peer, cause: String, silent: Duration) {
        let outstanding = self.outstanding();
        self.end(FlowError::Lost { peer: peer.clone(), cause, silent, outstanding });
    }

    /// The peer has closed the flow.
    pub(crate) fn end_by_peer(&mut self, peer: &Peer) {
        let outstanding = self.outstanding();
        self.end(FlowError::PeerClosed { peer: peer.clone(), outstanding });
    }

    fn end(&mut self, failure: FlowError) {
        self.own.abandon();
        self.ring = None;
        self.failure.get_or_insert(failure);
    }

    fn outstanding(&self) -> Backlog {
        let unsent = self.slots.values().filter(|message| !message.is_sent());
        unsent.fold(Backlog::default(), |sum, message| Backlog {
            requests: sum.requests + 1,
            bytes: sum.bytes + (HEAD_LEN + message.payload.len - message.sent) as u64,
        })
    }
}
