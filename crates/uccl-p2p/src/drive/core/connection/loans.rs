//! Keys made for one send, notification or ask, and memory that a given-up peer may still access
//! with them.

use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;
use uccl_fabric::{
    mem::Span,
    region::{Region, RegionTable, RevokedRegion},
};
use uccl_wire::message::Source;

use super::transfer::{Hold, Transfer};

/// The grants of one message.
pub(crate) type Grants = SmallVec<[Grant; 1]>;

/// A key for some of our memory, made for the peer; revoked when dropped.
pub(crate) struct Grant {
    pub(crate) region: Region,
    table: Arc<RegionTable>,
    /// The slot of the registered region that contains the memory, if there is one.
    part_of: Option<u32>,
}

impl Grant {
    /// For a region in `table`. `part_of` is the slot of the caller's region that contains it;
    /// `None` if there is none.
    pub(in crate::drive) fn new(
        region: Region,
        table: Arc<RegionTable>,
        part_of: Option<u32>,
    ) -> Self {
        Self { region, table, part_of }
    }

    /// Revokes the key of a peer that may be in the middle of an access. Returns the memory to
    /// watch until the peer is done. If the memory is the caller's, its transfer does not end
    /// before that: after the end the caller may change the memory, and a peer that still reads
    /// would take the changed bytes for the sent ones.
    pub(crate) fn end(self, transfer: &Arc<Transfer>) -> Option<Loan> {
        let revoked = self.table.revoke(self.region.slot, self.region.key).ok()?;
        let hold = self.part_of.map(|_| transfer.hold());
        Some(Loan { part_of: self.part_of, revoked, hold, _payload: None })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // The peer has answered or is gone, so it is not in the middle of an access.
        drop(self.table.revoke(self.region.slot, self.region.key));
    }
}

/// Memory of ours that a given-up peer may still touch with a key that was made for it.
pub(crate) struct Loan {
    /// The slot of the registered region that contains it, if there is one.
    pub(crate) part_of: Option<u32>,
    /// The key's slot.
    pub(crate) revoked: RevokedRegion,
    /// Keeps the transfer from ending while the peer may touch the memory.
    pub(crate) hold: Option<Hold>,
    /// The memory itself, if nothing else keeps it allocated.
    pub(crate) _payload: Option<Bytes>,
}

pub(crate) fn source_of(region: &Region, span: Span) -> Source {
    Source { addr: span.addr as u64, len: span.len as u64, key: region.key, slot: region.slot }
}
