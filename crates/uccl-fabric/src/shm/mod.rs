//! Memory shared by two processes of one host, and what keeps sharing it safe.
//!
//! The owner of a region publishes, in a table that its peers map read-only, which regions live; a
//! peer that touches one first says so in a [`Hazards`] word. Together they make revocation sure: see
//! [`hazard`] for the argument.
//!
//! That holds between processes that keep to it. A peer that was given a writable mapping, or that the system
//! lets attach to this process, needs nobody's leave: share memory only with peers that have shown who they
//! are. What a peer can never do through these structures, whatever it writes there, is make this process
//! touch memory that it should not, crash, or block: nothing here waits for a shared word to change, and what
//! this process is itself at, and which mappings it needs for that, it counts in memory of its own
//! ([`Accesses`]).

pub mod accesses;
mod copy;
pub mod direct;
mod gpu;
pub mod hazard;
#[cfg(all(test, loom))]
mod loom_tests;
pub mod mappings;
mod memo;
pub mod published;
pub mod ring;
pub mod segment;
pub(crate) mod sync;

pub use accesses::{Accesses, HazardGuard, OwnedHazard};
pub use direct::{Direct, DirectError, Reach};
pub use hazard::Hazards;
pub use mappings::PeerMappings;
pub use published::{Checked, PeerCheck, PeerTable};
pub use ring::{ByteRing, RingRx, RingTx};
pub use segment::{MapMode, Mapping, Segment};
