//! A thread that carries chunks: streams of several bundles, in both directions.

use std::{
    collections::HashMap,
    io,
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::event::epoll::EventFlags;
use uccl_wire::flow::{FlowHello, Purpose};

use super::{Poller, incoming::InboundStream, outgoing::OutboundStream};
use crate::{
    attempt::{Attempt, Introduction},
    bundle::Bundle,
    port::{Mail, Port},
    shared::FlowsState,
    socket,
};

/// The time between two looks at the clock while there is work.
const TICK: Duration = Duration::from_millis(5);

const WAKER: u64 = 0;

/// A stream that is being opened.
struct StreamAttempt {
    bundle: Arc<Bundle>,
    index: usize,
    attempt: Option<Attempt>,
}

pub(crate) struct Worker {
    shared: Arc<FlowsState>,
    port: Arc<Port>,
    poller: Poller,
    outgoing: HashMap<u64, OutboundStream>,
    incoming: HashMap<u64, InboundStream>,
    openings: Vec<StreamAttempt>,
    next: u64,
    /// Streams that did not get through in their turn.
    unfinished: Vec<u64>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<FlowsState>, at: usize) -> io::Result<Self> {
        let port = Arc::clone(&shared.workers[at]);
        let poller = Poller::new()?;
        poller.add(port.bell(), WAKER, EventFlags::IN)?;
        Ok(Self {
            shared,
            port,
            poller,
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            openings: Vec::new(),
            next: WAKER + 1,
            unfinished: Vec::new(),
        })
    }

    /// Carries streams until the flows end.
    ///
    /// # Errors
    /// When the system does not let it wait.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        let mut has_work = false;
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            let timeout = self.timeout(has_work);
            self.wait(timeout, &mut ready)?;
            self.port.take().into_iter().for_each(|mail| self.on_mail(mail));
            ready.append(&mut self.unfinished);
            for token in ready.drain(..) {
                self.on_event(token);
            }
            self.open();
            has_work = self.on_time();
            self.write();
        }
        Ok(())
    }

    /// Looks for events and work for a moment, and sleeps if there is none.
    fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<u64>) -> io::Result<()> {
        let (bell, begun) = (self.port.bell(), Instant::now());
        let mut may_sleep = timeout != Some(Duration::ZERO) && !bell.is_rung();
        while may_sleep && begun.elapsed() < self.shared.settings.spin {
            self.poller.wait(Some(Duration::ZERO), ready)?;
            if !ready.is_empty() {
                return Ok(());
            }
            std::hint::spin_loop();
            may_sleep = !bell.is_rung();
        }
        if !may_sleep || !bell.begin_sleep() {
            return self.poller.wait(Some(Duration::ZERO), ready);
        }
        let waited = self.poller.wait(timeout, ready);
        bell.end_sleep();
        waited
    }

    fn timeout(&self, has_work: bool) -> Option<Duration> {
        match () {
            () if !self.unfinished.is_empty() => Some(Duration::ZERO),
            () if has_work || self.openings.iter().any(StreamAttempt::is_wanted) => Some(TICK),
            // Pings go out in time.
            () if !self.outgoing.is_empty() => Some(self.shared.settings.limit / 8),
            () => None,
        }
    }

    fn on_mail(&mut self, mail: Mail) {
        match mail {
            Mail::Open { bundle, index } => {
                self.openings.push(StreamAttempt { bundle, index, attempt: None });
            }
            Mail::InboundStream { stream, instance } => {
                let token = self.token();
                let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
                if let Err(error) = self.poller.add(&stream, token, flags) {
                    tracing::warn!("a stream of a peer cannot be waited for: {error}");
                    return;
                }
                let stream = InboundStream::new(Arc::clone(&self.shared), instance, stream);
                self.incoming.insert(token, stream);
                self.unfinished.push(token);
            }
            Mail::Posted { instance, flow, posted } => {
                for (token, stream) in &mut self.incoming {
                    if stream.instance == instance {
                        stream.note_posted(flow, posted);
                        self.unfinished.push(*token);
                    }
                }
            }
        }
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn on_event(&mut self, token: u64) {
        if token == WAKER {
            self.port.bell().hear();
        } else if let Some(stream) = self.incoming.get_mut(&token) {
            match stream.read() {
                Ok(true) => self.unfinished.push(token),
                Ok(false) => {}
                Err(cause) => {
                    tracing::debug!("a stream of process {:016x} ends: {cause}", stream.instance);
                    self.incoming.remove(&token);
                }
            }
        } else if let Some(stream) = self.outgoing.get_mut(&token)
            && let Err(cause) = stream.on_event()
        {
            self.lose(token, &cause);
        }
    }

    /// Sends over all streams, and closes those that are to be closed.
    fn write(&mut self) {
        let tokens: Vec<_> = self.outgoing.keys().copied().collect();
        for token in tokens {
            let Some(stream) = self.outgoing.get_mut(&token) else { continue };
            if stream.bundle.is_closed() {
                self.outgoing.remove(&token);
                continue;
            }
            let result = if stream.bundle.is_reset(stream.index) {
                Err("it stood still, or its flow was closed".into())
            } else {
                stream.write()
            };
            match result {
                Ok(true) => self.unfinished.push(token),
                Ok(false) => {}
                Err(cause) => self.lose(token, &cause),
            }
        }
    }

    /// The stream has ended, and is opened again.
    fn lose(&mut self, token: u64, cause: &str) {
        let Some(OutboundStream { bundle, index, socket, .. }) = self.outgoing.remove(&token)
        else {
            return;
        };
        socket::reset(&socket);
        tracing::debug!("stream {index} to {} is replaced: {cause}", bundle.target.peer);
        bundle.on_lost(index, cause);
        self.openings.push(StreamAttempt { bundle, index, attempt: None });
    }

    fn open(&mut self) {
        let mut waiting = std::mem::take(&mut self.openings);
        waiting.retain_mut(|opening| {
            if opening.bundle.is_closed() {
                return false;
            }
            match opening.step(&self.shared) {
                Ok(None) => true,
                Ok(Some(stream)) => {
                    let (bundle, index) = (Arc::clone(&opening.bundle), opening.index);
                    self.add_outgoing(bundle, index, stream)
                }
                Err(error) => {
                    opening.fail(&error);
                    true
                }
            }
        });
        self.openings = waiting;
    }

    /// Takes a stream that is open. True if that fails.
    fn add_outgoing(&mut self, bundle: Arc<Bundle>, index: usize, stream: TcpStream) -> bool {
        let token = self.token();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        if let Err(error) = self.poller.add(&stream, token, flags) {
            tracing::warn!("a stream to {} cannot be waited for: {error}", bundle.target.peer);
            bundle.on_lost(index, &error.to_string());
            return true;
        }
        self.outgoing.insert(token, OutboundStream::new(bundle, index, stream));
        false
    }

    /// Has all bundles look at the clock. True while one has work.
    fn on_time(&self) -> bool {
        let mut seen: Vec<&Arc<Bundle>> = Vec::new();
        let open = self.openings.iter().map(|opening| &opening.bundle);
        for bundle in self.outgoing.values().map(|stream| &stream.bundle).chain(open) {
            if !seen.iter().any(|other| Arc::ptr_eq(other, bundle)) {
                seen.push(bundle);
            }
        }
        seen.into_iter().fold(false, |has_work, bundle| bundle.on_time() | has_work)
    }
}

