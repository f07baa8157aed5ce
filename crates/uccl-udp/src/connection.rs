//! One end of a channel: its messages, its paths, and the requests that wait for them.

pub(crate) mod arrivals;
mod departures;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::io;
use socket2::SockAddr;
use uccl_fabric::{
    lane::OpKind,
    rail::{Request, RequestEnd, RequestError},
};
use uccl_tran::multipath::{MultipathEvent, MultipathReceiver, MultipathSender};
use uccl_wire::datagram::{DatagramHead, DatagramKeys, DatagramKind};

use crate::outbox::{OutMessage, Outbox};

/// Messages of a sender that have chunks under way, and receives that the peer keeps for them.
pub(crate) const OPEN: usize = 64;
/// Most messages of one end that have not ended. An honest peer's requests need fewer.
const MOST_MESSAGES: usize = 4096;
/// Requests under way.
pub(crate) const DEPTH: usize = 256;
/// Longest request, in bytes.
pub(crate) const MAX_REQUEST: u64 = 1 << 30;
/// How long a path that was given up is left alone, in nanoseconds.
const REOPEN_NS: u64 = 1_000_000_000;
/// The number of a path at which the channel ends.
const LAST_NUMBER: u32 = u32::MAX - (1 << 16);

/// The parts that make a connection.
pub(crate) struct ConnectionParts {
    /// The peer's name of the connection.
    pub(crate) peer: u64,
    /// The peer's sockets, by path.
    pub(crate) to: Vec<SockAddr>,
    pub(crate) keys: DatagramKeys,
    pub(crate) sender: MultipathSender,
    pub(crate) receiver: MultipathReceiver,
    /// Bytes of a chunk.
    pub(crate) chunk_len: u32,
    /// Rung for a sleeper.
    pub(crate) bell: Arc<OwnedFd>,
}

pub(crate) struct Connection {
    peer: u64,
    to: Vec<SockAddr>,
    keys: DatagramKeys,
    sender: MultipathSender,
    receiver: MultipathReceiver,
    chunk_len: u32,
    outbox: Outbox,
    /// Heads of the peer's messages, by number modulo [`OPEN`].
    incoming: [Option<DatagramHead>; OPEN],
    ended: Vec<RequestEnd>,
    /// Requests that have not ended.
    requests: usize,
    /// Paths that were given up, and when.
    closed: Vec<(u64, u16)>,
    loss: Option<String>,
    bell: Arc<OwnedFd>,
    is_armed: bool,
    has_rung: bool,
}

impl Connection {
    pub(crate) fn new(parts: ConnectionParts) -> Self {
        let ConnectionParts { peer, to, keys, sender, mut receiver, chunk_len, bell } = parts;
        while receiver.posted() < OPEN {
            receiver.post(MAX_REQUEST);
        }
        Self {
            peer,
            to,
            keys,
            sender,
            receiver,
            chunk_len,
            outbox: Outbox::default(),
            incoming: [None; OPEN],
            ended: Vec::new(),
            requests: 0,
            closed: Vec::new(),
            loss: None,
            bell,
            is_armed: false,
            has_rung: false,
        }
    }

    /// Why the channel is lost, if it is.
    pub(crate) fn loss(&self) -> Option<&str> {
        self.loss.as_deref()
    }

    pub(crate) fn lose(&mut self, why: impl Into<String>) {
        if self.loss.is_none() {
            self.loss = Some(why.into());
            self.ring();
        }
    }

    /// Takes a request. False if there is no room for it.
    pub(crate) fn post(&mut self, now_ns: u64, request: &Request) -> bool {
        if self.requests >= DEPTH {
            return false;
        }
        self.requests += 1;
        let len = request.local.len as u64;
        if len > MAX_REQUEST {
            let why = RequestError::Failed(format!("{len} bytes; the most are {MAX_REQUEST}"));
            self.end(request.tag, Err(why));
            return true;
        }
        let (kind, total, length) = match request.kind {
            OpKind::Write => (DatagramKind::Write, len as u32, 0),
            OpKind::Read => (DatagramKind::Read, 0, len as u32),
        };
        self.push(
            now_ns,
            OutMessage {
                length,
                addr: request.remote_addr,
                local: request.local,
                tag: request.tag,
                is_over: false,
                ..OutMessage::answer(kind, total, request.remote_key)
            },
        );
        true
    }

