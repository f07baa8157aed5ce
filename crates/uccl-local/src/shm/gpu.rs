//! The peer's memory as GPUs of this process reach it.

use std::{io, sync::Arc};

use smallvec::SmallVec;
use uccl_device::cuda::{Context, gather::WordChange};
use uccl_fabric::{lane::OpError, mem::RemoteSpan, region::Rights, signal::Word, status_of};
use uccl_wire::{
    frame::Status,
    signal::{Change, SIGNAL_LEN},
};

use super::{
    accesses::OwnedHazard,
    direct::Direct,
    published::{PeerCheck, RegionSnapshot},
};
use crate::cuda_ipc::{OfferedMemory, Place, PlaceOwner};

/// How a GPU of ours reaches ranges of the peer's memory.
#[derive(Debug, Default)]
pub(crate) struct GpuPlaces {
    /// Keeps the ranges reachable.
    pub(crate) places: SmallVec<[Place; 1]>,
    /// The ranges are GPU memory; otherwise locked host memory.
    pub(crate) device: bool,
}

impl Direct {
    /// Records GPU memory that the peer offered.
    ///
    /// # Errors
    /// As for [`PeerMappings::insert_gpu`](super::PeerMappings::insert_gpu).
    pub(crate) fn insert_gpu(&self, id: u32, memory: OfferedMemory) -> io::Result<()> {
        self.mappings.insert_gpu(id, memory)
    }

    /// Claims a hazard for an access that outlives the call; `None` when all words for such
    /// accesses are in use.
    pub(crate) fn claim_owned(&self, slot: u32) -> Option<OwnedHazard> {
        self.accesses.try_claim_owned(slot)
    }

    /// The GPU memory that contains a range, if that is GPU memory and was offered.
    pub(crate) fn gpu_of(&self, remote: &RemoteSpan) -> Option<Arc<OfferedMemory>> {
        let checked = self.table.find(remote).ok()?;
        checked.backing.filter(|_| checked.device).and_then(|backing| self.mappings.gpu(backing.id))
    }

    /// Whether the region of a range is locked host memory that only the peer's GPUs reach: no
    /// other process can map it.
    pub(crate) fn is_locked_privately(&self, remote: &RemoteSpan) -> bool {
        self.table.find(remote).is_ok_and(|found| found.locked && found.backing.is_none())
    }

    /// Calls `each` with the address at which a GPU of ours reaches each range, and its region. The
    /// addresses may be used under hazards claimed before this call.
    pub(crate) fn gpu_places(
        &self,
        needed: impl Into<Rights> + Copy,
        remote: impl IntoIterator<Item = RemoteSpan>,
        context: &'static Context,
        mut each: impl FnMut(u64, &RegionSnapshot),
    ) -> Result<GpuPlaces, OpError> {
        self.admits().map_err(|_| OpError::LaneDown)?;
        let mut found = GpuPlaces::default();
        // The pieces of a vector are mostly in one region, so its place is looked up once.
        let mut last: Option<(u32, u64, RegionSnapshot, u64)> = None;
        for span in remote {
            let (checked, base) = match last {
                Some((slot, key, checked, base)) if (slot, key) == (span.slot, span.key) => {
                    (checked, base)
                }
                _ => {
                    let checked = self.table.find(&span).map_err(|check| match check {
                        PeerCheck::Refused(e) => OpError::Remote(status_of(e)),
                        PeerCheck::Unpublished => OpError::HostOnly("the peer's table is full"),
                    })?;
                    let base = self.gpu_place(&checked, context, &mut found)?;
                    last = Some((span.slot, span.key, checked, base));
                    (checked, base)
                }
            };
            let offset = checked.admit(&span, needed);
            let offset = offset.map_err(|e| OpError::Remote(status_of(e)))?;
            each(base + offset, &checked);
        }
        Ok(found)
    }

    /// The change that a GPU of ours makes to a word of the peer's, and the places that keep the
    /// word reachable. The rule of [`gpu_places`](Self::gpu_places) holds.
    pub(crate) fn gpu_word(
        &self,
        word: &Word,
        context: &'static Context,
    ) -> Result<(WordChange, GpuPlaces), OpError> {
        let Word { span, change } = word;
        if span.len != SIGNAL_LEN || !span.addr.is_multiple_of(SIGNAL_LEN) {
            return Err(OpError::Remote(Status::Protocol));
        }
        let mut address = 0;
        let found =
            self.gpu_places(Rights::SIGNAL, [*span], context, |there, _| address = there)?;
        let (value, adds) = match *change {
            Change::Set(value) => (value, false),
            Change::Add(value) => (value, true),
        };
        // If the link carries no atomic operations, an addition of ours could undo one by another
        // process.
        if adds && !self.gpu_of(span).is_some_and(|memory| memory.takes_atomics_of(context)) {
            return Err(OpError::HostOnly("no atomic operation reaches the signal's word"));
        }
        Ok((WordChange { address, value, adds }, found))
    }

    /// The address at which a GPU reaches the start of a region.
    fn gpu_place(
        &self,
        checked: &RegionSnapshot,
        context: &'static Context,
        found: &mut GpuPlaces,
    ) -> Result<u64, OpError> {
        let first = found.places.is_empty();
        let backing = checked.backing.ok_or(OpError::HostOnly(if checked.device {
            "the peer's memory cannot be opened by another process"
        } else {
            "the peer's host memory is not from alloc"
        }))?;
        let (place, offset) = if checked.device {
            let memory = self.mappings.gpu(backing.id);
            let memory = memory.ok_or(OpError::HostOnly("the peer's offer has not come"))?;
            if !memory.holds(backing.offset, checked.len) {
                return Err(OpError::Remote(Status::OutOfBounds));
            }
            let place = memory.place(context).map_err(|e| {
                tracing::debug!("GPU memory of the peer's is not reached: {e}");
                OpError::HostOnly("the peer's GPU memory cannot be opened")
            })?;
            (place, backing.offset)
        } else {
            let locked = self.mappings.locked(backing.id, context);
            let locked =
                locked.ok_or(OpError::HostOnly("the peer's host memory cannot be locked"))?;
            if !locked.holds(backing.offset, checked.len) {
                return Err(OpError::Remote(Status::OutOfBounds));
            }
            (Place { address: locked.address(), keep: PlaceOwner::Locked(locked) }, backing.offset)
        };
        if !first && found.device != checked.device {
            return Err(OpError::HostOnly("one vector reaches both GPU and host memory"));
        }
        found.device = checked.device;
        let base = place.address + offset;
        found.places.push(place);
        Ok(base)
    }
}
