//! GPU memory of this host: copied by GPUs, straight between the memories of two processes.
//!
//! Memory on a GPU is offered to the peers of this host when it is registered ([`GpuShare`]), and opened
//! by a peer when it first copies there ([`OpenedGpu`]). Copies are enqueued on the poster's thread and end
//! with an event ([`GpuJobs`]); the owner of the remote memory takes no part. What holds for host memory
//! holds here too: regions are found in the peer's published table by their key, and while a copy runs a
//! hazard word tells the owner.

mod bounce;
mod descriptors;
mod jobs;
mod opened;
mod put;
mod share;

pub(crate) use self::{bounce::Bouncers, jobs::batches};
pub use self::{
    jobs::{GpuJobs, Parts},
    opened::{Keep, LockedHost, OpenedGpu, Owner, Place},
    put::put,
    share::GpuShare,
};
