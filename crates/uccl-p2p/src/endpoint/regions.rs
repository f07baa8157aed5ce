//! Regions: memory that is registered, and its adverts.

use uccl_fabric::{gpu::prepare_chunks, mem::Span};
use uccl_wire::advert::Advert;

use super::{Endpoint, Iov, RegionInfo};
use crate::{
    drive::regions::{Mr, contains, outside},
    error::{Error, Result},
    ids::MrId,
};

impl Endpoint {
    /// Registers memory.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must stay allocated until the region is deregistered or the
    /// endpoint closed, and that call has returned `Ok`: peers that hold an advert read and write
    /// them at any time.
    pub unsafe fn register(&self, ptr: usize, len: usize) -> Result<MrId> {
        let core = self.here()?;
        core.usable()?;
        core.add_region(Span { addr: ptr, len })
    }

    /// Ends a region: when this returns `Ok`, no access by a peer lands in it any more.
    ///
    /// Refuses a region that unfinished transfers of this endpoint use. Waits for peers of this
    /// host that are in the middle of an access, even if their connection was given up already, for
    /// at most the endpoint's timeout. Then the connection is given up, and [`Error::StillTouched`]
    /// says that the peer may still touch the memory, which must stay allocated. No new access can
    /// begin. Call this again to wait again.
    pub fn deregister(&self, mr: MrId) -> Result<()> {
        self.here()?.release_region(mr)
    }

    /// Whether a region's memory still belongs to the allocation in which it was registered, as far
    /// as the driver tells. After that allocation was freed, other data may be at its address;
    /// peers cannot reach that through this region.
    pub fn is_same_memory(&self, mr: MrId) -> Result<bool> {
        Ok(self.here()?.mrs.get(mr)?.is_same_memory())
    }

    /// Where a region starts and how long it is.
    pub fn region(&self, mr: MrId) -> Result<(usize, usize)> {
        let mr = self.here()?.mrs.get(mr)?;
        Ok((mr.span.addr, mr.span.len))
    }

    /// The region that contains the `len` bytes at `ptr`. If there are several: the one that begins
    /// last.
    pub fn region_holding(&self, ptr: usize, len: usize) -> Option<MrId> {
        self.here().ok()?.mrs.holding(Span { addr: ptr, len }).map(|mr| mr.id)
    }

    /// The address, length and kind of a region, its NUMA node and its nearest NIC.
    pub fn region_info(&self, mr: MrId) -> Result<RegionInfo> {
        let mr = self.here()?.mrs.get(mr)?;
        let numa_node = mr.node();
        let nic = mr.nearest_nic(numa_node, self.config().gpu_index);
        let Span { addr, len } = mr.span;
        Ok(RegionInfo { addr, len, kind: mr.kind, numa_node, nic })
    }

    /// Locks host memory for copies to and from a region on a GPU until this process has so many
    /// chunks of 512 KiB near that GPU. Transfers over streams and rings need about ten of them for
    /// each, in each direction five, and otherwise lock them when they first do: the driver then
    /// waits until the GPU has nothing to do. Host memory needs none.
    ///
    /// # Errors
    /// The region is unknown, or no more memory can be locked.
    pub fn prepare_staging(&self, mr: MrId, chunks: usize) -> Result<()> {
        match self.here()?.mrs.get(mr)?.kind.device_only() {
            Some(gpu) => prepare_chunks(gpu, chunks).map_err(|e| Error::LocalMemory(e.to_string())),
            None => Ok(()),
        }
    }

    /// Publishes a region: peers that are connected find it by the addresses of its bytes, without
    /// an advert ([`run_by_address`](Self::run_by_address)), and get the key of all of it. It stays
    /// published until it is deregistered, which ends also the keys that peers have.
    ///
    /// # Errors
    /// The endpoint does not allow it ([`Config::publish`](crate::Config::publish)), or the region
    /// is unknown.
    pub fn publish(&self, mr: MrId) -> Result<()> {
        let core = self.here()?;
        core.usable()?;
        if !core.config.publish {
            return Err(Error::Invalid(format!(
                "{mr} cannot be published: this endpoint publishes nothing, as long as `publish` (UCCL_P2P_PUBLISH) is not set when it is made"
            )));
        }
        core.mrs.publish(mr)
    }

    /// Makes an advert, with which a peer can read and write the `len` bytes at `ptr` of a region.
    ///
    /// The advert names these bytes and contains the key of the whole region. Honest peers keep to
    /// the bytes; the owner only makes sure that accesses stay inside the region. Put memory that a
    /// peer must not reach into a region of its own; regions may overlap.
    pub fn advertise(&self, mr: MrId, ptr: usize, len: usize) -> Result<Advert> {
        let core = self.here()?;
        core.usable()?;
        let mr = core.mrs.get(mr)?;
        let span = Span { addr: ptr, len };
        if !contains(mr.span, span) {
            return Err(outside(0, &mr, span));
        }
        Ok(self.advert_of(&mr, span))
    }

    /// Makes an advert for each of these pieces. Fails if one is outside its region.
    pub fn advertise_all(&self, iovs: &[Iov]) -> Result<Vec<Advert>> {
        let core = self.here()?;
        core.usable()?;
        let mut adverts = Vec::with_capacity(iovs.len());
        core.mrs.resolve(iovs, false, |_, mr, span| {
            adverts.push(self.advert_of(&mr, span));
            Ok(())
        })?;
        Ok(adverts)
    }

    fn advert_of(&self, mr: &Mr, span: Span) -> Advert {
        Advert {
            addr: span.addr as u64,
            len: span.len as u64,
            key: mr.region.key,
            slot: mr.region.slot,
            instance: self.core().instance as u32,
        }
    }
}
