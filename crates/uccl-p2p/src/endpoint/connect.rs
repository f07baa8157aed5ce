//! Connecting and accepting.

use std::{
    net::SocketAddr,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{Acceptance, ConnectRequest, Endpoint, Interrupt, SLICE};
use crate::{
    drive::{
        attempt::Attempt,
        connect::{self, Target},
        core::Core,
        timers,
    },
    error::{Error, Result},
    ids::ConnId,
    process::Process,
};

/// A connect that was begun: it goes on when [`poll`](Self::poll) is called, and ends with a
/// connection or an error. No thread works for it in between.
///
/// Dropping this [cancels](Self::cancel) a connect that has not ended. A connection that it has
/// made stays; it is the caller's.
pub struct ConnectHandle {
    process: Process,
    core: Arc<Core>,
    attempt: Mutex<Attempt<ConnId>>,
}

impl std::fmt::Debug for ConnectHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectHandle").finish_non_exhaustive()
    }
}

impl ConnectHandle {
    /// Goes on with the connect as far as is possible now. Does not block: it waits for no peer, no
    /// network and no device. Once the result is there, each call returns it again.
    ///
    /// The time that the connect may take is counted from its begin, and its end is seen by this
    /// call. While another thread is in a call of this handle, the answer is `Pending`.
    ///
    /// The error is the one that [`Endpoint::connect_any`] would have returned, or
    /// [`Error::Cancelled`] after [`cancel`](Self::cancel), or [`Error::Closed`] if the endpoint
    /// was closed meanwhile.
    pub fn poll(&self) -> Poll<Result<ConnId>> {
        if let Err(forked) = self.process.check() {
            return Poll::Ready(Err(forked));
        }
        match self.attempt.try_lock() {
            Some(mut attempt) => self.step(&mut attempt, Duration::ZERO),
            None => Poll::Pending,
        }
    }

    /// Waits until the connect has ended. After [`Error::Interrupted`] it can go on.
    ///
    /// # Errors
    /// As those of [`poll`](Self::poll), or the wait was interrupted.
    pub fn wait(&self, interrupt: &mut dyn Interrupt) -> Result<ConnId> {
        loop {
            self.process.check()?;
            if let Poll::Ready(result) = self.step(&mut self.attempt.lock(), SLICE) {
                return result;
            }
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Ends the connect, unless it has ended already. When this returns, nothing is left of it
    /// here: no socket, no memory, no connection. The peer sees its sockets close, and drops its
    /// half.
    ///
    /// May wait for a short time, as [`Endpoint::disconnect`] does.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or the error with which the connect had ended before. A connection
    /// that was made before is returned, and stays.
    pub fn cancel(&self) -> Result<ConnId> {
        self.process.check()?;
        self.attempt.lock().end(Error::Cancelled { by: "the caller".into() })
    }

    /// Does the next steps, which may sleep for as long.
    fn step(&self, attempt: &mut Attempt<ConnId>, at_most: Duration) -> Poll<Result<ConnId>> {
        match self.core.usable() {
            Ok(()) => attempt.step(at_most),
            Err(closed) => Poll::Ready(attempt.end(closed)),
        }
    }
}

impl Drop for ConnectHandle {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A forked child must not end its parent's connections.
            self.attempt.get_mut().forget();
            std::mem::forget(Arc::clone(&self.core));
        }
    }
}

impl Endpoint {
    /// Begins to connect, and returns at once: [`ConnectHandle::poll`] does the steps, from the
    /// first socket on. Any number of them may be under way at a time, in one thread or several.
    ///
    /// Neither this nor `poll` blocks. Names are not looked up: the request has addresses.
    ///
    /// # Errors
    /// There is no address, the endpoint is closed, or the process is a forked child. All else is
    /// an answer of `poll`.
    pub fn begin_connect(&self, request: &ConnectRequest<'_>) -> Result<ConnectHandle> {
        let core = Arc::clone(self.here()?);
        let ConnectRequest { addrs, timeout, instance, waits_for_listener } = *request;
        let target = Target {
            addrs: addrs.into(),
            timeout: timeout.unwrap_or(core.config.timeout),
            meant: instance,
            awaited: waits_for_listener,
        };
        let attempt = Mutex::new(connect::connect(&core, &self.handle.greeting, target)?);
        Ok(ConnectHandle { process: self.handle.process, core, attempt })
    }

