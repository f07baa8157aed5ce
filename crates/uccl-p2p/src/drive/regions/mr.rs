//! One registered region, and those who use it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use parking_lot::Mutex;
use uccl_device::{
    MemoryKind, NearNic,
    cuda::{GpuError, classify},
};
use uccl_fabric::{
    alloc::Shareable,
    mem::Span,
    regcache::Registration,
    region::{Region, RevokedRegion, SharedBacking},
};

use crate::{
    drive::{
        addresses::{Entry, RegionKey},
        places,
    },
    error::Error,
    ids::MrId,
};

/// A registered region. Transfers that use it hold a [`Lease`].
pub(crate) struct Mr {
    pub(crate) id: MrId,
    pub(crate) span: Span,
    pub(crate) region: Region,
    pub(crate) kind: MemoryKind,
    /// The allocations of its first and its last byte, where the driver tells allocations apart.
    pub(super) allocations: [Option<u64>; 2],
    pub(super) leases: AtomicUsize,
    /// The memory that contains it, if peers of this host can reach that by themselves: memory from
    /// `alloc`, which this keeps alive, or a GPU's memory.
    pub(crate) memory: Mutex<Option<Registration<Shareable>>>,
}

impl Mr {
    /// Whether the memory still belongs to the allocation that it was registered in; true where the
    /// driver does not report allocations.
    pub(crate) fn is_same_memory(&self) -> bool {
        self.allocations[0].is_none()
            || allocations(self.span).is_ok_and(|now| now == self.allocations)
    }

    /// The NUMA node of the first page of host memory, where there are several nodes and the kernel
    /// tells. Read at each call, not when registering: it takes a system call, and memory that
    /// nobody has touched yet is on no node.
    pub(crate) fn node(&self) -> Option<u32> {
        places::node_of(self.kind, self.span)
    }

    /// The nearest usable NIC to memory of this kind on that node, for an endpoint of this GPU. The
    /// answer is remembered for all memory at the same place.
    pub(crate) fn nearest_nic(&self, node: Option<u32>, gpu: u32) -> Option<NearNic> {
        places::nearest_nic(self.kind, node, gpu)
    }

    /// Its place and its key, in lists of regions by address.
    pub(super) fn entry(&self) -> Entry<RegionKey> {
        let (addr, len) = (self.span.addr as u64, self.span.len as u64);
        Entry { addr, len, value: RegionKey { key: self.region.key, slot: self.region.slot } }
    }

    /// Where a part of the region is within shared memory, if the region is shared.
    pub(crate) fn backing_of(&self, span: Span) -> Option<SharedBacking> {
        let backing = self.region.backing?;
        let offset = backing.offset + (span.addr - self.span.addr) as u64;
        Some(SharedBacking { offset, ..backing })
    }
}

/// The driver's ids of the allocations of the first and the last byte.
pub(super) fn allocations(span: Span) -> std::result::Result<[Option<u64>; 2], GpuError> {
    let last = span.addr + span.len.saturating_sub(1);
    let id = |addr| Ok(classify(addr as u64)?.allocation.map(|allocation| allocation.id));
    Ok([id(span.addr)?, id(last)?])
}

/// A transfer of this endpoint uses the region. While this exists, the region cannot be
/// deregistered.
pub(crate) struct Lease(Arc<Mr>);

impl Lease {
    pub(super) fn of(mr: &Arc<Mr>) -> Self {
        mr.leases.fetch_add(1, SeqCst);
        Self(Arc::clone(mr))
    }

    pub(crate) fn mr(&self) -> &Mr {
        &self.0
    }
}

/// A region that was looked up. While this exists, the region stays listed, so that a lease of it
/// can be made.
pub(crate) struct ListedMr<'a>(pub(super) &'a Arc<Mr>);

impl ListedMr<'_> {
    pub(crate) fn lease(&self) -> Lease {
        Lease::of(self.0)
    }
}

impl std::ops::Deref for ListedMr<'_> {
    type Target = Mr;

    fn deref(&self) -> &Mr {
        self.0
    }
}

/// A region that was revoked: no new access to it can begin, but accesses may be under way.
pub(crate) struct EndingRegion {
    pub(crate) mr: Arc<Mr>,
    /// Keeps the slot from being used again, until the memory has been let go.
    pub(super) revoked: Mutex<Option<RevokedRegion>>,
}

impl EndingRegion {
    /// Whether transfers of ours use it, which end with their connections.
    pub(crate) fn is_leased(&self) -> bool {
        self.mr.leases.load(SeqCst) > 0
    }

    /// Calls `release` for the region, which lets go of its memory or says why not yet. Once that
    /// has succeeded, later calls do nothing, however many threads wait for it.
    pub(crate) fn let_go<E>(&self, release: impl FnOnce(&Mr) -> Result<(), E>) -> Result<(), E> {
        let mut revoked = self.revoked.lock();
        // Afterwards `release` must not be called any more: the slot may belong to another region.
        if revoked.is_some() {
            release(&self.mr)?;
            // After `release`: devices know the region by its slot.
            *revoked = None;
        }
        Ok(())
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        Self::of(&self.0)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.leases.fetch_sub(1, SeqCst);
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
