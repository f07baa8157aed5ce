//! The thread that accepts streams and reads their greetings.
//!
//! A stranger that connects and says nothing holds up nobody: its place is given up after
//! [`PATIENCE`], or when [`MOST_STRANGERS`] wait.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    ops::RangeInclusive,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::event::epoll::EventFlags;
use uccl_wire::flow::{
    FlowHello, FlowWelcome, Purpose, Status,
    greeting::{self, Callee, CalleeStep, MOST_GREETING, RANDOM_LEN},
};

use super::Poller;
use crate::{
    error::Peer,
    port::Mail,
    shared::FlowsState,
    sink::Sink,
    socket::{self, Span},
};

/// The longest time that a stream may take to greet.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most streams that have not greeted. The oldest goes when one more comes.
const MOST_STRANGERS: usize = 512;
/// The pause after a failure to accept, as when the process has no more descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest time between two looks at the signs of life of peers.
const MOST_CHECK_PAUSE: Duration = Duration::from_millis(500);

/// The longest chunk of a peer, and all lengths that they may have.
pub(super) const MOST_CHUNK_LEN: u64 = 4 << 20;
const CHUNK_LENS: RangeInclusive<u64> = 4 << 10..=MOST_CHUNK_LEN;

const WAKER: u64 = 0;
const LISTENER: u64 = 1;
const FIRST: u64 = 2;

/// A stream that has not greeted yet.
struct Stranger {
    stream: TcpStream,
    addr: SocketAddr,
    callee: Callee,
    bytes: [u8; MOST_GREETING],
    filled: usize,
    since: Instant,
    number: u64,
}

pub(crate) struct Greeter {
    shared: Arc<FlowsState>,
    listener: TcpListener,
    poller: Poller,
    strangers: HashMap<u64, Stranger>,
    /// Numbers of strangers, the oldest first; some have gone.
    order: VecDeque<u64>,
    next: u64,
    /// When accepting goes on after a failure.
    pause: Option<Instant>,
    /// When peers are next looked at.
    checks_at: Instant,
}

