//! GPU memory of this host: copied by GPUs, straight between the memories of two processes.
//!
//! Memory on a GPU is offered to the peers of this host when it is registered
//! ([`GpuShare`](uccl_fabric::gpu::GpuShare)). A peer opens it when it first copies there
//! ([`OfferedMemory`]). The thread that posts a copy, or one that makes progress, enqueues the
//! copy, and an event marks its end ([`GpuJobs`]); the owner of the remote memory takes no part.
//! The rules of host memory hold here too: a region is found in the peer's published table by its
//! key, and while a copy runs a hazard word shows that to the owner.
//!
//! A GPU gets a few slices of a long operation at a time (`queue.rs`), and lanes take turns
//! (`turns.rs`). So a waiting operation can be cancelled, and delays no other.

mod bounce;
mod copy_end;
mod descriptors;
mod flight;
mod jobs;
mod ledger;
mod offered;
mod queue;
mod table;
mod turns;

pub(crate) use self::{
    bounce::Bouncers,
    jobs::{PostRequest, batches, batches_of},
    queue::{Pieces, is_sliced},
};
pub use self::{
    jobs::GpuJobs,
    offered::{LockedHost, OfferedMemory, Owner, Place, PlaceOwner},
};
