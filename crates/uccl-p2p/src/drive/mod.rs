//! The floor between [`endpoint`](crate::endpoint), the interface for callers, and `uccl-proto`,
//! which decides the messages of the two ends: lanes, threads, waiting and waking. Here transfers
//! become operations on lanes, and here they end.
//!
//! Locks are taken in this order: a lane's receive half, a connection's session (`talk`), a
//! transfer's body, the list of notifications, a lane's sending half, the list of transfers. Ending
//! a connection takes a lane's halves, so it never happens from a completion or a message.

pub(crate) mod acceptor;
mod accepts;
pub(crate) mod addresses;
pub(crate) mod aftermath;
mod answers;

pub(crate) mod asking;
pub(crate) mod attempt;
pub(crate) mod begin;
pub(crate) mod claims;
pub(crate) mod connect;
mod contexts;
pub(crate) mod core;
pub(crate) mod deadline;
mod ending;
mod events;
pub(crate) mod failover;
mod fence;
mod follow;
mod glances;
mod gpu_signal;
pub(crate) mod grants;
pub(crate) mod greeting;
pub(crate) mod inline_op;
pub(crate) mod lane_set;
mod lane_workers;
pub(crate) mod lanes;
pub(crate) mod links;
pub(crate) mod liveness;
pub(crate) mod lookup_cache;
pub(crate) mod lost_lanes;
pub(crate) mod notifs;
mod pace;
pub(crate) mod park;
pub(crate) mod payload;
pub(crate) mod peer_copies;
pub(crate) mod peers_by_address;
pub(crate) mod places;
pub(crate) mod plan;
pub(crate) mod publication;
pub(crate) mod rails;
pub(crate) mod receives;
pub(crate) mod regions;
mod register;
pub(crate) mod registry;
pub(crate) mod release;
pub(crate) mod route;
pub(crate) mod seats;
pub(crate) mod sends;
pub(crate) mod session;
pub(crate) mod signals;
pub(crate) mod socket;
mod steps;
pub(crate) mod stream_waits;
pub(crate) mod tending;
pub(crate) mod timers;
mod visibility;
pub(crate) mod wait;
pub(crate) mod work;
pub(crate) mod worker;

#[cfg(test)]
pub(crate) mod pair;
#[cfg(test)]
mod progress_tests;