impl StreamAttempt {
    fn is_wanted(&self) -> bool {
        self.bundle.wants(self.index)
    }

    /// Goes on; the stream, once it is open.
    fn step(&mut self, shared: &FlowsState) -> io::Result<Option<TcpStream>> {
        if self.attempt.is_none() {
            let Some(route) = self.bundle.choose_route(self.index) else { return Ok(None) };
            self.attempt = Some(Attempt::begin(route)?);
        }
        let hello = FlowHello {
            purpose: Purpose::Bulk,
            key: self.bundle.target.key,
            instance: shared.instance,
            flow: self.index as u64,
            chunk_len: shared.settings.chunk_len as u64,
        };
        let Some(attempt) = &mut self.attempt else { return Ok(None) };
        let instance = self.bundle.target.peer.instance;
        let introduction = Introduction { hello, instance, psk: shared.settings.psk.as_ref() };
        if attempt.step(&introduction, true)?.is_none() {
            return Ok(None);
        }
        let Some(attempt) = self.attempt.take() else { return Ok(None) };
        socket::tune(&attempt.stream, shared.settings.limit)?;
        Ok(Some(attempt.stream))
    }

    fn fail(&mut self, error: &io::Error) {
        self.attempt = None;
        self.bundle.on_lost(self.index, &error.to_string());
    }
}
