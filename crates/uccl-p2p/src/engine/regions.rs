//! Registered memory by the names that callers hold.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
    },
};

use parking_lot::{Mutex, RwLock};
use uccl_fabric::{
    alloc::{self, SharedBuf},
    mem::Span,
    regcache::{RegCache, Registration},
    region::{Region, RegionTable, Rights, SharedBacking},
};

use crate::{
    endpoint::Iov,
    error::{Error, Result},
    ids::MrId,
};

/// A registered region. Transfers that use it hold a [`Lease`].
pub(crate) struct Mr {
    pub(crate) id: MrId,
    pub(crate) span: Span,
    pub(crate) region: Region,
    leases: AtomicUsize,
    /// Memory from `alloc`, kept alive, and mapped by peers of this host.
    pub(crate) memory: Mutex<Option<Registration<Arc<SharedBuf>>>>,
}

impl Mr {
    /// Where a part of the region is in shared memory, if it is.
    pub(crate) fn backing_of(&self, span: Span) -> Option<SharedBacking> {
        let backing = self.region.backing?;
        let offset = backing.offset + (span.addr - self.span.addr) as u64;
        Some(SharedBacking { offset, ..backing })
    }
}

/// A transfer of this endpoint uses the region: it cannot be deregistered meanwhile.
pub(crate) struct Lease(Arc<Mr>);

impl Lease {
    pub(crate) fn of(mr: &Arc<Mr>) -> Self {
        mr.leases.fetch_add(1, SeqCst);
        Self(Arc::clone(mr))
    }

    pub(crate) fn mr(&self) -> &Mr {
        &self.0
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.leases.fetch_sub(1, SeqCst);
    }
}

/// All regions of an endpoint.
pub(crate) struct Mrs {
    pub(crate) table: Arc<RegionTable>,
    by_id: RwLock<BTreeMap<MrId, Arc<Mr>>>,
    /// Memory from `alloc` that regions lie in, whole.
    mapped: RegCache<Arc<SharedBuf>>,
    next: AtomicU64,
}

impl Mrs {
    pub(crate) fn new() -> Result<Self> {
        let table = RegionTable::new().map_err(|e| Error::os("making the region table", e))?;
        Ok(Self {
            table: Arc::new(table),
            by_id: RwLock::new(BTreeMap::new()),
            mapped: RegCache::default(),
            next: AtomicU64::new(1),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.read().len()
    }

    /// Adds a region. The first one in some memory from `alloc` has it offered to peers.
    pub(crate) fn insert(&self, span: Span, offer: impl FnOnce(&SharedBuf)) -> Result<Arc<Mr>> {
        if span.addr.checked_add(span.len).is_none() {
            return Err(Error::Invalid(format!(
                "{} bytes at {:#x} run past the end of the address space",
                span.len, span.addr
            )));
        }
        if span.addr == 0 && span.len > 0 {
            return Err(Error::Invalid("a null pointer cannot be registered".into()));
        }
        let (shared, memory) = alloc::lookup(span).unzip();
        let region = self
            .table
            .insert(span, Rights::ALL, shared)
            .map_err(|e| Error::Invalid(format!("cannot register: {e}")))?;
        let memory = memory.map(|memory| {
            let Ok(registration) = self.mapped.acquire(memory.span(), || {
                offer(&memory);
                Ok::<_, Infallible>((memory.span(), Arc::clone(&memory)))
            });
            registration
        });
        let id = MrId(self.next.fetch_add(1, Relaxed));
        let mr = Mr { id, span, region, leases: AtomicUsize::new(0), memory: Mutex::new(memory) };
        let mr = Arc::new(mr);
        self.by_id.write().insert(id, Arc::clone(&mr));
        Ok(mr)
    }

    /// Memory from `alloc` that regions lie in.
    pub(crate) fn shared_memory(&self) -> Vec<Arc<SharedBuf>> {
        self.mapped.all()
    }

    /// A region that has been taken out lets go of its memory from `alloc`; with the last one in that
    /// memory `retract` is called.
    pub(crate) fn let_go(&self, mr: &Mr, retract: impl FnOnce(&SharedBuf)) {
        if let Some(memory) = mr.memory.lock().take() {
            self.mapped.release(memory, |memory| retract(memory));
        }
    }

    pub(crate) fn get(&self, id: MrId) -> Result<Arc<Mr>> {
        self.by_id.read().get(&id).cloned().ok_or(Error::UnknownRegion(id))
    }

    /// Takes a region out, unless a transfer of ours uses it.
    pub(crate) fn remove(&self, id: MrId) -> Result<Arc<Mr>> {
        let mut by_id = self.by_id.write();
        let mr = by_id.get(&id).ok_or(Error::UnknownRegion(id))?;
        let leases = mr.leases.load(SeqCst);
        if leases > 0 {
            return Err(Error::Invalid(format!(
                "{id} is used by {leases} unfinished transfers: wait for them or cancel them first"
            )));
        }
        by_id.remove(&id).ok_or(Error::UnknownRegion(id))
    }

    /// Finds the region of every iov and checks that the iov lies inside it; calls `each` with them.
    pub(crate) fn resolve(
        &self,
        iovs: &[Iov],
        mut each: impl FnMut(usize, &Arc<Mr>, Span),
    ) -> Result<()> {
        let by_id = self.by_id.read();
        let mut last: Option<&Arc<Mr>> = None;
        for (i, iov) in iovs.iter().enumerate() {
            let mr = match last {
                Some(mr) if mr.id == iov.mr => mr,
                _ => by_id.get(&iov.mr).ok_or(Error::UnknownRegion(iov.mr))?,
            };
            let span = Span { addr: iov.ptr, len: iov.len };
            if !contains(mr.span, span) {
                return Err(outside(i, mr, span));
            }
            last = Some(mr);
            each(i, mr, span);
        }
        Ok(())
    }
}

pub(crate) fn contains(outer: Span, inner: Span) -> bool {
    inner.addr >= outer.addr
        && inner.addr.checked_add(inner.len).is_some_and(|end| end <= outer.addr + outer.len)
}

pub(crate) fn outside(iov: usize, mr: &Mr, span: Span) -> Error {
    Error::OutsideRegion {
        iov,
        ptr: span.addr,
        len: span.len,
        mr: mr.id,
        region_ptr: mr.span.addr,
        region_len: mr.span.len,
    }
}
