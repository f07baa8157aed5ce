//! Registered memory, by the ids that callers hold.

mod mr;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
    },
};

use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use uccl_device::{MemoryKind, cuda::classify};
use uccl_fabric::{
    alloc::{self, Shareable},
    gpu::GpuShare,
    mem::Span,
    regcache::{RegCache, Registration},
    region::{RegionTable, Rights},
};

use self::mr::allocations;
pub(crate) use self::mr::{EndingRegion, Lease, ListedMr, Mr, contains, outside};
use super::addresses::{Addresses, Entry, RegionKey};
use crate::{
    error::{Error, Result},
    ids::MrId,
    types::Iov,
};

#[derive(Default)]
struct ById {
    live: BTreeMap<MrId, Arc<Mr>>,
    /// Regions that were revoked and may still be touched.
    ending: BTreeMap<MrId, Arc<EndingRegion>>,
    /// The live regions by their addresses.
    by_address: Addresses<MrId>,
    /// Those of them that peers find by their addresses.
    published: Addresses<RegionKey>,
    /// The endpoint is closed: no region can be added.
    closed: bool,
}

/// All regions of an endpoint.
pub(crate) struct Mrs {
    pub(crate) table: Arc<RegionTable>,
    by_id: RwLock<ById>,
    /// The shared memory that regions lie in: all that peers of this host can reach by themselves.
    shared: RegCache<Shareable>,
    next: AtomicU64,
    /// Whether that includes GPU memory.
    ipc: bool,
}

impl Mrs {
    /// An empty list of regions. Peers of this host can reach GPU memory by themselves only if
    /// `ipc` is set.
    pub(crate) fn new(ipc: bool) -> Result<Self> {
        let table = RegionTable::new().map_err(|e| Error::os("making the region table", e))?;
        Ok(Self {
            table: Arc::new(table),
            by_id: RwLock::default(),
            shared: RegCache::default(),
            next: AtomicU64::new(1),
            ipc,
        })
    }

    pub(crate) fn len(&self) -> usize {
        let by_id = self.by_id.read();
        by_id.live.len() + by_id.ending.len()
    }

    /// Adds a region, which is not released before the lease ends. If it is the first region in
    /// memory that peers of this host can reach, `offer` is called with that memory.
    pub(crate) fn insert(&self, span: Span, offer: impl FnOnce(&Shareable)) -> Result<Lease> {
        if span.addr.checked_add(span.len).is_none() {
            return Err(Error::Invalid(format!(
                "{} bytes at {:#x} run past the end of the address space",
                span.len, span.addr
            )));
        }
        if span.addr == 0 && span.len > 0 {
            return Err(Error::Invalid("a null pointer cannot be registered".into()));
        }
        let known = classify(span.addr as u64).map_err(|e| Error::Invalid(e.to_string()))?;
        let kind = known.kind;
        let allocations = match known.allocation {
            Some(_) => allocations(span).map_err(|e| Error::Invalid(e.to_string()))?,
            None => [None; 2],
        };
        let memory = self.share(span, kind, offer);
        let backing = memory.as_ref().map(|memory| memory.value().backing_of(span));
        let region = match self.table.insert_kind(kind, span, Rights::ALL, backing) {
            Ok(region) => region,
            Err(e) => {
                self.unshare(memory, |_| {});
                return Err(Error::Invalid(format!("cannot register: {e}")));
            }
        };
        let id = MrId(self.next.fetch_add(1, Relaxed));
        let (leases, memory) = (AtomicUsize::new(0), Mutex::new(memory));
        let mr = Arc::new(Mr { id, span, region, kind, allocations, leases, memory });
        let mut by_id = self.by_id.write();
        if by_id.closed {
            drop(by_id);
            // Nobody has its key yet.
            drop(self.table.revoke(region.slot, region.key));
            self.let_go(&mr, |_| {});
            return Err(Error::Closed);
        }
        // Before other threads can see the region and end it.
        let lease = Lease::of(&mr);
        let Entry { addr, len, .. } = mr.entry();
        by_id.by_address.insert(id.0, Entry { addr, len, value: id });
        by_id.live.insert(id, mr);
        Ok(lease)
    }

    /// The memory that contains the range, if peers of this host can reach that by themselves.
    fn share(
        &self,
        span: Span,
        kind: MemoryKind,
        offer: impl FnOnce(&Shareable),
    ) -> Option<Registration<Shareable>> {
        let make = || {
            let shareable = match kind {
                MemoryKind::Cuda { .. } if !self.ipc => return Err(()),
                MemoryKind::Cuda { .. } => match GpuShare::of(span) {
                    Ok(share) => Shareable::Gpu(share),
                    Err(e) => {
                        tracing::warn!(
                            "GPU memory passes through host memory, on this host too: {e}"
                        );
                        return Err(());
                    }
                },
                _ => Shareable::Host(alloc::lookup(span).ok_or(())?.1),
            };
            offer(&shareable);
            Ok((shareable.span(), shareable))
        };
        self.shared.acquire(span, make).ok()
    }

