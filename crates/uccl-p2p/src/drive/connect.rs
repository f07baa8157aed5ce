//! The connecting side: an [`Attempt`] within a deadline, on the threads of those that poll it or
//! wait for it. No step blocks, and dropping the attempt at any step ends it and leaves nothing.

mod draft;
mod failure;

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;
use uccl_local as local;
use uccl_local::{LocalLane, Setup, fdpass::FdSocket};
use uccl_rma::Role;
use uccl_wire::handshake::{Handshake, Hello, HelloKind, NONCE_LEN, Progress};

use self::{
    draft::Draft,
    failure::{HandshakeFailure, is_nobody, is_unreachable},
};
use super::{
    attempt::{Attempt, SleepLimit},
    core::{Core, connection::Connection, workers::Workers},
    greeting::{self, Greeting},
    lanes,
    links::Links,
    socket::{MAX_WORD, Socket},
    timers,
};
use crate::{
    config::Transport,
    error::{Error, Result},
    ids::ConnId,
};

/// How long to wait for rails without a sleep. Mostly they are up before a sleep would have ended.
const NO_NAP: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(200);

/// How long after the first failure to try again, if the peer is not there yet. Doubles each time,
/// up to [`LAST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(1);
const LAST_RETRY: Duration = Duration::from_millis(50);

/// How long after a failure to try again, if too many wait at the peer's unix socket.
const CROWDED: Duration = Duration::from_millis(1);

/// The longest turn of an address while others wait for theirs, if there is no limit for all of
/// them.
const TURN: Duration = Duration::from_secs(10);

/// The peer to connect to, and how long to try.
pub(crate) struct Target {
    /// Where the peer may listen, in the order in which it is looked for.
    pub(crate) addrs: Box<[SocketAddr]>,
    /// How long it may take; zero means for ever.
    pub(crate) timeout: Duration,
    /// The instance of the endpoint that is meant, where that is known. Another one is not
    /// connected to.
    pub(crate) meant: Option<u64>,
    /// Whether to wait for a peer that is not there yet.
    pub(crate) awaited: bool,
}

/// The state of a handshake: how long it may take, and where the peer is.
struct Connector {
    core: Arc<Core>,
    greeting: Arc<Greeting>,
    limit: SleepLimit,
    /// The address that is being tried, or that has answered.
    addr: SocketAddr,
    until: Option<Instant>,
    timeout: Duration,
    /// Why the peer was not there at the last try.
    absent: Option<io::Error>,
}

impl Connector {
    fn failed(&self, reason: impl ToString) -> Error {
        Error::Connect { addr: self.addr, reason: reason.to_string() }
    }

    fn out_of_time(&self) -> Error {
        let timeout = self.timeout;
        self.failed(match &self.absent {
            Some(e) => format!("no endpoint was there within {timeout:?} ({e}): was it started, and with this port?"),
            None => format!("no answer within {timeout:?}"),
        })
    }

    /// Waits until the socket is ready. Fails when the time is up.
    async fn wait(&self, fd: &(impl AsFd + Sync), flags: PollFlags) -> Result<()> {
        if self.is_over() || !self.limit.ready(fd, flags, self.until).await? {
            return Err(self.out_of_time());
        }
        Ok(())
    }

