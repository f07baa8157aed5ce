//! Threads that wait for sockets.

pub(crate) mod greeter;
mod incoming;
mod outgoing;
mod poller;
mod worker;

pub(crate) use poller::{Poller, Waker};
pub(crate) use worker::{Mail, Port, Worker};
