//! Threads that wait for sockets.

pub(crate) mod greeter;
mod poller;

pub(crate) use poller::{Poller, Waker};