    /// Asks the peer for a whole datagram, and sends one. A probe does not count against the depth.
    pub(crate) fn ping(&mut self, now_ns: u64, tag: u64) {
        self.requests += 1;
        let ping = OutMessage::answer(DatagramKind::Ping, self.chunk_len, 0);
        self.push(now_ns, OutMessage { tag, is_over: false, ..ping });
    }

    fn push(&mut self, now_ns: u64, outgoing: OutMessage) {
        if self.outbox.len() >= MOST_MESSAGES {
            self.lose("the peer asks for more than it may");
            return;
        }
        self.sender.push(now_ns, outgoing.total.into());
        self.outbox.push(outgoing);
    }

    /// Moves the requests that have ended, and takes back the ring of the bell.
    pub(crate) fn take_ended(&mut self, ended: &mut Vec<RequestEnd>) {
        ended.append(&mut self.ended);
        self.is_armed = false;
        if std::mem::take(&mut self.has_rung) {
            // It fails only if nothing is there to be read.
            let _ = io::read(&*self.bell, &mut [0; 8]);
        }
    }

    /// Rings from now on when something ends. False if something has.
    pub(crate) fn arm(&mut self) -> bool {
        self.is_armed = self.ended.is_empty();
        self.is_armed
    }

    /// When [`Connection::on_time`] is to be called if nothing arrives before, in nanoseconds.
    pub(crate) fn due_ns(&self) -> u64 {
        if self.loss.is_some() {
            return u64::MAX;
        }
        let reopen = self.closed.first().map(|(at_ns, _)| at_ns + REOPEN_NS);
        let times = [self.sender.next_timeout_ns(), self.receiver.next_timeout_ns(), reopen];
        times.into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// Judges silences, and opens paths again.
    pub(crate) fn on_time(&mut self, now_ns: u64) {
        while let Some((_, path)) = self.closed.first().filter(|(at, _)| at + REOPEN_NS <= now_ns) {
            self.sender.open_path(now_ns, *path);
            self.closed.remove(0);
        }
        self.sender.on_timeout(now_ns);
        self.take_events(now_ns);
    }

    fn take_events(&mut self, now_ns: u64) {
        while let Some(event) = self.sender.poll() {
            match event {
                MultipathEvent::Sent { message } => {
                    let is_write = |sent: &OutMessage| sent.kind == DatagramKind::Write;
                    if self.outbox.get(message).is_some_and(is_write) {
                        self.finish(message, Ok(()));
                    }
                    self.settle(message);
                }
                MultipathEvent::Cancelled { message } => self.settle(message),
                MultipathEvent::PathDead { path } => {
                    self.closed.push((now_ns, path));
                    if self.closed.len() == self.to.len() {
                        self.lose("nothing gets through any path");
                    }
                }
            }
        }
    }

    /// The sender is done with a message.
    fn settle(&mut self, message: u64) {
        self.outbox.change(message, |sent| sent.is_settled = true);
    }

    /// Ends the request of a message, if it has not ended.
    fn finish(&mut self, message: u64, result: Result<(), RequestError>) {
        let Some(sent) = self.outbox.get(message).filter(|sent| !sent.is_over) else { return };
        let tag = sent.tag;
        self.outbox.change(message, |sent| sent.is_over = true);
        self.end(tag, result);
    }

    fn end(&mut self, tag: u64, result: Result<(), RequestError>) {
        self.requests -= 1;
        self.ended.push(RequestEnd { tag, result });
        self.ring();
    }

    fn ring(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            self.has_rung = true;
            // It fails only if the counter is full, and then the descriptor is readable already.
            let _ = io::write(self.bell.as_fd(), &1u64.to_ne_bytes());
        }
    }
}
