//! GPU memory that the peer offered, opened for a GPU of ours when that GPU first accesses it.

use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use uccl_device::cuda::{
    Context, GpuError, GpuLink, GpuUuid, Gpus, HostRegistration, Importer, IpcHandle, Mapping,
    PeerId,
};
use uccl_wire::gpu_offer::{GpuOffer, Means};

use super::descriptors::PendingDescriptors;

/// One importer for the process, so that each handle is opened only once.
static IMPORTER: LazyLock<Importer> = LazyLock::new(Importer::default);

/// The process that owns opened memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// Another process.
    Other(PeerId),
    /// This process: its memory need not be opened.
    Ourselves,
}

/// Memory that the peer offered.
#[derive(Debug)]
pub struct OfferedMemory {
    offer: GpuOffer,
    owner: Owner,
    opened: Mutex<OfferState>,
}

/// The state of offered memory: which GPUs of ours have it open.
#[derive(Debug, Default)]
struct OfferState {
    /// The descriptors, until it is mapped.
    fds: PendingDescriptors,
    /// The mapping for each GPU, by its ordinal.
    mappings: HashMap<u32, Arc<Mapping>>,
}

/// The address at which one of our GPUs reaches some of the peer's memory, and the object that
/// keeps it valid.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its address.
    pub address: u64,
    /// Keeps the address valid.
    pub keep: PlaceOwner,
}

/// The object that keeps a [`Place`] valid.
#[derive(Clone, Debug)]
pub enum PlaceOwner {
    /// Another process's GPU memory, open.
    Mapping(Arc<Mapping>),
    /// The peer's shared host memory, locked.
    Locked(Arc<LockedHost>),
    /// Nothing: the memory is this process's own, or the hazard suffices.
    Nothing,
}

impl OfferedMemory {
    /// Records an offer; nothing is opened yet.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] when too many descriptors wait to be opened already.
    pub fn new(offer: GpuOffer, fds: Vec<OwnedFd>, owner: Owner) -> io::Result<Self> {
        let fds = match owner {
            Owner::Other(_) => PendingDescriptors::of(fds)?,
            Owner::Ourselves => PendingDescriptors::default(),
        };
        let opened = OfferState { fds, mappings: HashMap::new() };
        Ok(Self { offer, owner, opened: Mutex::new(opened) })
    }

    /// The GPU that the memory is on, if this process sees it.
    #[must_use]
    pub fn context(&self) -> Option<Result<&'static Context, GpuError>> {
        Gpus::get().by_uuid(GpuUuid(self.offer.gpu)).map(|device| device.context())
    }

    /// The UUID of that GPU.
    pub(crate) fn uuid(&self) -> GpuUuid {
        GpuUuid(self.offer.gpu)
    }

    /// Whether `[offset, offset + len)` lies within it.
    #[must_use]
    pub fn holds(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.offer.len)
    }

    /// Whether atomic operations of a GPU of ours work on it.
    pub(crate) fn takes_atomics_of(&self, context: &Context) -> bool {
        let there = Gpus::get().by_uuid(GpuUuid(self.offer.gpu));
        let link = there.and_then(|there| context.device().link_to(there).ok());
        matches!(link, Some(GpuLink::Itself | GpuLink::Nvlink))
    }

    /// The address at which the GPU of a context reaches the start of the memory. Opens the memory
    /// the first time.
    ///
    /// # Errors
    /// When the GPU cannot reach it, or the offer is stale or forged.
    pub fn place(&self, context: &'static Context) -> Result<Place, GpuError> {
        let Owner::Other(peer) = self.owner else {
            if let Some(theirs) = self.context() {
                context.enable_peer(theirs?)?;
            }
            return Ok(Place { address: self.offer.base, keep: PlaceOwner::Nothing });
        };
        let mut opened = self.opened.lock();
        let gpu = context.device().ordinal();
        if let Some(mapping) = opened.mappings.get(&gpu) {
            return Ok(self.within(mapping));
        }
        let mapping = match &self.offer.means {
            Means::Handle(handle) => IMPORTER.open(context, peer, IpcHandle(*handle))?,
            Means::Descriptors(lens) => opened.map(context, lens)?,
        };
        if (mapping.len_bytes() as u64) < self.offer.len {
            return Err(GpuError::System {
                doing: "opening the peer's memory".into(),
                reason: format!(
                    "it is {} bytes long and was offered as {}",
                    mapping.len_bytes(),
                    self.offer.len
                ),
            });
        }
        let place = self.within(&mapping);
        opened.mappings.insert(gpu, mapping);
        Ok(place)
    }

    fn within(&self, mapping: &Arc<Mapping>) -> Place {
        Place { address: mapping.address(), keep: PlaceOwner::Mapping(Arc::clone(mapping)) }
    }
}

