//! Memory shared by two processes of one host, and the protocol that keeps sharing it safe.
//!
//! The owner of regions lists the live ones in a table that its peers map read-only. Before a peer
//! accesses a region, it announces that in a [`Hazards`] word. Together these make revocation safe:
//! see [`hazard`] for the argument.
//!
//! Revocation binds only processes that follow this protocol. A peer that has a writable mapping,
//! or that the system lets attach to this process, can access the memory without asking: share
//! memory only with authenticated peers. But no value that a peer writes to these structures makes
//! this process access wrong memory, crash, or block. Nothing here waits for a shared word to
//! change, and this process keeps the record of its own accesses, and of the mappings that they
//! need, in its own memory ([`Accesses`]).

pub mod accesses;
pub mod direct;
mod gpu;
pub mod hazard;
#[cfg(all(test, loom))]
mod loom_tests;
pub mod mappings;
pub mod ring;

use uccl_fabric::shm::{memo, published, segment, sync};

pub use self::{
    accesses::{Accesses, HazardGuard, OwnedHazard},
    direct::{Direct, DirectError, Reach},
    hazard::Hazards,
    mappings::PeerMappings,
    ring::{ByteRing, RingRx, RingTx},
};
