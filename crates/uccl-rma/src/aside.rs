//! Making, joining and ending a channel may take a device long, and so may locking memory. All run
//! on threads of their own, so that the lane and the rest of the connection go on meanwhile.

use std::{
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use uccl_fabric::rail::{Channel, Rail, RailError};

use super::{exports::Exports, rails::Rails};

/// The result of making or joining a channel.
pub(super) enum ChannelResult {
    /// The channel, and whether it could be joined, if it was to be.
    Channel(Box<dyn Channel>, Result<(), RailError>),
    /// There is no channel: the rail's port is down.
    Down,
    /// There is no channel.
    Nothing(RailError),
}

/// A channel that is being made, or joined with the peer's end, or both. Over RoCE the kernel first
/// looks up the peer's link-layer address, and waits a second for an answer.
pub(super) struct ChannelSetup(Option<JoinHandle<ChannelResult>>);

impl ChannelSetup {
    /// Starts to make a channel, if the rail's port is up, after so many attempts that have failed.
    pub(super) fn of(rails: &Arc<Rails>, at: usize, failed: u32) -> Self {
        let open = move |rail: &dyn Rail| match rail.is_up().then(|| rail.open_first(failed)) {
            Some(Ok(channel)) => ChannelResult::Channel(channel, Ok(())),
            Some(Err(e)) => ChannelResult::Nothing(e),
            None => ChannelResult::Down,
        };
        Self::over(rails, at, "uccl-open", open)
    }

    /// Starts to make a channel and to join it with the end that has this address.
    pub(super) fn joined(rails: &Arc<Rails>, at: usize, address: Vec<u8>) -> Self {
        Self::over(rails, at, "uccl-join", move |rail| match rail.open() {
            Ok(channel) => join(channel, &address),
            Err(e) => ChannelResult::Nothing(e),
        })
    }

    /// The device is opened again before, if it was lost.
    fn over(
        rails: &Arc<Rails>,
        at: usize,
        name: &str,
        open: impl FnOnce(&dyn Rail) -> ChannelResult + Send + 'static,
    ) -> Self {
        let rails = Arc::clone(rails);
        Self::by(name, move || {
            rails.reopen(at);
            match rails.all().get(at) {
                Some(rail) => open(&**rail),
                None => {
                    ChannelResult::Nothing(RailError::Unavailable("there is no such rail".into()))
                }
            }
        })
    }

    /// Starts to join the channel with the end that has this address.
    pub(super) fn joining(channel: Box<dyn Channel>, address: Vec<u8>) -> Self {
        Self::by("uccl-join", move || join(channel, &address))
    }

    fn by(name: &str, make: impl FnOnce() -> ChannelResult + Send + 'static) -> Self {
        Self(Builder::new().name(name.into()).spawn(make).ok())
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for it. If no thread could be started, the channel has ended.
    pub(super) fn end(mut self) -> ChannelResult {
        let why = |why: &str| ChannelResult::Nothing(RailError::Unavailable(why.into()));
        let Some(thread) = self.0.take() else { return why("the system has no thread left") };
        // A panic has been reported already.
        thread.join().unwrap_or_else(|_| why("the thread that made it panicked"))
    }
}

fn join(mut channel: Box<dyn Channel>, address: &[u8]) -> ChannelResult {
    let joined = channel.connect(address);
    ChannelResult::Channel(channel, joined)
}

/// A look at whether a rail's port is up. Its firmware may be slow to say.
pub(super) struct PortLook(Option<JoinHandle<bool>>);

impl PortLook {
    pub(super) fn at(rail: &Arc<dyn Rail>) -> Self {
        let rail = Arc::clone(rail);
        Self(Builder::new().name("uccl-port".into()).spawn(move || rail.is_up()).ok())
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for it. True also if that could not be found out.
    pub(super) fn found_up(mut self) -> bool {
        self.0.take().is_none_or(|thread| thread.join().unwrap_or(true))
    }
}

impl Drop for PortLook {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

/// A channel that is being ended. That may take long: Soft-RoCE waits for packets that wait for a
/// neighbour's address, and NICs wait for their firmware.
pub(super) struct ChannelTeardown(Option<JoinHandle<()>>);

impl ChannelTeardown {
    /// Starts to end a channel. It has ended when this look at its port has, too, and the key that
    /// is being made for it.
    pub(super) fn of(channel: Box<dyn Channel>, look: Option<PortLook>, exports: Exports) -> Self {
        exports.give_up();
        Self::by(move || {
            drop(exports);
            drop((channel, look));
        })
    }

    /// Waits for a thread, on another thread, and drops its result.
    pub(super) fn of_made<T: Send + 'static>(thread: JoinHandle<T>) -> Self {
        // A panic has been reported already.
        Self::by(move || drop(thread.join()))
    }

    /// Starts to end a channel that is being made or joined.
    pub(super) fn of_making(making: ChannelSetup) -> Self {
        Self::by(move || drop(making.end()))
    }

    /// An end that is already over.
    pub(super) fn past() -> Self {
        Self(None)
    }

    fn by(end: impl FnOnce() + Send + 'static) -> Self {
        // If no thread can be started, the channel is dropped right here.
        Self(Builder::new().name("uccl-end".into()).spawn(end).ok())
    }

    /// Lets it end when it may, without waiting.
    pub(super) fn leave(mut self) {
        drop(self.0.take());
    }

    /// Whether the channel has ended, so that no memory is touched through it any more.
    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for ChannelTeardown {
    /// Waits for it.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

impl Drop for ChannelSetup {
    /// Waits for the thread: its owner expects that no memory is touched through the channel after
    /// the drop.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}
