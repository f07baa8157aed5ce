//! The owners of registered memory, and registration, which relies on them.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Error, Iov, MrId};

use crate::memory::Owner;

/// The owners of registered memory, by region.
#[derive(Default)]
pub(crate) struct Regions {
    owners: Mutex<HashMap<u64, Vec<Owner>>>,
    readonly: AtomicUsize,
}

impl Regions {
    /// Whether the region was registered from a read-only buffer.
    pub(crate) fn is_readonly(&self, mr: u64) -> bool {
        self.readonly.load(Ordering::Acquire) != 0 && is_readonly(self.owners.lock().get(&mr))
    }

    /// Whether a region was registered from a read-only buffer.
    pub(crate) fn has_readonly(&self) -> bool {
        self.readonly.load(Ordering::Acquire) != 0
    }

    /// A region among these pieces' that was registered from a read-only buffer.
    pub(crate) fn readonly_of(&self, iovs: &[Iov]) -> Option<MrId> {
        if self.readonly.load(Ordering::Acquire) == 0 {
            return None;
        }
        let owners = self.owners.lock();
        iovs.iter().map(|iov| iov.mr).find(|mr| is_readonly(owners.get(&mr.0)))
    }

    /// Keeps another owner of a region's memory.
    pub(crate) fn keep(&self, mr: MrId, owner: Option<Owner>) {
        let Some(owner) = owner else { return };
        if owner.readonly {
            self.readonly.fetch_add(1, Ordering::AcqRel);
        }
        self.owners.lock().entry(mr.0).or_default().push(owner);
    }

    /// Removes the owners of a region's memory. Their drop may run Python code, so the caller drops
    /// them without a lock.
    pub(crate) fn forget(&self, mr: MrId) -> Option<Vec<Owner>> {
        let owners = self.owners.lock().remove(&mr.0)?;
        let readonly = owners.iter().filter(|owner| owner.readonly).count();
        self.readonly.fetch_sub(readonly, Ordering::AcqRel);
        Some(owners)
    }

    /// Drops all owners except those of the regions `but`: the other regions have ended.
    pub(crate) fn clear(&self, but: &[MrId]) {
        let mut owners = self.owners.lock();
        let ended: Vec<_> = owners.extract_if(|mr, _| !but.contains(&MrId(*mr))).collect();
        let readonly = owners.values().flatten().filter(|owner| owner.readonly).count();
        self.readonly.store(readonly, Ordering::Release);
        drop(owners);
        // The drop may run Python code, so no lock is held.
        drop(ended);
    }

    /// Never drops the owners of these regions.
    pub(crate) fn leak(&self, of: &[MrId]) {
        let mut owners = self.owners.lock();
        of.iter().for_each(|mr| std::mem::forget(owners.remove(&mr.0)));
    }
}

fn is_readonly(owners: Option<&Vec<Owner>>) -> bool {
    owners.is_some_and(|owners| owners.iter().any(|owner| owner.readonly))
}

/// Registers `len` bytes at `ptr`.
pub(crate) fn register(core: &Endpoint, ptr: usize, len: usize) -> Result<MrId, Error> {
    // SAFETY: the memory stays allocated until the region is deregistered: an object's because its
    // owner is kept until then, and an address's because reg()'s documentation requires that of the
    // caller.
    unsafe { core.register(ptr, len) }
}
