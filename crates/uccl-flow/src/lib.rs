//! Flows between processes: a receiver posts memory, a sender pushes messages into it, over TCP.
//!
//! ```text
//!   sender's process                                                   receiver's process
//!   Connect::begin(flows, ..)     <--- Handle, by any way --------- Listener::listen(flows, ..)
//!   poll() -> SendFlow               ---- the flow's own stream -----> try_accept() -> RecvFlow
//!   post(message) -> Slot                                              post([buffer]) -> Slot
//!   test(slot) -> length                                               test(slot) -> length
//!   close()                                                            close()
//! ```
//!
//! Messages of a flow meet its receives in the order of posting. No call blocks: `post` answers
//! `None` when there is no room, `test`, `poll` and `try_accept` answer `None` when nothing has
//! happened, and each makes progress. A flow has at most [`MAX_OUTSTANDING`] requests.
//!
//! The thread that calls `post` and `test` carries a small message itself, over the flow's own
//! stream or, on one host, by a ring in shared memory. No other thread has a part in that.
//!
//! An error of a flow is its end: all calls give the same error from there on.

mod ahead;
mod arrivals;
mod attempt;
mod bell;
mod bundle;
mod connect;
mod core;
mod counters;
mod error;
mod flows;
mod io;
mod keep;
mod listener;
mod local_ring;
mod outlet;
mod own_stream;
mod pairs;
mod port;
mod race;
mod rate;
mod recv;
mod ring;
mod send;
mod settings;
mod shared;
mod sink;
mod slots;
#[cfg(test)]
mod small_tests;
mod socket;
mod visitors;

pub use connect::Connect;
pub use counters::{PeerCounters, Totals, Traffic};
pub use error::{Backlog, ErrorClass, FlowError, Peer, SystemError};
pub use flows::Flows;
pub use listener::Listener;
pub use recv::{Buffer, RecvFlow};
pub use send::SendFlow;
pub use settings::{Device, Settings};
pub use slots::{MAX_OUTSTANDING, Slot};
pub use uccl_wire::{
    flow::{HANDLE_LEN, Handle},
    handshake::Psk,
};

/// The most buffers of one receive.
pub const MAX_GROUP: usize = 1;
