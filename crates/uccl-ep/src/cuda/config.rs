//! Settings of a rank's end of a group.

use std::time::Duration;

use super::params::is_wide;

/// How a rank takes part in a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// This rank's number.
    pub rank: usize,
    /// The number of ranks, [`MAX_RANKS`](super::MAX_RANKS) at most.
    pub ranks: usize,
    /// Bytes of the pool in which calls are placed; all ranks have the same.
    pub pool: usize,
    /// How long a call waits for its peers.
    pub timeout: Duration,
    /// Whether a rank that is late is left out of the call and of later ones, instead of failing
    /// the call.
    pub masks_late: bool,
    /// The GPU, by the driver's number.
    pub device: u32,
    /// The most blocks of a launch, of [`Occupancy`](super::Occupancy); 0: those of a rank that is
    /// alone on its GPU, with [`RESERVED`](super::RESERVED). The blocks of all ranks on a GPU have
    /// to fit on it at the same time, because they wait for each other.
    pub blocks: u32,
    /// Whether no other rank is on the GPU: all blocks of a launch then begin together, or wait
    /// until they can.
    pub is_alone: bool,
    /// The path between ranks.
    pub reach: Reach,
    /// A number for this rank's node, as for [a group of the CPU](crate::Config::node).
    pub node: Option<u64>,
    /// Settings of the network between nodes, as for [a group of the CPU](crate::Config::network).
    pub network: Option<uccl_p2p::Config>,
}

impl Config {
    /// Whether rows have ready flags, if ranks reach each other directly. Late ranks are left out
    /// as a whole, and a wide group's flags would take megabytes of each window.
    pub(super) fn has_flags(&self) -> bool {
        !self.masks_late && !is_wide(self.ranks)
    }
}

/// The path between the ranks of a group. All ranks have the same value, but if some have
/// [`ViaHost`](Self::ViaHost), those with [`Any`](Self::Any) or
/// [`Fabric`](Self::Fabric) use the host too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reach {
    /// Direct access if all ranks are on one node and each reaches all windows; else the host.
    #[default]
    Any,
    /// Windows are in the GPUs' memory, and every rank stores to all of them.
    Direct,
    /// As [`Any`](Self::Any), but windows have fabric handles where the driver makes them, and
    /// ranks on several hosts of one NVLink domain reach each other directly too. A rank without
    /// such a handle has [a reason](super::Group::fabric_refusal).
    Fabric,
    /// Windows are in locked host memory. Ranks of a node store to each other's; data for another
    /// node is carried by a proxy, a thread of the sender.
    ViaHost,
}
