//! Links to devices that move memory one-sidedly: RDMA NICs, and what libfabric has providers for.
//!
//! ```text
//!   engine        post, progress, cancel, kill                         hear, take_note
//!                    |                                                        |
//!   RmaLane       state.rs: gives parts to paths                 notes.rs: pairs rails, makes channels,
//!                 flight.rs: operations, cut into parts          lends keys and takes them back
//!                 keys.rs: how the peer's regions are named
//!                    |                                                        |
//!   Chunks        staging.rs: what of ours passes through them   landing.rs: what of the peer's does
//!                 bounce.rs: locked memory, and the copies in and out
//!                    |
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
//! **Memory that no rail takes**, a GPU's where there is no GPUDirect, passes through locked host memory: ours is copied
//! by us, the peer's by the peer, which is asked to (`Stage`) and answers (`Staged`).
//!
//! **A region that ends** is asked back: its owner says `Revoke`, and waits for `Released`, which the peer says when
//! nothing of its own is on its way there. So no honest peer meets a device that refuses it, unless that device is being
//! removed.

mod aside;
mod bell;
mod bounce;
mod flight;
mod keys;
mod landing;
mod lane;
mod narrow;
pub(crate) mod network;
mod notes;
mod path;
mod pinned;
pub mod rail;
mod rails;
mod staging;
mod state;
#[cfg(test)]
mod tests;

pub use self::{
    lane::{RmaLane, Role},
    rails::Rails,
};
