//! GPU memory that the peer offered, opened for a GPU of ours when that is first to reach it.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use uccl_device::cuda::{
    Context, GpuError, GpuUuid, Gpus, HostRegistration, Importer, IpcHandle, Mapping, PeerId,
};
use uccl_wire::gpu_offer::{GpuOffer, Means};

use crate::shm::Segment;

/// A handle is opened once in a process, whoever uses it.
static IMPORTER: LazyLock<Importer> = LazyLock::new(Importer::default);

/// Whose memory is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// Another process.
    Other(PeerId),
    /// This one: its memory is where it is.
    Ourselves,
}

/// Memory that the peer offered.
#[derive(Debug)]
pub struct OpenedGpu {
    offer: GpuOffer,
    fds: Vec<OwnedFd>,
    owner: Owner,
    /// By the ordinal of the GPU that reaches it.
    mappings: Mutex<HashMap<u32, Arc<Mapping>>>,
}

/// Where some of the peer's memory is for one of our GPUs, and what keeps it there.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its address.
    pub address: u64,
    /// Keeps it there.
    pub keep: Keep,
}

/// What keeps memory where it is.
#[derive(Clone, Debug)]
pub enum Keep {
    /// Another process's GPU memory, open.
    Mapping(Arc<Mapping>),
    /// The peer's shared host memory, locked.
    Locked(Arc<LockedHost>),
    /// Nothing: it is this process's own, or the hazard suffices.
    Nothing,
}

impl OpenedGpu {
    /// Notes an offer; nothing is opened yet.
    #[must_use]
    pub fn new(offer: GpuOffer, fds: Vec<OwnedFd>, owner: Owner) -> Self {
        Self { offer, fds, owner, mappings: Mutex::default() }
    }

    /// The GPU that the memory is on, if this process sees it.
    #[must_use]
    pub fn context(&self) -> Option<Result<&'static Context, GpuError>> {
        Gpus::get().by_uuid(GpuUuid(self.offer.gpu)).map(|device| device.context())
    }

    /// Whether `[offset, offset + len)` lies within it.
    #[must_use]
    pub fn holds(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.offer.len)
    }

    /// Where it starts for the GPU of a context; opens it if that is the first time.
    ///
    /// # Errors
    /// When the GPU cannot reach it, or the offer is stale or forged.
    pub fn place(&self, context: &'static Context) -> Result<Place, GpuError> {
        let Owner::Other(peer) = self.owner else {
            if let Some(theirs) = self.context() {
                context.enable_peer(theirs?)?;
            }
            return Ok(Place { address: self.offer.base, keep: Keep::Nothing });
        };
        let mut mappings = self.mappings.lock();
        let gpu = context.device().ordinal();
        if let Some(mapping) = mappings.get(&gpu) {
            return Ok(self.within(mapping));
        }
        let mapping = match &self.offer.means {
            Means::Handle(handle) => IMPORTER.open(context, peer, IpcHandle(*handle))?,
            Means::Descriptors(lens) => {
                let pieces: Vec<_> =
                    self.fds.iter().zip(lens).map(|(fd, len)| (fd, *len as usize)).collect();
                Importer::map(context, &pieces)?
            }
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
        mappings.insert(gpu, mapping);
        Ok(place)
    }

    fn within(&self, mapping: &Arc<Mapping>) -> Place {
        Place { address: mapping.address(), keep: Keep::Mapping(Arc::clone(mapping)) }
    }
}

/// The peer's shared host memory, locked so that GPUs reach it.
#[derive(Debug)]
pub struct LockedHost {
    // It keeps the mapping until the driver has let go.
    _registration: HostRegistration,
    segment: Arc<Segment>,
}

impl LockedHost {
    /// Locks a mapping.
    ///
    /// # Errors
    /// As [`HostRegistration::new`].
    pub(crate) fn new(context: &'static Context, segment: Arc<Segment>) -> Result<Self, GpuError> {
        let (start, len, mapped) = (segment.as_ptr() as u64, segment.len(), Arc::clone(&segment));
        // SAFETY: mapped for as long as the segment lives, which the registration keeps.
        let registration = unsafe { HostRegistration::new(context, start, len, mapped)? };
        Ok(Self { _registration: registration, segment })
    }

    /// Where it starts, for the CPU and for GPUs.
    pub(crate) fn address(&self) -> u64 {
        self.segment.as_ptr() as u64
    }
}
