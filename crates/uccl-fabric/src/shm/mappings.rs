//! The peer's shared memory, as mapped here.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use uccl_device::cuda::Context;

use super::hazard::{Hazards, InUse};
use super::segment::{MapMode, Segment};
use crate::cuda_ipc::{LockedHost, OpenedGpu};

#[derive(Debug, Default)]
struct Maps {
    by_id: HashMap<u32, Arc<Segment>>,
    /// Those of them that are locked for GPUs; `None` where the driver would not.
    locked: HashMap<u32, Option<Arc<LockedHost>>>,
    gpus: HashMap<u32, Arc<OpenedGpu>>,
    /// Removed, but perhaps still in use by the accesses that were under way then.
    retired: Vec<(Arc<Segment>, InUse)>,
}

/// The peer's segments, by the ids that the peer gave them.
///
/// A copy finds a segment here once and then remembers its address; [`epoch`](Self::epoch), looked at under
/// a hazard, tells whether what it remembers is still mapped.
#[derive(Debug, Default)]
pub struct PeerMappings {
    epoch: AtomicU64,
    maps: Mutex<Maps>,
}

impl PeerMappings {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps the segment of at most `max_len` bytes that the peer calls `id`. `hazards` are those that this
    /// side claims at the peer.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] when the id is taken; otherwise as for [`Segment::map`].
    pub fn insert(
        &self,
        id: u32,
        fd: OwnedFd,
        max_len: usize,
        hazards: &Hazards,
    ) -> io::Result<()> {
        let segment = Arc::new(Segment::map(fd, MapMode::ReadWrite, max_len)?);
        let mut maps = self.maps.lock();
        maps.reap(hazards);
        if maps.by_id.contains_key(&id) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        maps.by_id.insert(id, segment);
        self.epoch.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Notes the GPU memory that the peer calls `id`; it is opened when it is first copied to or from.
    pub fn insert_gpu(&self, id: u32, memory: OpenedGpu) {
        self.maps.lock().gpus.insert(id, Arc::new(memory));
    }

    /// The GPU memory that the peer calls `id`.
    #[must_use]
    pub fn gpu(&self, id: u32) -> Option<Arc<OpenedGpu>> {
        self.maps.lock().gpus.get(&id).cloned()
    }

    /// The segment `id`, locked so that GPUs reach it; `None` where it is not there or cannot be locked.
    pub(crate) fn locked(&self, id: u32, context: &'static Context) -> Option<Arc<LockedHost>> {
        let mut maps = self.maps.lock();
        if let Some(known) = maps.locked.get(&id) {
            return known.clone();
        }
        let segment = Arc::clone(maps.by_id.get(&id)?);
        let locked = LockedHost::new(context, segment);
        let locked = locked.inspect_err(|e| tracing::debug!("staged by the driver: {e}")).ok();
        let locked = locked.map(Arc::new);
        maps.locked.insert(id, locked.clone());
        locked
    }

    /// Forgets the segment or GPU memory `id`. It is unmapped as soon as no copy can be using it, which is looked into at
    /// this call and the following ones.
    pub fn remove(&self, id: u32, hazards: &Hazards) -> bool {
        let mut maps = self.maps.lock();
        // Copies under way keep what they use of these two.
        maps.locked.remove(&id);
        if maps.gpus.remove(&id).is_some() {
            return true;
        }
        let Some(segment) = maps.by_id.remove(&id) else {
            maps.reap(hazards);
            return false;
        };
        // Copies that claim their hazard after this see the new epoch; the others are in `in_use`.
        self.epoch.fetch_add(1, Ordering::SeqCst);
        maps.retired.push((segment, hazards.in_use()));
        maps.reap(hazards);
        true
    }

    /// Changes whenever a segment comes or goes.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Where `[offset, offset + len)` of segment `id` is mapped, if it is. The pointer is good under a hazard
    /// claimed before [`epoch`](Self::epoch) was read, while that has not changed before this call returned.
    pub(crate) fn locate(&self, id: u32, offset: u64, len: u64) -> Option<*mut u8> {
        let maps = self.maps.lock();
        let segment = maps.by_id.get(&id)?;
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset > segment.len() || len > segment.len() - offset {
            return None;
        }
        Some(segment.as_ptr().wrapping_add(offset))
    }

    /// How many segments are mapped or wait to be unmapped.
    #[must_use]
    pub fn mapped(&self) -> usize {
        let maps = self.maps.lock();
        maps.by_id.len() + maps.retired.len()
    }
}

impl Maps {
    fn reap(&mut self, hazards: &Hazards) {
        self.retired.retain_mut(|(_, uses)| !hazards.ended(uses));
    }
}