    /// Sleeps for `nap`, or less if the time is up before.
    async fn nap(&self, nap: Duration) {
        let wake = Instant::now() + nap;
        self.limit.sleep_until(self.until.map_or(wake, |until| until.min(wake))).await;
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    async fn send(&self, tcp: &mut TcpStream, mut bytes: &[u8]) -> Result<(), HandshakeFailure> {
        while !bytes.is_empty() {
            match tcp.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(tcp, PollFlags::OUT).await?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.unmet(e)),
            }
        }
        Ok(())
    }

    async fn recv(&self, tcp: &mut TcpStream, into: &mut [u8]) -> Result<usize, HandshakeFailure> {
        loop {
            match tcp.read(into) {
                Ok(0) => {
                    let gone = io::ErrorKind::ConnectionReset;
                    let gone = io::Error::new(gone, "the peer closed the connection");
                    return Err(HandshakeFailure::Nobody(gone));
                }
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(tcp, PollFlags::IN).await?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.unmet(e)),
            }
        }
    }

    fn unmet(&self, e: io::Error) -> HandshakeFailure {
        match () {
            () if is_nobody(&e) => HandshakeFailure::Nobody(e),
            () if is_unreachable(&e) => HandshakeFailure::Unreachable(self.failed(e)),
            () => HandshakeFailure::Failed(self.failed(e)),
        }
    }

    /// Turns [`HandshakeFailure`] into an error, for callers that do not wait for the peer to be
    /// there.
    fn settled<T>(&self, met: Result<T, HandshakeFailure>) -> Result<T> {
        met.map_err(|unmet| match unmet {
            HandshakeFailure::Nobody(e) => self.failed(e),
            HandshakeFailure::Unreachable(e) | HandshakeFailure::Failed(e) => e,
        })
    }

    /// Opens a socket to the peer.
    async fn open(&self) -> Result<TcpStream, HandshakeFailure> {
        let domain = socket2::Domain::for_address(self.addr);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)
            .map_err(|e| self.failed(e))?;
        socket.set_nonblocking(true).map_err(|e| self.failed(e))?;
        socket.set_tcp_nodelay(true).map_err(|e| self.failed(e))?;
        match socket.connect(&self.addr.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {
                self.wait(&socket, PollFlags::OUT).await.map_err(|e| match e {
                    e @ Error::Connect { .. } => HandshakeFailure::Unreachable(e),
                    e => HandshakeFailure::Failed(e),
                })?;
            }
            Err(e) => return Err(self.unmet(e)),
        }
        if let Some(e) = socket.take_error().map_err(|e| self.failed(e))? {
            return Err(self.unmet(e));
        }
        let tcp = TcpStream::from(socket);
        // The kernel may use a free port of this host as the socket's own port. If that is the port
        // it connects to, the socket has met itself.
        if tcp.local_addr().is_ok_and(|own| own == self.addr) {
            return Err(HandshakeFailure::Nobody(io::ErrorKind::ConnectionRefused.into()));
        }
        Ok(tcp)
    }

    /// Opens a socket and does the handshake over it.
    async fn shake(
        &mut self,
        kind: HelloKind,
        meant: Option<u64>,
    ) -> Result<(Socket, Hello), HandshakeFailure> {
        let mut tcp = self.open().await?;
        self.absent = None;
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|e| self.failed(e))?;
        let mut hello = self.greeting.hello(&self.core, kind, 0);
        hello.requested_port = self.addr.port();
        hello.meant = meant.unwrap_or(0);
        let mut handshake = Handshake::connector(greeting::psk(&self.core.config)?, &hello, nonce)
            .map_err(|e| self.failed(e))?;
        let mut bytes = [0; 4096];
        let mut heard = false;
        loop {
            let output = handshake.pending_output();
            let received = match self.send(&mut tcp, &output).await {
                Ok(()) => self.recv(&mut tcp, &mut bytes).await,
                Err(unmet) => Err(unmet),
            };
            // A peer that has spoken is there: if it leaves now, it has failed the handshake.
            let n = if heard { self.settled(received)? } else { received? };
            heard = true;
            match handshake.feed(&bytes[..n]) {
                Ok(Progress::Done { peer, consumed }) if consumed == n => {
                    if meant.is_some_and(|meant| meant != peer.instance) {
                        return Err(self
                            .failed("another endpoint than the one meant is there")
                            .into());
                    }
                    return Ok((Socket::of(tcp, &mut handshake), *peer));
                }
                Ok(Progress::NeedMore) => {}
                Ok(_) => {
                    return Err(self.failed("the peer sent bytes before they were due").into());
                }
                Err(e) => {
                    // Tell the peer why, in case it still listens.
                    let _ = tcp.write(&handshake.pending_output());
                    return Err(self.failed(e).into());
                }
            }
        }
    }

    /// Does the handshake with the peer, at the first of its addresses where that succeeds. While
    /// others are left, an address has an equal share of the time.
    async fn shake_any(
        &mut self,
        Target { addrs, meant, .. }: &Target,
    ) -> Result<(Socket, Hello), HandshakeFailure> {
        let (until, timeout) = (self.until, self.timeout);
        let mut failures = Vec::new();
        for (at, &addr) in addrs.iter().enumerate() {
            self.addr = addr;
            let others = u32::try_from(addrs.len() - at - 1).unwrap_or(u32::MAX);
            if others > 0 {
                let now = Instant::now();
                let turn = until.map_or(TURN, |until| (until - now) / others.saturating_add(1));
                // The time appears in errors, where milliseconds are exact enough.
                self.timeout = Duration::from_millis(turn.as_millis() as u64);
                self.until = Some(now + turn);
            }
            let met = self.shake(HelloKind::NewConnection, *meant).await;
            (self.until, self.timeout) = (until, timeout);
            match met {
                Ok(met) => return Ok(met),
                Err(unmet) => failures.push((addr, unmet)),
            }
        }
        Err(self.summed_up(failures))
    }

    /// Sums up the failures at all addresses. One address where nobody listens is enough to call
    /// the peer absent, unless a handshake has failed: a peer that is not there yet may start to
    /// listen at that address.
    fn summed_up(&mut self, mut failures: Vec<(SocketAddr, HandshakeFailure)>) -> HandshakeFailure {
        self.addr = failures.first().map_or(self.addr, |(first, _)| *first);
        if failures.len() == 1
            && let Some((_, only)) = failures.pop()
        {
            return only;
        }
        let at = |(addr, unmet): &(SocketAddr, HandshakeFailure)| {
            format!("at {addr}: {}", unmet.reason())
        };
        let reason = failures.iter().map(at).collect::<Vec<_>>().join("; ");
        let mut nobody = None;
        for (_, unmet) in failures {
            match unmet {
                HandshakeFailure::Failed(_) => {
                    return HandshakeFailure::Failed(self.failed(reason));
                }
                HandshakeFailure::Nobody(e) => nobody = Some(e.kind()),
                HandshakeFailure::Unreachable(_) => {}
            }
        }
        match nobody {
            Some(kind) => HandshakeFailure::Nobody(io::Error::new(kind, reason)),
            None => HandshakeFailure::Unreachable(self.failed(reason)),
        }
    }

    /// Does the handshake with a peer that may not be there yet.
    async fn meet(&mut self, target: &Target) -> Result<(Socket, Hello)> {
        let mut nap = FIRST_RETRY;
        loop {
            match self.shake_any(target).await {
                Ok(met) => return Ok(met),
                Err(HandshakeFailure::Failed(e) | HandshakeFailure::Unreachable(e)) => {
                    return Err(e);
                }
                Err(HandshakeFailure::Nobody(e)) => self.absent = Some(e),
            }
            if self.is_over() {
                return Err(self.out_of_time());
            }
            self.nap(nap).await;
            nap = (nap * 2).min(LAST_RETRY);
        }
    }

    /// Waits until every rail has been tried, or time is up. Where only rails are allowed, one of
    /// them must work.
    async fn settle(&self, conn: &Arc<Connection>) -> Result<()> {
        let Some(rails) = &conn.lanes.rails else { return Ok(()) };
        let begun = Instant::now();
        while !rails.is_settled() {
            {
                let _claim = conn.claim();
                conn.progress();
            }
            if conn.is_failed() {
                return Err(conn.lost_error());
            }
            if self.is_over() {
                break;
            }
            let nap = if begun.elapsed() < NO_NAP { Duration::ZERO } else { NAP };
            self.limit.next_look(nap).await;
        }
        if rails.paths_up() == 0 && conn.core.config.transport.needs_rails() {
            let within = match rails.is_settled() {
                true => String::new(),
                false => format!(" within {:?}", self.timeout),
            };
            return Err(self.failed(format!("no rail works{within}: {}", conn.why_no_rails())));
        }
        Ok(())
    }

    /// Tells the peer that the lanes are now a connection, and waits for its answer.
    async fn establish(&self, socket: &mut Socket, lanes: u16) -> Result<()> {
        let word = socket.word(lanes.into());
        let sent = self.send(&mut socket.tcp, &word).await;
        self.settled(sent)?;
        let mut answer = [0; MAX_WORD];
        let answer = &mut answer[..socket.word_len()];
        let mut have = 0;
        while have < answer.len() {
            let received = self.recv(&mut socket.tcp, &mut answer[have..]).await;
            have += self.settled(received)?;
        }
        socket.read_word(answer).map(drop).map_err(|e| self.failed(e))
    }
}

