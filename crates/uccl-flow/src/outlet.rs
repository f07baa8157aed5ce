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
    /// Bytes of head and payload that have been sent over the own stream.
    pub(crate) sent: usize,
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
    pub(crate) fn new(stream: TcpStream, small_max: usize) -> Self {
        Self {
            own: OwnStream::new(stream, small_max),
            slots: Slots::new(),
            queue: Order::new(),
            next: 0,
            failure: None,
            traffic: Traffic::default(),
        }
    }

    /// Sends as much as the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), FlowError> {
        while let Some(index) = self.queue.front() {
            let Some(message) = self.slots.at(index) else {
                self.queue.pop();
                continue;
            };
            let head = Span::of(&message.head).after(message.sent);
            let payload = message.payload.after(message.sent.saturating_sub(HEAD_LEN));
            // SAFETY: the head lives in the slot; the caller of `post` keeps the payload readable.
            let Some(count) = (unsafe { self.own.send(head, payload) }) else {
                return self.check();
            };
            message.sent += count;
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

    /// Whether bytes of the own stream are to come that the receiver is not known to have.
    pub(crate) fn has_work(&self) -> bool {
        self.queue.front().is_some() || self.own.history().unconfirmed() > 0
    }

    /// Cuts the messages, but for the rest of one that has begun, and says the end.
    pub(crate) fn finish(&mut self) {
        let mut rest = [Span::EMPTY; 2];
        if let Some(message) = self.queue.front().and_then(|index| self.slots.at(index))
            && message.sent > 0
        {
            let payload = message.payload.after(message.sent.saturating_sub(HEAD_LEN));
            rest = [Span::of(&message.head).after(message.sent), payload];
        }
        // SAFETY: the head lives in the slot; the caller of `post` keeps the payload readable until
        // the flow is closed.
        unsafe { self.own.finish(rest) };
        self.queue = Order::new();
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
