//! The contracts between links and engines.
//!
//! An engine sees every link as a [`lane::Lane`]. A link over a byte stream implements
//! [`pipe::Pipe`], a link over RDMA devices [`rail::Rail`]. The crate also holds the parts that all
//! links share: [`region`]s, [`signal`]s, memory that peers can map ([`alloc`]), lists of
//! [`pieces`], and the staging of GPU memory ([`gpu`]).

pub mod alloc;
pub mod clock;
pub mod gpu;
pub mod guarded;
pub mod lane;
pub mod mem;
pub mod network;
pub mod pieces;
pub mod pipe;
pub mod rail;
pub mod regcache;
pub mod region;
mod rights;
pub mod shm;
pub mod signal;

use uccl_wire::frame::Status;

use crate::rights::AccessError;

/// The wire status of a refused access.
///
#[must_use]
pub fn status_of(e: AccessError) -> Status {
    match e {
        AccessError::UnknownKey => Status::UnknownKey,
        AccessError::OutOfBounds => Status::OutOfBounds,
        AccessError::Denied => Status::Denied,
        AccessError::Device => Status::Device,
    }
}
