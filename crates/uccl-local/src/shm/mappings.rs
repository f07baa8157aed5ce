//! The peer's shared memory, as mapped here.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use uccl_device::cuda::Context;

use super::accesses::{AccessSnapshot, Accesses};
use super::segment::{MapMode, Mapping};
use crate::cuda_ipc::{LockedHost, OfferedMemory};

/// The most offers kept from one peer: each may cost a mapping, of which a process has some ten
/// thousand.
const MAX_OFFERS: usize = 1 << 14;
/// The most bytes of one peer's memory that are mapped: a process has 128 TiB of addresses, for all
/// of its peers.
const MAX_MAPPED: usize = 1 << 42;

/// A segment that is locked for GPUs; `None` for one that cannot be locked. Locking a large one
/// takes seconds: only threads that want that segment wait for it.
type LockedSegment = OnceLock<Option<Arc<LockedHost>>>;

#[derive(Debug, Default)]
struct Maps {
    by_id: HashMap<u32, Arc<Mapping>>,
    /// Segments that are locked for GPUs, or just being locked.
    locked: HashMap<u32, Arc<LockedSegment>>,
    gpus: HashMap<u32, Arc<OfferedMemory>>,
    /// Removed, but perhaps still in use by the accesses that were under way then.
    retired: Vec<(Arc<Mapping>, AccessSnapshot)>,
    /// No offer is accepted any more.
    closed: bool,
}

/// The peer's segments, by the ids that the peer gave them.
///
/// A copy looks a segment up here once and then remembers its address. It reads the
/// [`epoch`](Self::epoch), with an access claimed, to learn whether that address is still mapped.
/// Offers beyond some bounds are refused; their memory is reached in another way.
#[derive(Debug, Default)]
pub struct PeerMappings {
    epoch: AtomicU64,
    maps: Mutex<Maps>,
}

impl PeerMappings {
    /// No mappings yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps the segment of at most `max_len` bytes that the peer calls `id`. `accesses` are those
    /// of this process to the peer's memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] when the id is taken, [`io::ErrorKind::QuotaExceeded`] when
    /// the peer has offered too much; otherwise as for [`Mapping::of`].
    pub fn insert(
        &self,
        id: u32,
        fd: OwnedFd,
        max_len: usize,
        accesses: &Accesses,
    ) -> io::Result<()> {
        let mut maps = self.maps.lock();
        maps.drop_unused(accesses);
        maps.admit()?;
        if maps.by_id.contains_key(&id) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let mapping = Mapping::of(fd, MapMode::ReadWrite, max_len.min(maps.room()))?;
        maps.by_id.insert(id, Arc::new(mapping));
        self.epoch.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Records the GPU memory that the peer calls `id`; it is opened when it is first copied to or
    /// from.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] when the id is taken, [`io::ErrorKind::QuotaExceeded`] when
    /// the peer has offered too much.
    pub fn insert_gpu(&self, id: u32, memory: OfferedMemory) -> io::Result<()> {
        let mut maps = self.maps.lock();
        maps.admit()?;
        if maps.gpus.contains_key(&id) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        maps.gpus.insert(id, Arc::new(memory));
        Ok(())
    }

    /// The GPU memory that the peer calls `id`.
    #[must_use]
    pub fn gpu(&self, id: u32) -> Option<Arc<OfferedMemory>> {
        self.maps.lock().gpus.get(&id).cloned()
    }

    /// The segment `id`, locked so that GPUs reach it; `None` where it is not there or cannot be
    /// locked.
    pub(crate) fn locked(&self, id: u32, context: &'static Context) -> Option<Arc<LockedHost>> {
        self.locked_by(id, |mapping| {
            let locked = LockedHost::new(context, mapping);
            locked.inspect_err(|e| tracing::debug!("staged by the driver: {e}")).ok().map(Arc::new)
        })
    }

    fn locked_by(
        &self,
        id: u32,
        lock: impl FnOnce(Arc<Mapping>) -> Option<Arc<LockedHost>>,
    ) -> Option<Arc<LockedHost>> {
        let (locked, mapping) = {
            let mut maps = self.maps.lock();
            let mapping = Arc::clone(maps.by_id.get(&id)?);
            (Arc::clone(maps.locked.entry(id).or_default()), mapping)
        };
        locked.get_or_init(|| lock(mapping)).clone()
    }

    /// Forgets the segment or GPU memory `id`; true if it was there. A segment is unmapped as soon
    /// as no copy can be using it, which this call and the following ones check.
    pub fn remove(&self, id: u32, accesses: &Accesses) -> bool {
        let mut maps = self.maps.lock();
        // Copies under way keep their own references to values of these two maps.
        maps.locked.remove(&id);
        if maps.gpus.remove(&id).is_some() {
            return true;
        }
        let Some(mapping) = maps.by_id.remove(&id) else {
            maps.drop_unused(accesses);
            return false;
        };
        // Accesses that begin after this see the new epoch; the others are in `in_use`.
        self.epoch.fetch_add(1, Ordering::SeqCst);
        maps.retired.push((mapping, accesses.in_use()));
        maps.drop_unused(accesses);
        true
    }

    /// Unmaps everything and accepts no more offers. Call it only when no copy uses a mapping, and
    /// none will.
    pub(super) fn close(&self) {
        let maps = Maps { closed: true, ..Maps::default() };
        drop(std::mem::replace(&mut *self.maps.lock(), maps));
    }

    /// Changes whenever a segment comes or goes.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Where `[offset, offset + len)` of segment `id` is mapped, if it is. The pointer is valid
    /// during an access that was claimed before [`epoch`](Self::epoch) was read, provided that the
    /// epoch did not change before this call returned.
    pub(crate) fn locate(&self, id: u32, offset: u64, len: u64) -> Option<*mut u8> {
        let maps = self.maps.lock();
        let mapping = maps.by_id.get(&id)?;
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset > mapping.len() || len > mapping.len() - offset {
            return None;
        }
        Some(mapping.as_ptr().wrapping_add(offset))
    }

    /// How many segments are mapped or wait to be unmapped.
    #[must_use]
    pub fn mapped(&self) -> usize {
        let maps = self.maps.lock();
        maps.by_id.len() + maps.retired.len()
    }
}

impl Maps {
    fn drop_unused(&mut self, accesses: &Accesses) {
        self.retired.retain_mut(|(_, uses)| !accesses.ended(uses));
    }

