//! What may take long and is waited for by nobody, on a thread of its own.

use std::thread::{Builder, JoinHandle};

use super::rail::Channel;

/// The end of a channel.
///
/// Devices may take seconds over it: soft-RoCE waits for packets that wait for a neighbour, NICs for their firmware.
/// Meanwhile the lane, and what else a connection has, goes on.
pub(super) struct Ending(Option<JoinHandle<()>>);

impl Ending {
    /// Ends it.
    pub(super) fn of(channel: Box<dyn Channel>) -> Self {
        // What is not sent is dropped: where there is no thread to be had, the channel ends right here.
        let drop = move || drop(channel);
        Self(Builder::new().name("uccl-end".into()).spawn(drop).ok())
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
            // A panic in a device's library has been told already.
            let _ = thread.join();
        }
    }
}