/// Begins to connect to an endpoint.
///
/// # Errors
/// The endpoint is closed, or there is no address.
pub(crate) fn connect(
    core: &Arc<Core>,
    greeting: &Arc<Greeting>,
    target: Target,
) -> Result<Attempt<ConnId>> {
    core.usable()?;
    let no_address = || Error::Invalid("there is no address to connect to".into());
    let addr = *target.addrs.first().ok_or_else(no_address)?;
    let timeout = target.timeout;
    let until = timers::end_unless_zero(timeout);
    let (core, greeting) = (Arc::clone(core), Arc::clone(greeting));
    Ok(Attempt::new(|limit| {
        Connector { core, greeting, limit, addr, until, timeout, absent: None }.connect(target)
    }))
}

impl Connector {
    /// All steps from the first socket to a connection that works.
    async fn connect(mut self, target: Target) -> Result<ConnId> {
        let (mut socket, hello) = if target.awaited {
            self.meet(&target).await?
        } else {
            let met = self.shake_any(&target).await;
            self.settled(met)?
        };
        let (core, greeting) = (Arc::clone(&self.core), Arc::clone(&self.greeting));
        let addr = self.addr;
        let same_host = greeting.same_host(&hello);
        let local = if greeting.local_possible(&core, &hello) {
            let lane = self.join_local(&hello, socket.secret(hello.token)).await;
            lane.inspect_err(|e| tracing::debug!("no local lane to {addr}: {e}")).ok()
        } else {
            None
        };
        let rails = greeting::rails_possible(&core.config, &hello) && local.is_none();
        if !rails && core.config.transport.needs_rails() {
            return Err(self.failed(format!(
                "the peer does without RDMA, and only that is allowed here (UCCL_P2P_TRANSPORT={})",
                core.config.transport
            )));
        }
        if local.is_none() && core.config.transport == Transport::Local {
            return Err(self.failed(
                "only same-host memory is allowed (UCCL_P2P_TRANSPORT=local), and the peer is not reachable so",
            ));
        }
        let peer = greeting::peer_of(&hello, addr, same_host);
        let list = |links| {
            core.add_conn(|id| Arc::new(Connection::new(id, Arc::clone(&core), peer, links)))
        };
        let (conn, word) = match local {
            // Before the `Establish` message, after which the peer copies by itself: a thread that
            // gives memory back has to find this connection in the list.
            Some(lane) => (list(Links::within_host(Arc::new(lane)))?, Some(socket)),
            None => {
                let agreed =
                    greeting.agreed(&core, &hello, Role::Connector, socket.secret(hello.token))?;
                let count =
                    if agreed.fifo { 1 } else { greeting::lanes(&core.config, &hello, same_host) };
                let mut streams = Vec::new();
                for lane_index in 1..count {
                    let kind = HelloKind::JoinLane { token: hello.token, lane_index };
                    let met = self.shake(kind, Some(hello.instance)).await;
                    streams.push(self.settled(met)?.0);
                }
                self.establish(&mut socket, count).await?;
                streams.insert(0, socket);
                (list(lanes::make(&core, streams, &agreed)?)?, None)
            }
        };
        let draft = Draft::of(&conn);
        if let Err(e) = self.complete(&conn, word).await {
            draft.fail(&self.limit, e.clone()).await;
            return Err(e);
        }
        draft.keep();
        Ok(conn.id)
    }

