//! Joining and ending a channel may take a device long. Both run on threads of their own, so that the lane and the rest
//! of the connection go on meanwhile.

use std::thread::{Builder, JoinHandle};

use uccl_fabric::rail::{Channel, RailError};

/// A channel, and whether joining it succeeded.
pub(super) type Joined = (Box<dyn Channel>, Result<(), RailError>);

/// A channel that is being joined with the peer's end. Over RoCE the kernel first looks up the peer's link-layer
/// address, and waits a second for an answer.
pub(super) struct Joining(Option<JoinHandle<Joined>>);

impl Joining {
    /// Starts to join the channel with the end that has this address.
    pub(super) fn of(mut channel: Box<dyn Channel>, address: Vec<u8>) -> Self {
        let join = move || {
            let joined = channel.connect(&address);
            (channel, joined)
        };
        Self(Builder::new().name("uccl-join".into()).spawn(join).ok())
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the join. None if no thread could be started; then the channel has ended.
    pub(super) fn end(mut self) -> Option<Joined> {
        self.0.take()?.join().ok()
    }
}

/// A channel that is being ended. That may take long: Soft-RoCE waits for packets that wait for a neighbour's address,
/// and NICs wait for their firmware.
pub(super) struct Ending(Option<JoinHandle<()>>);

impl Ending {
    /// Starts to end a channel.
    pub(super) fn of(channel: Box<dyn Channel>) -> Self {
        Self::by(move || drop(channel))
    }

    /// Starts to end a channel that is being joined.
    pub(super) fn of_joining(joining: Joining) -> Self {
        Self::by(move || drop(joining.end()))
    }

    /// An end that is already over.
    pub(super) fn past() -> Self {
        Self(None)
    }

    fn by(end: impl FnOnce() + Send + 'static) -> Self {
        // If no thread can be started, the channel is dropped right here.
        Self(Builder::new().name("uccl-end".into()).spawn(end).ok())
    }

    /// Whether the channel has ended, so that no memory is touched through it any more.
    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Ending {
    /// Waits for it.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

impl Drop for Joining {
    /// Waits for the join: whoever drops this expects that no memory is touched through the channel afterwards.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}
