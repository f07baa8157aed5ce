//! The devices of an endpoint, and the memory that is registered with them.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;
use uccl_device::MemoryKind;
use uccl_wire::rails::RailOffer;

use super::rail::{Rail, RailError, Registration as DeviceRegistration, RemoteKey};
use crate::{
    gpu::CopyBy,
    mem::Span,
    regcache::{RegCache, Registration},
};

/// Devices that an endpoint has opened, and its regions as far as these reach them.
///
/// A registration with a device costs (pages are pinned), so regions that lie in one another share one. It
/// ends with the last of them, after peers have let go of the region; see [`super::RmaLane`].
pub struct Rails {
    rails: Vec<Arc<dyn Rail>>,
    copy_by: CopyBy,
    pinned: RegCache<Arc<Pinned>>,
    by_slot: RwLock<HashMap<u32, Registration<Arc<Pinned>>>>,
}

/// Memory as every device knows it.
pub(super) struct Pinned {
    span: Span,
    /// One a rail, or why there is none.
    by_rail: Vec<Result<Box<dyn DeviceRegistration>, RailError>>,
}

impl Pinned {
    /// The device's registration, if it took the memory.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn DeviceRegistration> {
        self.by_rail.get(rail)?.as_deref().ok()
    }

    /// Whether the memory is covered.
    pub(super) fn covers(&self, span: Span) -> bool {
        let offset = span.addr.checked_sub(self.span.addr);
        offset.is_some_and(|offset| offset <= self.span.len && span.len <= self.span.len - offset)
    }

    /// Where memory that is covered is for peers, if this is how they name what is registered.
    pub(super) fn base_of(&self, addr: usize, key: &RemoteKey) -> u64 {
        key.base.wrapping_add((addr - self.span.addr) as u64)
    }
}

impl Rails {
    /// These devices, and no memory yet.
    #[must_use]
    pub fn new(rails: Vec<Arc<dyn Rail>>) -> Self {
        let copy_by = CopyBy::default();
        Self { rails, copy_by, pinned: RegCache::default(), by_slot: RwLock::default() }
    }

    /// Has what no device takes be copied by others than GPUs.
    #[must_use]
    pub fn copying_by(self, copy_by: CopyBy) -> Self {
        Self { copy_by, ..self }
    }

    pub(super) fn copy_by(&self) -> &CopyBy {
        &self.copy_by
    }

    /// Who copies memory of this kind to where devices take it, by its ordinal; none if nobody does.
    pub(super) fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        match self.copy_by {
            CopyBy::Gpus => kind.device_only(),
            CopyBy::Chaos(_) => Some(0),
        }
    }

    /// The devices.
    #[must_use]
    pub fn all(&self) -> &[Arc<dyn Rail>] {
        &self.rails
    }

    /// What a peer is told of them.
    pub(super) fn offer(&self) -> Vec<RailOffer> {
        let offer = |rail: &Arc<dyn Rail>| {
            let info = rail.info();
            let (name, link, network) = (&info.name, &info.link, &info.network);
            RailOffer { name: name.clone(), link: link.clone(), network: network.clone() }
        };
        self.rails.iter().map(offer).collect()
    }

    /// Registers the region of this slot with every device that takes it. Where none does, its bytes go
    /// another way.
    pub fn add(&self, slot: u32, span: Span, kind: MemoryKind) {
        if span.len == 0 || self.rails.is_empty() {
            return;
        }
        let registration = self.hold(span, kind);
        let old = self.by_slot.write().insert(slot, registration);
        if let Some(old) = old {
            self.let_go(old);
        }
    }

    /// Registers memory that is no region, until it is [let go](Self::let_go).
    pub(super) fn hold(&self, span: Span, kind: MemoryKind) -> Registration<Arc<Pinned>> {
        let make = || Ok::<_, std::convert::Infallible>((span, Arc::new(self.pin(span, kind))));
        let Ok(registration) = self.pinned.acquire(span, make);
        registration
    }

    fn pin(&self, span: Span, kind: MemoryKind) -> Pinned {
        let register = |rail: &Arc<dyn Rail>| {
            rail.register(span, kind).inspect_err(|e| {
                let (name, len) = (&rail.info().name, span.len);
                match self.copier_of(kind) {
                    // Rails carry it all the same.
                    Some(_) => tracing::debug!("{name} takes no {len} bytes of {kind} memory: {e}"),
                    None => {
                        tracing::warn!("{name} does not take {len} bytes of {kind} memory: {e}")
                    }
                }
            })
        };
        Pinned { span, by_rail: self.rails.iter().map(register).collect() }
    }

    /// The region of this slot has ended, and peers have let go of it.
    pub fn remove(&self, slot: u32) {
        let gone = self.by_slot.write().remove(&slot);
        if let Some(gone) = gone {
            self.let_go(gone);
        }
    }

    /// Ends what [`Self::hold`] began.
    pub(super) fn let_go(&self, registration: Registration<Arc<Pinned>>) {
        self.pinned.release(registration, |_| {});
    }

    /// What a region is registered as.
    pub(super) fn of_slot(&self, slot: u32) -> Option<Arc<Pinned>> {
        self.by_slot.read().get(&slot).map(|registration| Arc::clone(registration.value()))
    }

    /// What memory of ours is registered as.
    pub(super) fn over(&self, span: Span) -> Option<Arc<Pinned>> {
        self.pinned.over(span)
    }
}
