//! Attempts over several routes, of which the first answer wins.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use uccl_wire::flow::FlowWelcome;

use crate::attempt::{Attempt, Introduction, Route};

/// Each attempt begins so much later than the one before, unless that has failed.
const STAGGER: Duration = Duration::from_millis(50);
/// The pause before all attempts begin again.
const AGAIN: Duration = Duration::from_millis(200);

/// Attempts to open one stream. Only one greets at a time, so that the peer sees one stream.
pub(crate) struct Race {
    routes: Vec<Route>,
    /// The next route to be tried.
    next: usize,
    next_at: Instant,
    attempts: Vec<Attempt>,
    /// The last error of each address, and how often its host has refused.
    failures: Vec<RouteFailure>,
}

/// The failures of an address.
struct RouteFailure {
    to: SocketAddr,
    last: String,
    refusals: usize,
}

/// The stream that has won.
pub(crate) struct Winner {
    pub(crate) stream: TcpStream,
    pub(crate) to: SocketAddr,
    pub(crate) welcome: FlowWelcome,
}

impl Race {
    pub(crate) fn new(routes: Vec<Route>) -> Self {
        Self {
            routes,
            next: 0,
            next_at: Instant::now(),
            attempts: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Goes on as far as it can; the stream, once the process has answered.
    pub(crate) fn step(&mut self, introduction: &Introduction<'_>) -> Option<Winner> {
        let now = Instant::now();
        self.start(now);
        let mut at = 0;
        let mut speaker = self.attempts.iter().position(Attempt::has_greeted);
        while at < self.attempts.len() {
            let may_greet = speaker.is_none_or(|speaker| speaker == at);
            let attempt = &mut self.attempts[at];
            let result = attempt.step(introduction, may_greet);
            if attempt.has_greeted() {
                speaker = Some(at);
            }
            match result {
                Ok(None) => at += 1,
                Ok(Some(welcome)) => {
                    let Attempt { stream, to, .. } = self.attempts.swap_remove(at);
                    self.attempts.clear();
                    return Some(Winner { stream, to, welcome });
                }
                Err(error) => {
                    let attempt = self.attempts.remove(at);
                    speaker = self.attempts.iter().position(Attempt::has_greeted);
                    self.note(attempt.to, &error);
                    // The next route need not wait for its turn.
                    self.next_at = if self.next < self.routes.len() { now } else { self.next_at };
                }
            }
        }
        None
    }

    /// The last error of an address.
    pub(crate) fn failure(&self, to: SocketAddr) -> Option<&str> {
        self.failures.iter().find(|one| one.to == to).map(|one| one.last.as_str())
    }

    /// How often a host has said that nobody listens at this address.
    pub(crate) fn refusals(&self, to: SocketAddr) -> usize {
        self.failures.iter().find(|one| one.to == to).map_or(0, |one| one.refusals)
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
            Err(error) => self.note(route.1, &error),
        }
    }

    /// Keeps the last error of each address.
    fn note(&mut self, to: SocketAddr, error: &io::Error) {
        let at = self.failures.iter().position(|one| one.to == to).unwrap_or_else(|| {
            self.failures.push(RouteFailure { to, last: String::new(), refusals: 0 });
            self.failures.len() - 1
        });
        let failure = &mut self.failures[at];
        failure.refusals += usize::from(error.kind() == io::ErrorKind::ConnectionRefused);
        failure.last = error.to_string();
    }
}