    /// Turns a listed connection into one that works. `word` is the socket for the `Establish`
    /// message, if that has not been sent yet.
    async fn complete(&self, conn: &Arc<Connection>, word: Option<Socket>) -> Result<()> {
        if let Some(mut socket) = word {
            self.establish(&mut socket, 0).await?;
            if conn.is_failed() {
                return Err(conn.lost_error());
            }
        }
        Workers::attach(&self.core, conn)?;
        self.core.offer_memory_to(conn);
        self.settle(conn).await
    }

    /// Makes a lane of shared memory with a process of this host.
    async fn join_local(&self, peer: &Hello, secret: u128) -> Result<LocalLane> {
        let io = |e: io::Error| Error::os("joining a process of this host", e);
        let mut socket = loop {
            match FdSocket::connect(peer.uds_name.as_bytes()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && !self.is_over() => {
                    self.nap(CROWDED).await;
                }
                connected => break connected.map_err(io)?,
            }
        };
        let regions = &self.core.mrs.table;
        let invitation = local::invite(&mut socket, secret, regions).map_err(io)?;
        let answer = loop {
            if let Some(answer) = socket.recv().map_err(io)? {
                break answer;
            }
            self.wait(&socket, PollFlags::IN).await?;
        };
        let pid = socket.peer().map_err(io)?.pid;
        let setup = Setup {
            regions: Arc::clone(regions),
            process: self.greeting.process(&self.core, peer, pid),
            checksum: greeting::checksum(&self.core.config, peer, true),
        };
        invitation.accepted(socket, answer, setup).map_err(io)
    }
}

#[cfg(test)]
mod tests;
