//! Links: one trait family and its implementations (tcp, local, libfabric, chaos).
//!
//! A [`lane::Lane`] is what an engine sees of any link. Links that move bytes through a stream (a TCP
//! socket, a ring in shared memory) share one protocol, [`stream`], over a [`pipe`].

pub mod alloc;
pub mod chaos;
pub mod clock;
pub mod cma;
pub mod cuda_ipc;
pub mod fdpass;
pub mod gpu;
pub mod lane;
pub mod libfabric;
pub mod local;
pub mod mem;
pub mod pipe;
pub mod regcache;
pub mod region;
pub mod rma;
pub mod shm;
pub mod stream;
pub mod tcp;
pub mod verbs;

use uccl_wire::frame::Status;

use crate::region::AccessError;

/// How a refused access is said on the wire.
pub(crate) fn status_of(e: AccessError) -> Status {
    match e {
        AccessError::UnknownKey => Status::UnknownKey,
        AccessError::OutOfBounds => Status::OutOfBounds,
        AccessError::Denied => Status::Denied,
        AccessError::Device => Status::Device,
    }
}
