//! The listeners of an endpoint. After an accept that failed they are left alone for a while.

use std::{
    io, mem,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::event::epoll;
use uccl_local::fdpass::{FdListener, FdSocket};

use super::watch;
use crate::error::Result;

/// How long to stop accepting after an accept failed. Most likely there were no descriptors left,
/// and others may close some.
const PAUSE: Duration = Duration::from_millis(50);
/// How often a failed accept is logged.
const WARN: Duration = Duration::from_secs(30);

pub(super) const TCP: u64 = 1 << 40;
pub(super) const UDS: u64 = 1 << 41;

/// The outcome of one accept.
pub(super) enum Accept<T> {
    Stream(T),
    /// There is no stream, and the next accept may find one.
    Again,
    /// No stream waits, or a pause has begun.
    Nothing,
}

pub(super) struct Listeners {
    tcp: TcpListener,
    uds: Option<FdListener>,
    /// The listeners with waiting connections, by their tokens.
    waited_at: u64,
    /// No accept before this time; until then the listeners are not watched.
    pub(super) paused_until: Option<Instant>,
    warned: Option<Instant>,
}

impl Listeners {
    pub(super) fn new(tcp: TcpListener, uds: Option<FdListener>) -> Self {
        Self { tcp, uds, waited_at: 0, paused_until: None, warned: None }
    }

    /// Makes the listeners wake the worker.
    pub(super) fn attach(&self, epoll: &OwnedFd) -> Result<()> {
        watch(epoll, self.tcp.as_fd(), TCP)?;
        if let Some(uds) = &self.uds {
            watch(epoll, uds.as_fd(), UDS)?;
        }
        Ok(())
    }

    fn detach(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, self.tcp.as_fd());
        if let Some(uds) = &self.uds {
            let _ = epoll::delete(epoll, uds.as_fd());
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Notes that connections wait at the listener of this token.
    pub(super) fn ready(&mut self, token: u64) {
        self.waited_at |= token;
    }

    /// Takes out the tokens of the listeners at which connections wait.
    pub(super) fn take_ready(&mut self) -> u64 {
        mem::take(&mut self.waited_at)
    }

    pub(super) fn accept_tcp(&mut self, epoll: &OwnedFd) -> Accept<(TcpStream, SocketAddr)> {
        match self.tcp.accept() {
            Ok(accepted) => Accept::Stream(accepted),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Accept::Nothing,
            Err(e) => self.failed(epoll, &e),
        }
    }

    pub(super) fn accept_uds(&mut self, epoll: &OwnedFd) -> Accept<FdSocket> {
        match self.uds.as_ref().map_or(Ok(None), FdListener::accept) {
            Ok(Some(socket)) => Accept::Stream(socket),
            Ok(None) => Accept::Nothing,
            Err(e) => self.failed(epoll, &e),
        }
    }

    /// Stops accepting for a while, unless the error is of one stream only: otherwise a connection
    /// that waits at a listener would wake the worker again at once.
    fn failed<T>(&mut self, epoll: &OwnedFd, e: &io::Error) -> Accept<T> {
        if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) {
            return Accept::Again;
        }
        let now = Instant::now();
        self.paused_until = Some(now + PAUSE);
        self.detach(epoll);
        if self.warned.is_none_or(|warned| now - warned >= WARN) {
            self.warned = Some(now);
            tracing::warn!("cannot accept connections, which is tried again: {e}");
        }
        Accept::Nothing
    }

    /// Ends a pause that is over.
    pub(super) fn end_pause(&mut self, epoll: &OwnedFd) {
        if self.paused_until.is_some_and(|until| until <= Instant::now()) {
            self.paused_until = match self.attach(epoll) {
                Ok(()) => None,
                Err(e) => {
                    self.detach(epoll);
                    tracing::debug!("nobody is accepted yet: {e}");
                    Some(Instant::now() + PAUSE)
                }
            };
        }
    }
}
