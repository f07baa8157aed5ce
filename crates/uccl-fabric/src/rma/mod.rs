//! Links to devices that move memory one-sidedly: RDMA NICs, and what libfabric has providers for.
//!
//! ```text
//!   engine        post, progress, cancel, kill                         hear, take_note
//!                    |                                                        |
//!   RmaLane       state.rs: gives parts to paths                 notes.rs: pairs rails, makes channels,
//!                 flight.rs: operations, cut into parts          lends keys and takes them back
//!                 keys.rs: how the peer's regions are named
//!                    |                                                        |
//!   Path          path.rs: one pair of rails: a channel over it, and what is under way there
//!                    |
//!   Channel       rail.rs: post, poll, arm; one implementation a kind of device
//! ```
//!
//! A connection has one such lane beside those that carry its messages. Its ends talk through these: which rails
//! there are, where a channel's ends are, and, at the first use of a region, how the peer's devices name it.
//!
//! **A path that is lost** gives its parts to the others. Not before they can land no more: an end that loses its
//! channel drops it and says `Down`, and is answered when the other end is dropped too. The end that connected then
//! makes a new channel as soon as the rail is up, and proves it with a probe before anything is posted to it. What no
//! path takes ends as [`Unreachable`](crate::lane::OpError::Unreachable), and the engine has another lane do it.
//!
//! **A region that ends** is asked back: its owner says `Revoke`, and waits for `Released`, which the peer says when
//! nothing of its own is on its way there. So no honest peer meets a device that refuses it, unless that device is being
//! removed.

mod aside;
mod bell;
mod flight;
mod keys;
mod lane;
pub(crate) mod network;
mod notes;
mod path;
pub mod rail;
mod rails;
mod state;

pub use self::{
    lane::{RmaLane, Role},
    rails::Rails,
};