    /// Connects to the endpoint that listens at `addr`, within `timeout` (by default the
    /// endpoint's; zero waits for ever).
    pub fn connect(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        self.connect_any(&[addr], timeout, interrupt)
    }

    /// Connects to the endpoint that listens at one of these addresses, such as those that
    /// [`resolve`](super::resolve) found for a name. They are tried in order, all within `timeout`:
    /// while others are left, an address has an equal share of the time.
    pub fn connect_any(
        &self,
        addrs: &[SocketAddr],
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let request = ConnectRequest { timeout, ..ConnectRequest::new(addrs) };
        self.begin_connect(&request)?.wait(interrupt)
    }

    /// Connects as [`connect`](Self::connect) does, to the endpoint of this
    /// [`instance`](Self::instance) and no other: an endpoint that was started anew at this
    /// address, or another one, refuses. Where both ends have a secret, nobody between them can
    /// lead the connection elsewhere.
    ///
    /// # Errors
    /// Another endpoint listens there, or as [`connect`](Self::connect).
    pub fn connect_to(
        &self,
        addr: SocketAddr,
        instance: u64,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let addrs = [addr];
        let instance = Some(instance);
        let request = ConnectRequest { timeout, instance, ..ConnectRequest::new(&addrs) };
        self.begin_connect(&request)?.wait(interrupt)
    }

    /// Connects to an endpoint that may not be listening yet, as when all processes of a job start
    /// at once and know each other's ports. Tries again until `timeout` has passed.
    pub fn connect_when_up(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        self.connect_any_when_up(&[addr], timeout, interrupt)
    }

    /// Connects as [`connect_when_up`](Self::connect_when_up) does, at one of several addresses, as
    /// [`connect_any`](Self::connect_any) tries them.
    pub fn connect_any_when_up(
        &self,
        addrs: &[SocketAddr],
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let new = ConnectRequest::new(addrs);
        let request = ConnectRequest { timeout, waits_for_listener: true, ..new };
        self.begin_connect(&request)?.wait(interrupt)
    }

    /// Waits until a peer has connected, and returns its connection. `timeout` is by default the
    /// endpoint's for transfers; zero waits for ever. [`try_accept`](Self::try_accept) does not
    /// wait.
    pub fn accept(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Acceptance> {
        let core = self.here()?;
        let timeout = timeout.unwrap_or(self.config().transfer_timeout);
        let until = timers::end_unless_zero(timeout);
        loop {
            core.usable()?;
            let mut accepts = core.accepts.lock();
            if let Some(accepted) = accepts.waiting.pop_front() {
                return Ok(accepted);
            }
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::Timeout(timeout));
            }
            core.accepted.wait_for(&mut accepts, left.min(SLICE));
            drop(accepts);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// The connection of a peer that has connected, if there is one that no call has returned yet.
    /// Does not block: for callers that poll.
    ///
    /// # Errors
    /// The endpoint is closed, or the process is a forked child.
    pub fn try_accept(&self) -> Result<Option<Acceptance>> {
        let core = self.here()?;
        core.usable()?;
        Ok(core.accepts.lock().waiting.pop_front())
    }

    /// From now on every incoming connection is taken as it comes, and `accept` does not return it.
    pub fn start_passive_accept(&self) -> Result<()> {
        let core = self.here()?;
        core.usable()?;
        let mut accepts = core.accepts.lock();
        accepts.passive = true;
        accepts.waiting.clear();
        Ok(())
    }
}
