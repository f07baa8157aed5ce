//! What keeps registered objects allocated, and registration, which relies on that.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Error, Iov, MrId};

use crate::memory::Owner;

/// The objects whose memory is registered.
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

    /// A region among these pieces' that was registered from a read-only buffer.
    pub(crate) fn readonly_of(&self, iovs: &[Iov]) -> Option<MrId> {
        if self.readonly.load(Ordering::Acquire) == 0 {
            return None;
        }
        let owners = self.owners.lock();
        iovs.iter().map(|iov| iov.mr).find(|mr| is_readonly(owners.get(&mr.0)))
    }

    /// Keeps one more owner of a region's memory.
    pub(crate) fn keep(&self, mr: MrId, owner: Option<Owner>) {
        let Some(owner) = owner else { return };
        if owner.readonly {
            self.readonly.fetch_add(1, Ordering::AcqRel);
        }
        self.owners.lock().entry(mr.0).or_default().push(owner);
    }

    /// What kept the region's memory. Dropping it may run Python code, so that is for the caller, who
    /// holds no lock.
    pub(crate) fn forget(&self, mr: MrId) -> Option<Vec<Owner>> {
        let owners = self.owners.lock().remove(&mr.0)?;
        let readonly = owners.iter().filter(|owner| owner.readonly).count();
        self.readonly.fetch_sub(readonly, Ordering::AcqRel);
        Some(owners)
    }

    /// Lets go of everything but what these regions lie in: the others have ended.
    pub(crate) fn clear(&self, but: &[MrId]) {
        let mut owners = self.owners.lock();
        let ended: Vec<_> = owners.extract_if(|mr, _| !but.contains(&MrId(*mr))).collect();
        let readonly = owners.values().flatten().filter(|owner| owner.readonly).count();
        self.readonly.store(readonly, Ordering::Release);
        drop(owners);
        // It may run Python code, which finds nothing locked.
        drop(ended);
    }

    /// Never lets go of what these regions lie in.
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
    // owner is kept until then, and an address's because that is what reg()'s documentation asks of
    // its caller.
    unsafe { core.register(ptr, len) }
}
