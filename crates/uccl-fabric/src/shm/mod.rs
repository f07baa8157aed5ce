//! Memory that processes of one host share: segments, and the table in which a process publishes
//! its regions.

#[cfg(all(test, loom))]
mod loom_tests;
pub mod memo;
pub mod published;
pub mod segment;
pub mod sync;

pub use published::{PeerCheck, PeerTable, RegionSnapshot};
pub use segment::{MapMode, Mapping, Segment};