    /// Checks that one more offer may be accepted.
    fn admit(&self) -> io::Result<()> {
        if self.closed {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if self.by_id.len() + self.gpus.len() + self.retired.len() >= MAX_OFFERS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(())
    }

    /// How many bytes more may be mapped.
    fn room(&self) -> usize {
        let retired = self.retired.iter().map(|(mapping, _)| mapping);
        let mapped: usize = self.by_id.values().chain(retired).map(|mapping| mapping.len()).sum();
        MAX_MAPPED.saturating_sub(mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::Hazards;
    use uccl_fabric::shm::Segment;

    #[test]
    fn a_peer_does_not_fill_our_address_space() {
        let connection = Segment::create("test", 4096).unwrap();
        let accesses = Accesses::new(Hazards::new(&connection, 0).unwrap());
        let mappings = PeerMappings::new();
        // Sparse: it takes addresses and no memory.
        let large = Segment::create("test", MAX_MAPPED / 2).unwrap();
        let small = Segment::create("test", 4096).unwrap();
        let offer = |id, segment: &Segment| {
            let fd = segment.fd().try_clone_to_owned().unwrap();
            mappings.insert(id, fd, usize::MAX, &accesses)
        };
        offer(1, &small).unwrap();
        offer(2, &large).unwrap();
        assert!(offer(3, &large).is_err());
        assert!(offer(2, &small).is_err(), "the id is taken");
        // A copy keeps the segment mapped, so it still counts.
        let access = accesses.try_claim(0).unwrap();
        assert!(mappings.remove(2, &accesses));
        assert!(offer(4, &large).is_err());
        drop(access);
        offer(4, &large).unwrap();
        assert_eq!(mappings.mapped(), 2);
    }

    #[test]
    fn other_segments_are_found_while_one_is_being_locked() {
        let connection = Segment::create("test", 4096).unwrap();
        let accesses = Accesses::new(Hazards::new(&connection, 0).unwrap());
        let mappings = PeerMappings::new();
        let segment = Segment::create("test", 4096).unwrap();
        let offer = |id| {
            let fd = segment.fd().try_clone_to_owned().unwrap();
            mappings.insert(id, fd, usize::MAX, &accesses).unwrap();
        };
        offer(1);
        let mut times = 0;
        let locked = mappings.locked_by(1, |_| {
            times += 1;
            assert!(mappings.maps.try_lock().is_some(), "look-ups and offers wait");
            offer(2);
            assert!(mappings.remove(1, &accesses));
            None
        });
        assert!(locked.is_none() && mappings.locate(2, 0, 1).is_some());
        offer(1);
        // It is another segment now. Whether it can be locked is asked once.
        for _ in 0..2 {
            mappings.locked_by(1, |_| {
                times += 1;
                None
            });
        }
        assert_eq!(times, 2);
        assert!(mappings.locked_by(3, |_| panic!("there is none")).is_none());
    }
}