impl Greeter {
    pub(crate) fn new(shared: Arc<FlowsState>, listener: TcpListener) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&shared.greeter, WAKER, EventFlags::IN)?;
        poller.add(&listener, LISTENER, EventFlags::IN)?;
        Ok(Self {
            shared,
            listener,
            poller,
            strangers: HashMap::new(),
            order: VecDeque::new(),
            next: FIRST,
            pause: None,
            checks_at: Instant::now(),
        })
    }

    /// Accepts streams until the flows end.
    ///
    /// # Errors
    /// When the system does not let it wait.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            let timeout = self.timeout();
            self.poller.wait(timeout, &mut ready)?;
            for token in ready.drain(..) {
                self.on_event(token);
            }
            self.on_time();
        }
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let oldest = self.order.front().map(|_| PATIENCE / 4);
        let pause = self.pause.map(|until| until.saturating_duration_since(now));
        let check = (!self.shared.visitors.lock().is_empty()).then_some(self.check_pause());
        oldest.into_iter().chain(pause).chain(check).min()
    }

    /// The time between two looks at peers.
    fn check_pause(&self) -> Duration {
        MOST_CHECK_PAUSE.min(self.shared.settings.limit / 8)
    }

    fn on_event(&mut self, token: u64) {
        match token {
            WAKER => self.shared.greeter.clear(),
            LISTENER => self.accept(),
            token => self.hear(token),
        }
    }

    fn on_time(&mut self) {
        let now = Instant::now();
        if now >= self.checks_at {
            self.checks_at = now + self.check_pause();
            self.shared.check_peers();
        }
        if self.pause.is_some_and(|until| until <= now) {
            self.pause = None;
            match self.poller.add(&self.listener, LISTENER, EventFlags::IN) {
                Ok(()) => {}
                Err(_) => self.pause = Some(now + PAUSE),
            }
        }
        while let Some(token) = self.order.front().copied() {
            match self.strangers.get(&token) {
                Some(stranger) if now - stranger.since < PATIENCE => break,
                Some(_) => self.refuse(token, "it said nothing in time"),
                None => {}
            }
            self.order.pop_front();
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, addr)) => {
                    if let Err(error) = self.admit(stream, addr) {
                        tracing::warn!("a stream from {addr} is refused: {error}");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!("flows accept no connection for {PAUSE:?}: {error}");
                    if self.poller.remove(&self.listener).is_ok() {
                        self.pause = Some(Instant::now() + PAUSE);
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, addr: SocketAddr) -> io::Result<()> {
        socket::tune(&stream, self.shared.settings.limit)?;
        while self.strangers.len() >= MOST_STRANGERS {
            let Some(oldest) = self.order.pop_front() else { break };
            self.refuse(oldest, "too many streams that say nothing");
        }
        let token = self.next;
        self.next += 1;
        self.poller.add(&stream, token, EventFlags::IN)?;
        let since = Instant::now();
        let mut random = [0; RANDOM_LEN];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let callee = Callee::new(self.shared.settings.psk.clone(), random);
        let bytes = [0; MOST_GREETING];
        let stranger = Stranger { stream, addr, callee, bytes, filled: 0, since, number: token };
        self.strangers.insert(token, stranger);
        self.order.push_back(token);
        Ok(())
    }

    fn refuse(&mut self, token: u64, reason: &str) {
        if let Some(stranger) = self.strangers.remove(&token) {
            tracing::warn!("a stream from {} is refused: {reason}", stranger.addr);
        }
    }

    fn hear(&mut self, token: u64) {
        let Some(stranger) = self.strangers.get_mut(&token) else { return };
        let needed = stranger.callee.needed();
        let span = Span::of_mut(&mut stranger.bytes[..needed]).after(stranger.filled);
        // SAFETY: the rest of the greeting's own bytes, which nothing else uses here.
        match unsafe { socket::recv(&stranger.stream, &[span]) } {
            Ok(None) => {}
            Ok(Some(0)) => self.refuse(token, "it ended before its greeting"),
            Err(error) => self.refuse(token, &error.to_string()),
            Ok(Some(count)) => {
                stranger.filled += count;
                if stranger.filled == needed {
                    self.go_on(token);
                }
            }
        }
    }

    /// A part of a greeting has come.
    fn go_on(&mut self, token: u64) {
        let Some(stranger) = self.strangers.get_mut(&token) else { return };
        match stranger.callee.feed(&stranger.bytes[..stranger.filled]) {
            // The rest follows, perhaps with an event of its own.
            Ok(CalleeStep::More) => self.hear(token),
            Ok(CalleeStep::Send(bytes)) => {
                stranger.filled = 0;
                if let Err(error) = send(&stranger.stream, &bytes) {
                    self.refuse(token, &error);
                }
            }
            Ok(CalleeStep::Hello(hello)) => self.greet(token, &hello),
            Err(error) => {
                if let Some(bytes) = greeting::refusal(&error, self.shared.instance)
                    && let Err(error) = send(&stranger.stream, &bytes)
                {
                    tracing::debug!("a stream that is refused hears nothing of it: {error}");
                }
                self.refuse(token, &error.to_string());
            }
        }
    }

    fn greet(&mut self, token: u64, hello: &FlowHello) {
        let Some(stranger) = self.strangers.remove(&token) else { return };
        let addr = stranger.addr;
        if let Err(reason) = self.place(stranger, hello) {
            tracing::warn!("a stream from {addr} is refused: {reason}");
        }
    }

    /// Gives a stream that has greeted to its flow or listener.
    fn place(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        self.poller.remove(&stranger.stream).map_err(|error| error.to_string())?;
        match hello.purpose {
            Purpose::Flow => self.place_flow(stranger, hello),
            Purpose::Bulk if hello.key == self.shared.key => {
                self.answer(&stranger, Status::Taken)?;
                self.place_bulk(stranger, hello);
                Ok(())
            }
            Purpose::Resume if hello.key == self.shared.key => self.place_resumed(stranger, hello),
            Purpose::Bulk | Purpose::Resume => {
                self.answer(&stranger, Status::UnknownKey)?;
                Err("its key is not this process's".into())
            }
        }
    }

    fn place_flow(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        // A listener that closes meanwhile would not see the flow: it waits for this.
        let listeners = self.shared.listeners.lock();
        let Some(arrivals) = listeners.get(&hello.key) else {
            self.answer(&stranger, Status::UnknownKey)?;
            return Err("its key is unknown: another job's handle, or a closed listener's".into());
        };
        if arrivals.is_full() || !CHUNK_LENS.contains(&hello.chunk_len) {
            self.answer(&stranger, Status::Full)?;
            return Err("too many connections wait for accept, or its chunks are too long".into());
        }
        let device = arrivals.device().to_owned();
        let peer = Peer { instance: hello.instance, addr: Some(stranger.addr), device };
        let mut sinks = self.shared.sinks.write();
        if let Some(sink) = sinks.get(&hello.flow) {
            // The peer has not heard the answer, and asks again.
            if sink.peer.instance != hello.instance {
                return Err("another process has a flow of that name".into());
            }
            let mut state = sink.state.lock();
            if state.received > 0 {
                return Err("its flow has another stream".into());
            }
            self.answer(&stranger, Status::Taken)?;
            state.stream = Some(stranger.stream);
            return Ok(());
        }
        self.answer(&stranger, Status::Taken)?;
        self.shared.visitors.lock().add(hello.instance);
        let sink = Sink::new(stranger.stream, peer, hello.flow, hello.chunk_len);
        sinks.insert(hello.flow, Arc::clone(&sink));
        drop(sinks);
        arrivals.push(sink);
        Ok(())
    }

    /// Gives a flow another own stream.
    fn place_resumed(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        let sink = self.shared.sinks.read().get(&hello.flow).cloned();
        let sink = sink.filter(|sink| sink.peer.instance == hello.instance);
        let Some(sink) = sink else {
            self.answer(&stranger, Status::UnknownFlow)?;
            return Err("its flow is not known, or has ended".into());
        };
        let mut state = sink.state.lock();
        if state.failure.is_some() {
            return self.answer(&stranger, Status::UnknownFlow);
        }
        if hello.chunk_len <= state.round {
            return Err("a later stream has taken its place".into());
        }
        self.welcome(&stranger, Status::Taken, state.received)?;
        self.shared.visitors.lock().hear(hello.instance);
        state.round = hello.chunk_len;
        state.stream = Some(stranger.stream);
        Ok(())
    }

    fn place_bulk(&self, stranger: Stranger, hello: &FlowHello) {
        self.shared.visitors.lock().hear(hello.instance);
        let workers = &self.shared.workers;
        let worker = &workers[(stranger.number % workers.len() as u64) as usize];
        worker.send(Mail::InboundStream { stream: stranger.stream, instance: hello.instance });
    }

    fn answer(&self, stranger: &Stranger, status: Status) -> Result<(), String> {
        self.welcome(stranger, status, 0)
    }

    fn welcome(&self, stranger: &Stranger, status: Status, received: u64) -> Result<(), String> {
        let (key, instance) = (self.shared.key, self.shared.instance);
        let key = if status == Status::Taken { key } else { [0; 16] };
        let welcome = FlowWelcome { status, key, instance, received };
        send(&stranger.stream, &stranger.callee.answer(&welcome))
    }
}

/// A fresh socket has room for a part of a greeting.
fn send(stream: &TcpStream, bytes: &[u8]) -> Result<(), String> {
    // SAFETY: the bytes live through the call.
    match unsafe { socket::send(stream, &[Span::of(bytes)]) } {
        Ok(Some(count)) if count == bytes.len() => Ok(()),
        Ok(_) => Err("it does not take the answer".into()),
        Err(error) => Err(error.to_string()),
    }
}
