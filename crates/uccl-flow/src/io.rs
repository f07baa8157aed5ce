//! Threads that wait for sockets.

pub(crate) mod greeter;
mod incoming;
pub(crate) mod keeper;
mod outgoing;
mod poller;
mod usher;
pub(crate) mod worker;

use poller::Poller;
