//! Memory of the caller's becomes a region.

use std::sync::Arc;

use uccl_fabric::{alloc::Shareable, gpu::prepare_words, mem::Span};

use super::core::{Core, Devices};
use crate::{
    error::{Error, Result},
    ids::MrId,
};

impl Core {
    /// Adds a region. If its memory is shared, offers it to the peers of this host, which may then
    /// map it.
    pub(crate) fn add_region(self: &Arc<Self>, span: Span) -> Result<MrId> {
        let offer = |memory: &Shareable| self.for_each_host(|lane| lane.offer(memory));
        let lease = self.mrs.insert(span, offer)?;
        let mr = lease.mr();
        if let Some(gpu) = mr.kind.device_only() {
            // An error shows when a signal uses it.
            let _ = prepare_words(gpu);
        }
        if let Some(Devices { rails, .. }) = self.rails.get() {
            // If the region is ended meanwhile: the lease keeps its slot from being reused, and the
            // region is taken from the devices again.
            rails.add(mr.region.slot, mr.span, mr.kind, mr.region.rights);
        }
        let id = mr.id;
        drop(lease);
        if let Err(e) = self.usable() {
            // The endpoint has closed meanwhile: the memory is the caller's again, as if this call
            // had come too late.
            return match self.release_region(id) {
                Ok(()) | Err(Error::UnknownRegion(_)) => Err(e),
                Err(touched) => Err(touched),
            };
        }
        Ok(id)
    }
}