    fn unshare(&self, memory: Option<Registration<Shareable>>, retract: impl FnOnce(&Shareable)) {
        if let Some(memory) = memory {
            self.shared.release(memory, retract);
        }
    }

    /// All memory with regions in it that peers of this host can reach by themselves.
    pub(crate) fn shared_memory(&self) -> Vec<Shareable> {
        self.shared.all()
    }

    /// Lets go of the memory that a revoked region lies in. If it was the last region there,
    /// `retract` is called.
    pub(crate) fn let_go(&self, mr: &Mr, retract: impl FnOnce(&Shareable)) {
        self.unshare(mr.memory.lock().take(), retract);
    }

    pub(crate) fn get(&self, id: MrId) -> Result<Arc<Mr>> {
        self.look_up(id, |found| Arc::clone(found.0))
    }

    /// Calls `with` for a region. The region stays listed meanwhile.
    #[inline]
    pub(crate) fn look_up<T>(&self, id: MrId, with: impl FnOnce(ListedMr<'_>) -> T) -> Result<T> {
        let by_id = self.by_id.read();
        by_id.live.get(&id).map(|mr| with(ListedMr(mr))).ok_or(Error::UnknownRegion(id))
    }

    /// A lease of each of these regions. Fails if one is not registered any more.
    pub(crate) fn lease_all(&self, ids: &[MrId]) -> Result<SmallVec<[Lease; 1]>> {
        let by_id = self.by_id.read();
        let lease = |id: &MrId| by_id.live.get(id).map(Lease::of).ok_or(Error::UnknownRegion(*id));
        ids.iter().map(lease).collect()
    }

    /// Calls `each` for all regions. None is added or ended meanwhile, so `each` must not take
    /// long.
    pub(crate) fn each(&self, each: impl FnMut(&Arc<Mr>)) {
        self.by_id.read().live.values().for_each(each);
    }

    /// The region that contains this memory. If there are several: the one that begins last.
    pub(crate) fn holding(&self, span: Span) -> Option<Arc<Mr>> {
        let by_id = self.by_id.read();
        let around = by_id.live.values().filter(|mr| contains(mr.span, span));
        around.max_by_key(|mr| (mr.span.addr, mr.id)).cloned()
    }

    /// From now on peers find the region by its address, until it ends.
    pub(crate) fn publish(&self, id: MrId) -> Result<()> {
        let mut by_id = self.by_id.write();
        let entry = by_id.live.get(&id).ok_or(Error::UnknownRegion(id))?.entry();
        by_id.published.insert(id.0, entry);
        Ok(())
    }

    /// Calls `with` for the published regions. None is published or ended meanwhile.
    pub(crate) fn with_published<T>(&self, with: impl FnOnce(&Addresses<RegionKey>) -> T) -> T {
        with(&self.by_id.read().published)
    }

    /// Calls `with` for the ids of all live regions by address.
    pub(crate) fn with_addresses<T>(&self, with: impl FnOnce(&Addresses<MrId>) -> T) -> T {
        with(&self.by_id.read().by_address)
    }

    /// Revokes a region, unless a transfer of ours uses it. For a region that was revoked before
    /// and may still be touched, returns that one.
    pub(crate) fn revoke(&self, id: MrId) -> Result<Arc<EndingRegion>> {
        let mut by_id = self.by_id.write();
        if let Some(ending) = by_id.ending.get(&id) {
            return Ok(Arc::clone(ending));
        }
        let mr = by_id.live.get(&id).ok_or(Error::UnknownRegion(id))?;
        let leases = mr.leases.load(SeqCst);
        if leases > 0 {
            return Err(Error::Invalid(format!(
                "{id} is used by {leases} unfinished transfers: wait for them or cancel them first"
            )));
        }
        let mr = by_id.live.remove(&id).ok_or(Error::UnknownRegion(id))?;
        by_id.by_address.remove(mr.entry().addr, id.0);
        by_id.published.remove(mr.entry().addr, id.0);
        Ok(by_id.end(&self.table, mr))
    }

    /// Revokes all regions, including those that transfers of ours use. No region can be added any
    /// more.
    pub(crate) fn revoke_all(&self) -> Vec<Arc<EndingRegion>> {
        let mut by_id = self.by_id.write();
        by_id.closed = true;
        by_id.by_address.clear();
        by_id.published.clear();
        for mr in std::mem::take(&mut by_id.live).into_values() {
            by_id.end(&self.table, mr);
        }
        by_id.ending.values().cloned().collect()
    }

    /// Forgets a region after its memory has been let go.
    pub(crate) fn forget(&self, id: MrId) {
        let ended = self.by_id.write().ending.remove(&id);
        drop(ended);
    }

    /// Finds the region of every iov, and calls `each` with them. Fails if an iov is not inside its
    /// region. With `clamp` it has only to begin there, and is cut off where the region ends.
    pub(crate) fn resolve(
        &self,
        iovs: &[Iov],
        clamp: bool,
        mut each: impl FnMut(usize, ListedMr<'_>, Span) -> Result<()>,
    ) -> Result<()> {
        let by_id = &self.by_id.read().live;
        let mut last: Option<&Arc<Mr>> = None;
        for (i, iov) in iovs.iter().enumerate() {
            let mr = match last {
                Some(mr) if mr.id == iov.mr => mr,
                _ => by_id.get(&iov.mr).ok_or(Error::UnknownRegion(iov.mr))?,
            };
            let mut span = Span { addr: iov.ptr, len: iov.len };
            if clamp && contains(mr.span, Span { len: 0, ..span }) {
                span.len = span.len.min(mr.span.addr + mr.span.len - span.addr);
            }
            if !contains(mr.span, span) {
                return Err(outside(i, mr, span));
            }
            last = Some(mr);
            each(i, ListedMr(mr), span)?;
        }
        Ok(())
    }
}

impl ById {
    fn end(&mut self, table: &RegionTable, mr: Arc<Mr>) -> Arc<EndingRegion> {
        // The region is listed here, so nobody else has revoked it.
        let revoked = Mutex::new(table.revoke(mr.region.slot, mr.region.key).ok());
        let id = mr.id;
        let ending = Arc::new(EndingRegion { mr, revoked });
        self.ending.insert(id, Arc::clone(&ending));
        ending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_region() -> (Mrs, MrId, Box<[u8]>) {
        let memory = vec![0; 64].into_boxed_slice();
        let mrs = Mrs::new(false).expect("a table");
        let span = Span { addr: memory.as_ptr() as usize, len: memory.len() };
        let id = mrs.insert(span, |_| {}).expect("registered").mr().id;
        (mrs, id, memory)
    }

    #[test]
    fn a_region_is_not_revoked_between_its_look_up_and_its_lease() {
        let (mrs, id, _memory) = with_region();
        let lease = mrs.look_up(id, |mr| {
            std::thread::scope(|scope| {
                let meanwhile = scope.spawn(|| mrs.by_id.try_write().is_none());
                assert!(meanwhile.join().expect("no panic"), "it could be revoked now");
            });
            mr.lease()
        });
        let lease = lease.expect("registered");
        assert!(matches!(mrs.revoke(id), Err(Error::Invalid(_))));
        drop(lease);
        assert!(mrs.revoke(id).is_ok());
        assert!(matches!(mrs.look_up(id, |mr| mr.lease()), Err(Error::UnknownRegion(_))));
    }

    #[test]
    fn pieces_lie_in_their_regions() {
        let (mrs, mr, memory) = with_region();
        let start = memory.as_ptr() as usize;
        let resolve = |ptr, len, clamp| {
            let mut spans = Vec::new();
            // The iov under test is the second one: the first is looked up, and later ones reuse
            // its region.
            let iovs = [Iov { mr, ptr: start, len: 1 }, Iov { mr, ptr, len }];
            let resolved = mrs.resolve(&iovs, clamp, |_, _, span| {
                spans.push(span);
                Ok(())
            });
            resolved.map(|()| spans[1].len)
        };
        for (ptr, len) in [(start, 64), (start + 63, 1), (start + 64, 0)] {
            assert_eq!(resolve(ptr, len, false).expect("inside"), len);
        }
        for (ptr, len) in [(start, 65), (start + 63, 2), (start - 1, 1), (start + 65, 0)] {
            let outside = resolve(ptr, len, false);
            assert!(matches!(outside, Err(Error::OutsideRegion { iov: 1, .. })), "{outside:?}");
        }
        assert_eq!(resolve(start + 60, usize::MAX, true).expect("it begins there"), 4);
        assert!(matches!(resolve(start + 65, 1, true), Err(Error::OutsideRegion { .. })));
    }

    #[test]
    fn a_region_is_let_go_of_once_and_its_slot_is_free_only_then() {
        let (mrs, id, memory) = with_region();
        let [first, second] = [(); 2].map(|()| mrs.revoke(id).expect("it is there still"));
        let slot = first.mr.region.slot;
        let span = Span { addr: memory.as_ptr() as usize, len: 8 };
        assert_eq!(first.let_go(|_| Err("the device is busy")), Err("the device is busy"));
        assert_ne!(mrs.insert(span, |_| {}).expect("registered").mr().region.slot, slot);
        assert_eq!(first.let_go(|_| Ok::<_, ()>(())), Ok(()));
        assert_eq!(mrs.insert(span, |_| {}).expect("registered").mr().region.slot, slot);
        assert_eq!(second.let_go(|_| Err("twice")), Ok(()));
        mrs.forget(id);
        assert!(matches!(mrs.revoke(id), Err(Error::UnknownRegion(_))));
    }

    #[test]
    fn nothing_is_registered_after_the_end() {
        let (mrs, id, memory) = with_region();
        let lease = mrs.look_up(id, |mr| mr.lease()).expect("registered");
        let endings = mrs.revoke_all();
        assert!(endings.len() == 1 && endings[0].is_leased());
        drop(lease);
        assert!(!endings[0].is_leased());
        let span = Span { addr: memory.as_ptr() as usize, len: 8 };
        assert!(matches!(mrs.insert(span, |_| {}), Err(Error::Closed)));
        assert!(mrs.table.is_empty());
    }
}
