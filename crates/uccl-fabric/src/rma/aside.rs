//! What devices may take long over, on threads of their own: meanwhile the lane goes on, and what else a connection has.

use std::thread::{Builder, JoinHandle};

use super::rail::{Channel, RailError};

/// A channel, and whether it is joined.
pub(super) type Joined = (Box<dyn Channel>, Result<(), RailError>);

/// A channel that is being joined with the peer's end. Over RoCE the system asks for the peer's neighbour address
/// first, and waits a second for an answer.
pub(super) struct Joining(Option<JoinHandle<Joined>>);

impl Joining {
    /// Joins it with the end that has this address.
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

    /// Waits for it. None: there was no thread to be had, and the channel has ended.
    pub(super) fn end(mut self) -> Option<Joined> {
        self.0.take()?.join().ok()
    }
}

/// The end of a channel. Soft-RoCE waits for packets that wait for a neighbour, NICs for their firmware.
pub(super) struct Ending(Option<JoinHandle<()>>);

impl Ending {
    /// Ends it.
    pub(super) fn of(channel: Box<dyn Channel>) -> Self {
        Self::by(move || drop(channel))
    }

    /// Ends one that is being joined.
    pub(super) fn of_joining(joining: Joining) -> Self {
        Self::by(move || drop(joining.end()))
    }

    /// One that is over.
    pub(super) fn past() -> Self {
        Self(None)
    }

    fn by(end: impl FnOnce() + Send + 'static) -> Self {
        // Where there is no thread to be had, what it would have ended is dropped right here.
        Self(Builder::new().name("uccl-end".into()).spawn(end).ok())
    }

    /// Whether nothing is touched through it any more.
    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Ending {
    /// Waits for it.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been told already.
            let _ = thread.join();
        }
    }
}

impl Drop for Joining {
    /// Waits for it: whoever drops it expects that nothing is touched any more.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}
