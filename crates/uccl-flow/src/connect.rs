//! Connecting to a listener, without waiting.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use uccl_wire::flow::{FlowHello, FlowWelcome, Handle, Purpose};

use crate::{
    attempt::{Attempt, Route},
    error::{FlowError, Peer},
    flows::{Flows, random},
    send::SendFlow,
    socket,
};

/// Each attempt begins so much later than the one before, unless that has failed.
const STAGGER: Duration = Duration::from_millis(50);
/// The pause before all attempts begin again.
const AGAIN: Duration = Duration::from_millis(200);

/// A connection that is being made. Dropping it ends it.
pub struct Connect {
    flows: Flows,
    handle: Handle,
    peer: Peer,
    hello: FlowHello,
    routes: Vec<Route>,
    /// The next route to be tried.
    next: usize,
    next_at: Instant,
    attempts: Vec<Attempt>,
    begun: Instant,
    failures: Vec<(SocketAddr, String)>,
    is_done: bool,
}

impl Connect {
    /// Begins to connect to a listener, from a device by its number in the settings. Every address
    /// of the handle is tried, the listener's device's first, from this device's addresses first.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn begin(flows: &Flows, handle: &Handle, device: usize) -> Result<Self, FlowError> {
        let own = flows.device(device)?;
        let flow = u64::from_le_bytes(random()?);
        let peer = Peer {
            instance: handle.instance,
            addr: handle.sockets().next(),
            device: own.name.clone(),
        };
        let settings = flows.settings();
        let now = Instant::now();
        Ok(Self {
            hello: FlowHello {
                purpose: Purpose::Flow,
                key: handle.nonce,
                instance: flows.shared().instance,
                flow,
                chunk_len: settings.chunk_len as u64,
            },
            routes: routes(&own.addrs, handle),
            flows: flows.clone(),
            handle: handle.clone(),
            peer,
            next: 0,
            next_at: now,
            attempts: Vec::new(),
            begun: now,
            failures: Vec::new(),
            is_done: false,
        })
    }

    /// The flow, once the peer has taken it; `None` before. The peer need not have called
    /// [`Listener::try_accept`](crate::Listener::try_accept).
    ///
    /// # Errors
    /// When no address has answered within the settings' limit, or after it has given the flow.
    pub fn poll(&mut self) -> Result<Option<SendFlow>, FlowError> {
        if self.is_done {
            return Err(FlowError::Closed);
        }
        let now = Instant::now();
        self.start(now);
        let mut at = 0;
        // Only one attempt greets at a time, so that the peer sees one flow.
        let mut speaker = self.attempts.iter().position(Attempt::has_greeted);
        while at < self.attempts.len() {
            let may_greet = speaker.is_none_or(|speaker| speaker == at);
            let attempt = &mut self.attempts[at];
            let result = attempt.step(&self.hello, self.handle.instance, may_greet);
            if attempt.has_greeted() {
                speaker = Some(at);
            }
            match result {
                Ok(None) => at += 1,
                Ok(Some(welcome)) => return self.finish(at, welcome).map(Some),
                Err(error) => {
                    let attempt = self.attempts.remove(at);
                    speaker = self.attempts.iter().position(Attempt::has_greeted);
                    self.note(attempt.to, error.to_string());
                    // The next route need not wait for its turn.
                    self.next_at = if self.next < self.routes.len() { now } else { self.next_at };
                }
            }
        }
        if now - self.begun < self.flows.settings().limit {
            return Ok(None);
        }
        self.is_done = true;
        Err(self.unreachable(now))
    }

    fn start(&mut self, now: Instant) {
        if now < self.next_at || self.routes.is_empty() {
            return;
        }
        if self.next == self.routes.len() {
            self.next = 0;
        }
        let route = self.routes[self.next];
        self.next += 1;
        self.next_at = now + if self.next == self.routes.len() { AGAIN } else { STAGGER };
        match Attempt::begin(route) {
            Ok(attempt) => self.attempts.push(attempt),
            Err(error) => self.note(route.1, error.to_string()),
        }
    }

    fn finish(&mut self, at: usize, welcome: FlowWelcome) -> Result<SendFlow, FlowError> {
        let attempt = self.attempts.swap_remove(at);
        self.attempts.clear();
        self.is_done = true;
        let limit = self.flows.settings().limit;
        socket::tune(&attempt.stream, limit).map_err(FlowError::system("setsockopt"))?;
        let peer = Peer { addr: Some(attempt.to), ..self.peer.clone() };
        tracing::debug!("a flow to {peer} goes from {:?}", attempt.stream.local_addr());
        let bundle = self.flows.shared().join(&peer, welcome.key, || self.bulk_routes());
        Ok(SendFlow::new(self.flows.clone(), attempt.stream, bundle, self.hello.flow))
    }

    /// Routes for streams of chunks: every address of every device to every address of the peer.
    fn bulk_routes(&self) -> Vec<Route> {
        let all = self.flows.settings().devices.iter().flat_map(|device| &device.addrs);
        routes(&all.copied().collect::<Vec<_>>(), &self.handle)
    }

    /// Keeps the last error of each address.
    fn note(&mut self, to: SocketAddr, error: String) {
        match self.failures.iter_mut().find(|(addr, _)| *addr == to) {
            Some((_, last)) => *last = error,
            None => self.failures.push((to, error)),
        }
    }

    fn unreachable(&self, now: Instant) -> FlowError {
        let mut tried = String::new();
        for to in self.handle.sockets() {
            let failure = self.failures.iter().find(|(addr, _)| *addr == to);
            let error = failure.map_or("no answer", |(_, error)| error.as_str());
            let _ = write!(tried, "{}{to}: {error}", if tried.is_empty() { "" } else { "; " });
        }
        FlowError::Unreachable { peer: self.peer.clone(), waited: now - self.begun, tried }
    }
}

/// Routes from this device's addresses to each of the handle's, and then those that the kernel
/// chooses.
fn routes(own: &[IpAddr], handle: &Handle) -> Vec<Route> {
    let mut found = Vec::new();
    for to in handle.sockets() {
        let fits = |ip: &&IpAddr| {
            ip.is_ipv4() == to.is_ipv4() && ip.is_loopback() == to.ip().is_loopback()
        };
        found.extend(own.iter().filter(fits).map(|ip| (Some(*ip), to)));
    }
    found.extend(handle.sockets().map(|to| (None, to)));
    found
}
