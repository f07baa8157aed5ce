//! The accepting side: runs handshakes, none of which can hold up another.
//!
//! Strangers reach a listener as easily as peers do. So a turn accepts only some, after everything
//! else of the turn; the number of pending streams is bounded; and where that is full, the source
//! that has most of them gives way.

mod first;
mod listeners;

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::event::epoll::{self, EventData, EventFlags};
use slab::Slab;
use uccl_local as local;
use uccl_local::{
    Setup,
    fdpass::{FdListener, FdSocket},
};
use uccl_wire::handshake::{Handshake, Hello, HelloKind, NONCE_LEN, Progress, Refusal, RefuseCode};

#[cfg(test)]
pub(in crate::drive) use self::first::begin;
use self::{
    first::{First, establish, say},
    listeners::{Accept, Listeners, TCP, UDS},
};
use super::{
    core::{Core, workers::ACCEPTOR},
    greeting::{self, Greeting, MAX_LANES},
    seats::Source,
    socket::{MAX_WORD, Socket},
};
use crate::error::{Error, Result};

/// Most handshakes at a time: this many that are finished and wait for the rest of their
/// connection, and as many that are not. Beyond that one of the same kind is dropped: the oldest of
/// the source that has most.
const MAX_PENDING: usize = 256;
/// Most streams that one turn accepts from one listener. The same worker looks after deadlines and
/// lanes.
const ACCEPTS_A_TURN: usize = 16;
/// Longest time for a handshake, where the connection's timeout is longer or off.
const MAX_TIME: Duration = Duration::from_secs(10);

/// A stream that is not a connection yet.
struct PendingStream {
    stream: Stream,
    source: Source,
    deadline: Instant,
}

enum Stream {
    /// The handshake is under way.
    Shaking { tcp: TcpStream, addr: SocketAddr, handshake: Box<Handshake> },
    /// The first lane of a connection. Its handshake is finished; it waits for the `Establish`
    /// message.
    First(Box<First>),
    /// A process of this host, which will name the connection that it belongs to.
    Local(FdSocket),
}

/// Accepts connections; part of the first worker.
pub(crate) struct Acceptor {
    listeners: Listeners,
    greeting: Arc<Greeting>,
    pending: Slab<PendingStream>,
    scratch: Vec<u8>,
}

impl PendingStream {
    /// Whether its handshake is finished. If a secret is set, the peer has proven that it has the
    /// secret.
    fn is_proven(&self) -> bool {
        matches!(self.stream, Stream::First(_))
    }
}

/// The next step after a look at a stream.
enum Next {
    /// Keep it and wait for more.
    Wait,
    /// Forget it: it has become part of a connection, or has ended.
    Gone,
}

impl Acceptor {
    pub(crate) fn new(
        listener: TcpListener,
        uds: Option<FdListener>,
        greeting: Arc<Greeting>,
    ) -> Self {
        let listeners = Listeners::new(listener, uds);
        Self { listeners, greeting, pending: Slab::new(), scratch: vec![0; 4096] }
    }

    /// Makes the listeners wake the worker.
    pub(crate) fn attach(&self, epoll: &OwnedFd) -> Result<()> {
        self.listeners.attach(epoll)
    }

