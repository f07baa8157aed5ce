//! The RDMA lane: one-sided reads and writes by RDMA NICs, and by the devices that libfabric has
//! providers for.
//!
//! ```text
//!   engine        post, progress, cancel, kill                         hear, take_note
//!                    |                                                        |
//!   RmaLane       state.rs: gives parts to paths                 notes.rs: pairs rails, makes channels,
//!                 flight.rs: operations, cut into parts          lends keys and takes them back
//!                 keys.rs: how the peer's regions are named      exports.rs: keys that devices take long over
//!                    |                                                        |
//!   Chunks        staging.rs: copies for our operations          landing.rs: copies for the peer's operations
//!                 bounce.rs: locked memory, and the copies in and out
//!                    |
//!   Path          path.rs: one pair of rails: a channel over it, and its requests
//!                    |
//!   Channel       rail.rs: post, poll, arm; one implementation a kind of device
//! ```
//!
//! A connection has one such lane beside the lanes that carry its messages. The two ends of the
//! RDMA lane exchange notes over those: which rails each end has, the addresses of a channel's two
//! ends, and, when a region is first used, the keys by which the peer's devices reach it.
//!
//! **A lost path** hands its parts to the other paths, but only when nothing of them can land any
//! more: the end that loses its channel drops it and sends `Down`, and the other end drops its own
//! and answers `Down`. The connecting end then makes a new channel as soon as the rail is up, and
//! sends a probe over it before anything else. A part that no path takes fails with
//! [`Unreachable`](uccl_fabric::lane::OpError::Unreachable), and the engine gives the operation to
//! another lane.
//!
//! **Memory that no rail can register**, such as a GPU's without GPUDirect, is copied through
//! chunks of locked host memory. Each side copies its own memory; the peer is asked to copy by a
//! `Stage` note and answers `Staged`.
//!
//! **When a region ends**, its owner sends `Revoke` and waits for `Released`. The peer sends that
//! when none of its requests for the region is under way any more. So an honest peer's request is
//! never refused by a device, unless that device is being removed.

mod aside;
mod bell;
mod bounce;
mod exports;
mod flight;
mod keys;
mod lane;
mod left;
mod lent;
mod path;
mod pinned;
mod rails;
mod state;
#[cfg(test)]
mod tests;

pub use self::{
    lane::{RmaLane, Role, Silence},
    rails::{Rails, link_of},
};
