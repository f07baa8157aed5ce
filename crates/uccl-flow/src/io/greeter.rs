//! The thread that accepts streams and reads their greetings.
//!
//! A stranger that connects and says nothing holds up nobody: its place is given up after
//! [`PATIENCE`], or when [`MOST_STRANGERS`] wait.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::event::epoll::EventFlags;
use uccl_wire::flow::{
    FlowHello,
    greeting::{self, Callee, CalleeStep, MOST_GREETING, RANDOM_LEN},
};

use super::{
    Poller,
    usher::{Stranger, Usher, send},
};
use crate::{
    shared::FlowsState,
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

const WAKER: u64 = 0;
const LISTENER: u64 = 1;
const FIRST: u64 = 2;

pub(crate) struct Greeter {
    shared: Arc<FlowsState>,
    usher: Usher,
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
            usher: Usher(Arc::clone(&shared)),
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
        let stranger = Stranger { stream, addr, callee, bytes, filled: 0, since };
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
        let freed = self.poller.remove(&stranger.stream).map_err(|error| error.to_string());
        if let Err(reason) = freed.and_then(|()| self.usher.place(stranger, hello)) {
            tracing::warn!("a stream from {addr} is refused: {reason}");
        }
    }
}
