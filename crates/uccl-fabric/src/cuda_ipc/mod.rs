//! GPU memory of this host: copied by GPUs, straight between the memories of two processes.
//!
//! Memory on a GPU is offered to the peers of this host when it is registered ([`GpuShare`]), and opened
//! by a peer when it first copies there ([`OpenedGpu`]). Copies are enqueued by their poster, or by whoever
//! makes progress, and end with an event ([`GpuJobs`]); the owner of the remote memory takes no part. What holds for host memory
//! holds here too: regions are found in the peer's published table by their key, and while a copy runs a
//! hazard word tells the owner.
//!
//! Of what is long a GPU has a few slices at a time (`queue.rs`), and lanes take turns (`turns.rs`): what waits can be
//! cancelled, and holds up nobody else.

mod bounce;
mod descriptors;
mod flight;
mod jobs;
mod ledger;
mod opened;
mod put;
mod queue;
mod share;
mod turns;

pub(crate) use self::{
    bounce::Bouncers,
    jobs::{Posting, batches},
    queue::{Pieces, is_sliced},
};
pub use self::{
    jobs::GpuJobs,
    opened::{Keep, LockedHost, OpenedGpu, Owner, Place},
    put::put,
    share::GpuShare,
};