    /// Whether there are handshakes or a pause, which have ends to be checked.
    pub(crate) fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.listeners.is_paused()
    }

    /// Handles an event for `token`. Those of listeners are handled at the end of the turn: streams
    /// that have been accepted do not wait for others.
    pub(crate) fn ready(&mut self, core: &Arc<Core>, epoll: &OwnedFd, token: u64) {
        match token {
            TCP | UDS => self.listeners.ready(token),
            index => self.look(core, epoll, index as usize),
        }
    }

    /// Ends a turn: accepts some of those that wait, and drops handshakes that take too long.
    pub(crate) fn end_turn(&mut self, core: &Arc<Core>, epoll: &OwnedFd) {
        let ready = self.listeners.take_ready();
        if ready & TCP != 0 {
            self.accept_tcp(core, epoll);
        }
        if ready & UDS != 0 {
            self.accept_uds(core, epoll);
        }
        self.listeners.end_pause(epoll);
        self.expire(epoll);
    }

    /// Drops handshakes that take too long.
    fn expire(&mut self, epoll: &OwnedFd) {
        if self.pending.is_empty() {
            return;
        }
        let now = Instant::now();
        let late: Vec<usize> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.deadline <= now)
            .map(|(index, _)| index)
            .collect();
        late.into_iter().for_each(|index| self.forget(epoll, index));
    }

    fn accept_tcp(&mut self, core: &Arc<Core>, epoll: &OwnedFd) {
        // The listener stays readable while connections wait.
        for _ in 0..ACCEPTS_A_TURN {
            let (tcp, addr) = match self.listeners.accept_tcp(epoll) {
                Accept::Stream(accepted) => accepted,
                Accept::Again => continue,
                Accept::Nothing => return,
            };
            let mut nonce = [0; NONCE_LEN];
            let psk = greeting::psk(&core.config);
            if tcp.set_nonblocking(true).is_err() || getrandom::fill(&mut nonce).is_err() {
                continue;
            }
            // With Nagle's algorithm, a reply can wait for the next one, and connecting takes tens
            // of milliseconds longer.
            let _ = tcp.set_nodelay(true);
            let Ok(psk) = psk else { continue };
            let handshake = Box::new(Handshake::acceptor(psk, nonce));
            let source = Source::of(addr.ip());
            self.keep(core, epoll, Stream::Shaking { tcp, addr, handshake }, source);
        }
    }

    fn accept_uds(&mut self, core: &Arc<Core>, epoll: &OwnedFd) {
        for _ in 0..ACCEPTS_A_TURN {
            match self.listeners.accept_uds(epoll) {
                Accept::Stream(socket) => {
                    self.keep(core, epoll, Stream::Local(socket), Source::Host);
                }
                Accept::Again => {}
                Accept::Nothing => return,
            }
        }
    }

    fn keep(&mut self, core: &Arc<Core>, epoll: &OwnedFd, stream: Stream, source: Source) {
        self.make_room(epoll, false);
        let allowed = core.config.timeout;
        let allowed = if allowed.is_zero() { MAX_TIME } else { allowed.min(MAX_TIME) };
        let deadline = Instant::now() + allowed;
        let index = self.pending.insert(PendingStream { stream, source, deadline });
        if watch(epoll, fd_of(&self.pending[index].stream), index as u64).is_err() {
            self.pending.remove(index);
            return;
        }
        self.look(core, epoll, index);
    }

    /// If there are too many finished handshakes (`proven`) or too many others, drops one of them:
    /// the oldest of the source that has most. So one source cannot keep others out.
    fn make_room(&mut self, epoll: &OwnedFd, proven: bool) {
        let alike = || self.pending.iter().filter(|(_, other)| other.is_proven() == proven);
        if alike().count() < MAX_PENDING {
            return;
        }
        let mut shares: HashMap<Source, (usize, Reverse<Instant>, usize)> = HashMap::new();
        for (index, pending) in alike() {
            let age = Reverse(pending.deadline);
            let share = shares.entry(pending.source).or_insert((0, age, index));
            *share = (share.0 + 1, share.1.max(age), if age > share.1 { index } else { share.2 });
        }
        if let Some((.., oldest)) = shares.into_values().max() {
            self.forget(epoll, oldest);
        }
    }

    fn forget(&mut self, epoll: &OwnedFd, index: usize) {
        if let Some(gone) = self.pending.try_remove(index) {
            // The socket of some streams goes on as a lane, which is watched anew.
            let _ = epoll::delete(epoll, fd_of(&gone.stream));
        }
    }

    fn look(&mut self, core: &Arc<Core>, epoll: &OwnedFd, index: usize) {
        let Some(pending) = self.pending.get_mut(index) else { return };
        let next = match &mut pending.stream {
            Stream::Shaking { .. } => self.shake(core, epoll, index),
            Stream::First(_) => self.await_word(core, epoll, index),
            Stream::Local(_) => self.join_local(core, epoll, index),
        };
        if matches!(next, Next::Gone) {
            self.forget(epoll, index);
        }
    }

    /// Continues a handshake with the received bytes.
    fn shake(&mut self, core: &Arc<Core>, epoll: &OwnedFd, index: usize) -> Next {
        let Some(PendingStream { stream: Stream::Shaking { tcp, handshake, .. }, .. }) =
            self.pending.get_mut(index)
        else {
            return Next::Gone;
        };
        loop {
            let n = match tcp.read(&mut self.scratch) {
                Ok(0) => return Next::Gone,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Next::Wait,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Next::Gone,
            };
            let progress = handshake.feed(&self.scratch[..n]);
            match progress {
                Ok(Progress::PeerHello { peer, consumed }) if consumed == n => {
                    return self.shaken(core, epoll, index, *peer);
                }
                Ok(Progress::NeedMore) => {
                    if say(tcp, &handshake.pending_output()).is_err() {
                        return Next::Gone;
                    }
                }
                Ok(_) => {
                    let why = Refusal::new(RefuseCode::Protocol, "bytes before they were due");
                    handshake.refuse(why);
                    return refuse(core, tcp, handshake);
                }
                Err(e) => {
                    tracing::debug!("a handshake failed: {e}");
                    return refuse(core, tcp, handshake);
                }
            }
        }
    }

    /// The peer's hello has arrived: answers it.
    fn shaken(&mut self, core: &Arc<Core>, epoll: &OwnedFd, index: usize, peer: Hello) -> Next {
        let token = match peer.kind {
            HelloKind::NewConnection => match random_token() {
                Some(token) => token,
                None => return Next::Gone,
            },
            HelloKind::JoinLane { token, .. } => token,
        };
        let joins = match peer.kind {
            HelloKind::NewConnection => None,
            HelloKind::JoinLane { lane_index, .. } => Some(lane_index),
        };
        let home = joins.and_then(|lane| self.first_with(token, lane, &peer));
        if joins.is_none() {
            self.make_room(epoll, true);
        }
        let hello = self.greeting.hello(core, peer.kind, token);
        let Some(pending) = self.pending.get_mut(index) else { return Next::Gone };
        let source = pending.source;
        let Stream::Shaking { tcp, addr, handshake } = &mut pending.stream else {
            return Next::Gone;
        };
        if peer.meant != 0 && peer.meant != core.instance {
            let why = "another endpoint listens here than the one that is meant: it was started anew, or this is not \
                       its address";
            handshake.refuse(Refusal::new(RefuseCode::AnotherMeant, why));
            return refuse(core, tcp, handshake);
        }
        if joins.is_some() && home.is_none() {
            let why = Refusal::new(RefuseCode::UnknownToken, "no connection waits for this lane");
            handshake.refuse(why);
            return refuse(core, tcp, handshake);
        }
        if joins.is_none() && core.has_unaccepted() {
            let why = "too many connections wait for accept already";
            handshake.refuse(Refusal::new(RefuseCode::Busy, why));
            return refuse(core, tcp, handshake);
        }
        let Some(seat) = core.seats.take(source) else {
            let why = format!(
                "peers have as many streams open as they may (UCCL_P2P_MAX_STREAMS={})",
                core.config.max_streams
            );
            handshake.refuse(Refusal::new(RefuseCode::Busy, why));
            return refuse(core, tcp, handshake);
        };
        if handshake.reply(&hello).is_err() || say(tcp, &handshake.pending_output()).is_err() {
            return Next::Gone;
        }
        let Ok(tcp) = tcp.try_clone() else { return Next::Gone };
        let (socket, addr) = (Socket::of(tcp, handshake), *addr);
        if let (Some(lane), Some(home)) = (joins, home) {
            if let Some(PendingStream { stream: Stream::First(first), .. }) =
                self.pending.get_mut(home)
            {
                first.lanes.insert(lane, socket);
                first.seats.push(seat);
            }
            return Next::Gone;
        }
        let (word, lanes, seats) = (Vec::new(), HashMap::new(), vec![seat]);
        let first = First { socket, addr, peer, token, word, lanes, local: None, seats };
        // The clone is another descriptor, so it has to be watched in place of the first.
        let _ = epoll::delete(epoll, fd_of(&pending.stream));
        pending.stream = Stream::First(Box::new(first));
        if watch(epoll, fd_of(&pending.stream), index as u64).is_err() {
            return Next::Gone;
        }
        self.await_word(core, epoll, index)
    }

    /// The connection under way that this further lane of the peer's belongs to.
    fn first_with(&self, token: u128, lane: u16, peer: &Hello) -> Option<usize> {
        self.pending.iter().find_map(|(index, pending)| match &pending.stream {
            Stream::First(first) if first.takes(token, lane, peer) => Some(index),
            _ => None,
        })
    }

    /// Reads the `Establish` message, which turns the lanes into a connection.
    fn await_word(&mut self, core: &Arc<Core>, epoll: &OwnedFd, index: usize) -> Next {
        let Some(PendingStream { stream: Stream::First(first), .. }) = self.pending.get_mut(index)
        else {
            return Next::Gone;
        };
        let mut word = [0; MAX_WORD];
        let wanted = first.socket.word_len() - first.word.len();
        match first.socket.tcp.read(&mut word[..wanted]) {
            Ok(0) => return Next::Gone,
            Ok(n) => first.word.extend_from_slice(&word[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Next::Wait,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Next::Wait,
            Err(_) => return Next::Gone,
        }
        if first.word.len() < first.socket.word_len() {
            return Next::Wait;
        }
        let lanes = match first.socket.read_word(&first.word) {
            Ok(lanes) => lanes,
            Err(e) => {
                tracing::debug!("a connection was not established: {e}");
                core.counters.refused_handshakes.fetch_add(1, Relaxed);
                return Next::Gone;
            }
        };
        if lanes > u64::from(MAX_LANES) {
            return Next::Gone;
        }
        let Some(PendingStream { stream: Stream::First(first), .. }) =
            self.pending.try_remove(index)
        else {
            return Next::Gone;
        };
        let _ = epoll::delete(epoll, first.socket.tcp.as_fd());
        if let Err(e) = establish(core, &self.greeting, *first, lanes as u16) {
            tracing::debug!("a connection was not established: {e}");
        }
        Next::Gone
    }

    /// Reads which connection another process of this host belongs to, and makes the local lane.
    fn join_local(&mut self, core: &Arc<Core>, epoll: &OwnedFd, index: usize) -> Next {
        let Some(PendingStream { stream: Stream::Local(socket), .. }) = self.pending.get_mut(index)
        else {
            return Next::Gone;
        };
        let message = match socket.recv() {
            Ok(Some(message)) => message,
            Ok(None) => return Next::Wait,
            Err(_) => return Next::Gone,
        };
        let Some(PendingStream { stream: Stream::Local(socket), .. }) =
            self.pending.try_remove(index)
        else {
            return Next::Gone;
        };
        let _ = epoll::delete(epoll, socket.as_fd());
        let first = local::token_of(&message).and_then(|token| {
            self.pending.iter_mut().find_map(|(_, pending)| match &mut pending.stream {
                Stream::First(first) if first.socket.secret(first.token) == token => Some(first),
                _ => None,
            })
        });
        let Some(first) = first else { return Next::Gone };
        let pid = socket.peer().ok().and_then(|peer| peer.pid);
        let setup = Setup {
            regions: Arc::clone(&core.mrs.table),
            process: self.greeting.process(core, &first.peer, pid),
            checksum: greeting::checksum(&core.config, &first.peer, true),
        };
        match local::accept(socket, message, setup) {
            Ok(lane) => first.local = Some(lane),
            Err(e) => tracing::warn!("a local lane was not made: {e}"),
        }
        Next::Gone
    }
}

fn refuse(core: &Core, tcp: &mut TcpStream, handshake: &mut Handshake) -> Next {
    core.counters.refused_handshakes.fetch_add(1, Relaxed);
    // The peer may not read why it was refused.
    let _ = say(tcp, &handshake.pending_output());
    Next::Gone
}

fn random_token() -> Option<u128> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).ok()?;
    Some(u128::from_le_bytes(token))
}

fn fd_of(stream: &Stream) -> BorrowedFd<'_> {
    match stream {
        Stream::Shaking { tcp, .. } => tcp.as_fd(),
        Stream::First(first) => first.socket.tcp.as_fd(),
        Stream::Local(socket) => socket.as_fd(),
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
    epoll::add(epoll, fd, EventData::new_u64(ACCEPTOR | token), EventFlags::IN)
        .map_err(|e| Error::os("watching a socket", e))
}

#[cfg(test)]
mod tests;