impl OfferState {
    /// Maps the memory of the descriptors, and closes them. Later calls only let other GPUs in.
    fn map(&mut self, context: &'static Context, lens: &[u64]) -> Result<Arc<Mapping>, GpuError> {
        if let Some(mapping) = self.mappings.values().next() {
            mapping.allow_peer(context)?;
            return Ok(Arc::clone(mapping));
        }
        let fds = self.fds.as_slice();
        let pieces: Vec<_> = fds.iter().zip(lens).map(|(fd, len)| (fd, *len as usize)).collect();
        let mapping = Importer::map(context, &pieces)?;
        self.fds = PendingDescriptors::default();
        Ok(mapping)
    }
}

/// How many bytes of peers' memory are locked.
static LOCKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The peer's shared host memory, locked so that GPUs reach it.
#[derive(Debug)]
pub struct LockedHost {
    // Keeps the mapping until the driver has let go of it.
    _registration: HostRegistration,
    mapping: Arc<uccl_fabric::shm::Mapping>,
}

/// Bytes that count as locked.
#[derive(Debug)]
struct LockedBytes(u64);

impl LockedBytes {
    /// Counts `bytes` bytes, unless the sum exceeds `most`.
    fn of(bytes: u64, most: u64) -> Option<Self> {
        let sum = |locked: u64| locked.checked_add(bytes).filter(|sum| *sum <= most);
        LOCKED_BYTES.fetch_update(Relaxed, Relaxed, sum).ok().map(|_| Self(bytes))
    }
}

impl Drop for LockedBytes {
    fn drop(&mut self) {
        LOCKED_BYTES.fetch_sub(self.0, Relaxed);
    }
}

/// The most bytes of peers' memory that are locked, for all peers together. Locking allocates the
/// memory, even where its owner has not touched it yet.
fn most_locked() -> u64 {
    static MOST: LazyLock<u64> = LazyLock::new(|| {
        let rustix::system::Sysinfo { totalram, mem_unit, .. } = rustix::system::sysinfo();
        totalram.saturating_mul(u64::from(mem_unit)) / 2
    });
    *MOST
}

impl LockedHost {
    /// Locks a mapping.
    ///
    /// # Errors
    /// [`GpuError::System`] if too many bytes would be locked, otherwise as
    /// [`HostRegistration::new`].
    pub(crate) fn new(
        context: &'static Context,
        mapping: Arc<uccl_fabric::shm::Mapping>,
    ) -> Result<Self, GpuError> {
        let most = most_locked();
        let counted =
            LockedBytes::of(mapping.len() as u64, most).ok_or_else(|| GpuError::System {
                doing: format!("locking {} bytes of a peer's memory", mapping.len()),
                reason: format!("at most {most} bytes of peers' memory are locked"),
            })?;
        let (start, len) = (mapping.as_ptr() as u64, mapping.len());
        // The bytes count until the driver has let go of them.
        let kept = (Arc::clone(&mapping), counted);
        // SAFETY: the range is mapped while the mapping lives, and the registration keeps the
        // mapping.
        let registration = unsafe { HostRegistration::new(context, start, len, kept)? };
        Ok(Self { _registration: registration, mapping })
    }

    /// Its start address, for the CPU and for GPUs.
    pub(crate) fn address(&self) -> u64 {
        self.mapping.as_ptr() as u64
    }

    /// Whether `[offset, offset + len)` lies within it.
    pub(crate) fn holds(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.mapping.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_locked_for_peers_is_bounded_in_all() {
        let half = LockedBytes::of(50, 100).unwrap();
        let rest = LockedBytes::of(50, 100).unwrap();
        assert!(LockedBytes::of(1, 100).is_none() && LockedBytes::of(u64::MAX, 100).is_none());
        drop(half);
        assert!(LockedBytes::of(51, 100).is_none() && LockedBytes::of(50, 100).is_some());
        drop(rest);
        assert!(most_locked() > 1 << 20);
    }
}
