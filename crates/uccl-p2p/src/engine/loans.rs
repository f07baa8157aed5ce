//! Keys that are made for one send, notification or ask, and what a peer may be at with them when it is given up.

use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;
use uccl_fabric::{
    mem::Span,
    region::{Region, RegionTable, Revoked},
};
use uccl_wire::message::Source;

use super::transfer::{Carrier, Hold, Transfer};

/// The grants of one message.
pub(crate) type Grants = SmallVec<[Grant; 1]>;

/// A key that the peer reaches some of our memory with; revoked when dropped.
pub(crate) struct Grant {
    pub(crate) region: Region,
    table: Arc<RegionTable>,
    /// The slot of the region that the memory is a part of, if it is registered.
    part_of: Option<u32>,
}

impl Grant {
    /// Of a region in a table, which is a part of the region in another slot, or of none that the caller has.
    pub(super) fn new(region: Region, table: Arc<RegionTable>, part_of: Option<u32>) -> Self {
        Self { region, table, part_of }
    }

    /// Ends it, for a peer that may be in the middle of an access: what is to be watched until it is not. Where the
    /// memory is the caller's, the transfer does not end before: the caller may change it then, and a peer that still
    /// reads would take the change for what was sent.
    pub(crate) fn end<C: Carrier>(self, transfer: &Arc<Transfer<C>>) -> Option<Lent<C>> {
        let revoked = self.table.revoke(self.region.slot, self.region.key).ok()?;
        let hold = self.part_of.map(|_| transfer.hold());
        Some(Lent { part_of: self.part_of, revoked, hold, _payload: None })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // The peer has answered or is gone, so it is at nothing.
        drop(self.table.revoke(self.region.slot, self.region.key));
    }
}

/// Memory of ours that a peer who was given up may be touching with a key that was made for it.
pub(crate) struct Lent<C: Carrier> {
    /// The slot of the region that it is of, if it is registered.
    pub(crate) part_of: Option<u32>,
    /// The key's slot.
    pub(crate) revoked: Revoked,
    /// The transfer that does not end before.
    pub(crate) hold: Option<Hold<C>>,
    /// The memory, where it is nobody else's.
    pub(crate) _payload: Option<Bytes>,
}

pub(crate) fn source_of(region: &Region, span: Span) -> Source {
    Source { addr: span.addr as u64, len: span.len as u64, key: region.key, slot: region.slot }
}
