//! The devices of an endpoint, and the memory that is registered with them.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::{Mutex, RwLock};
use uccl_device::MemoryKind;
use uccl_fabric::rail::{Rail, RailError};
use uccl_fabric::{gpu::CopyBy, lane::Moves, mem::Span, region::Rights};
use uccl_wire::rails::{MAX_RAILS, RailOffer};

use super::pinned::{Book, Pinned, ToPin};

/// The devices that an endpoint has opened, and the endpoint's regions as registered with them.
///
/// Each region is registered by itself, even where regions overlap. So the keys that a peer was given for a region end
/// with that region.
pub struct Rails {
    rails: Vec<Arc<dyn Rail>>,
    copy_by: CopyBy,
    book: RwLock<Book>,
    next: AtomicU64,
    /// The devices, by index, and the kinds of memory for which a refusal has been logged already.
    said: Mutex<HashSet<(usize, MemoryKind)>>,
}

impl Rails {
    /// Takes these devices, with no memory registered yet. If there are more than a connection can have, only the first
    /// are used.
    #[must_use]
    pub fn new(mut rails: Vec<Arc<dyn Rail>>) -> Self {
        if let Some(first) = rails.get(MAX_RAILS) {
            let (name, rest) = (&first.info().name, rails.len() - MAX_RAILS);
            tracing::warn!(
                "{name} and what follows it, {rest} in all, are not used: {MAX_RAILS} are enough"
            );
            rails.truncate(MAX_RAILS);
        }
        let (copy_by, book, said) = (CopyBy::default(), RwLock::default(), Mutex::default());
        Self { rails, copy_by, book, next: AtomicU64::new(1), said }
    }

    /// Sets who copies memory that no device takes. The default is the GPUs themselves; tests use stand-ins.
    #[must_use]
    pub fn copying_by(self, copy_by: CopyBy) -> Self {
        Self { copy_by, ..self }
    }

    pub(super) fn copy_by(&self) -> &CopyBy {
        &self.copy_by
    }

    /// The ordinal of the GPU that copies memory of this kind to memory that devices take. None if nobody does.
    pub(super) fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        match self.copy_by {
            CopyBy::Gpus => kind.device_only(),
            CopyBy::StandIn(_) => Some(0),
        }
    }

    /// The devices.
    #[must_use]
    pub fn all(&self) -> &[Arc<dyn Rail>] {
        &self.rails
    }

    /// The offer of these devices that a peer is sent.
    pub(super) fn offer(&self) -> Vec<RailOffer> {
        let offer = |rail: &Arc<dyn Rail>| {
            let info = rail.info();
            let (name, link, network) = (&info.name, &info.link, &info.network);
            RailOffer { name: name.clone(), link: link.clone(), network: network.clone() }
        };
        self.rails.iter().map(offer).collect()
    }

    /// Registers the region of this slot with every device that takes it, with the rights that peers have. If no device
    /// takes it, its bytes go another way.
    pub fn add(&self, slot: u32, span: Span, kind: MemoryKind, rights: Rights) {
        if span.len == 0 || self.rails.is_empty() || self.of_slot(slot).is_some() {
            return;
        }
        let pinned = self.pin(ToPin { span, kind, rights });
        // Another thread may have registered the region meanwhile. Then this registration was given to nobody and ends
        // here.
        self.book.write().add_region(slot, &pinned);
    }

    /// Registers memory that is not a region, until it is [let go](Self::let_go).
    pub(super) fn hold(&self, span: Span, kind: MemoryKind) -> Arc<Pinned> {
        let pinned = self.pin(ToPin { span, kind, rights: Rights::ALL });
        self.book.write().add(&pinned);
        pinned
    }

    fn pin(&self, memory: ToPin) -> Arc<Pinned> {
        let ToPin { span, kind, rights } = memory;
        let register = |(at, rail): (usize, &Arc<dyn Rail>)| {
            let registered = rail.register(span, kind, rights);
            registered.inspect_err(|why| self.say_refused(at, memory, why))
        };
        let by_rail: Vec<_> = self.rails.iter().enumerate().map(register).collect();
        let moves = match by_rail.iter().any(Result::is_ok) {
            true => Moves::Direct,
            false => self.moves_untaken(kind),
        };
        Arc::new(Pinned::new(self.next.fetch_add(1, Relaxed), memory, by_rail, moves))
    }

    /// How memory of this kind moves if no device takes it.
    fn moves_untaken(&self, kind: MemoryKind) -> Moves {
        if self.copier_of(kind).is_some() { Moves::Staged } else { Moves::Tcp }
    }

    /// Logs that a device refused memory. Such memory is slow, and nothing else shows why. It is a warning once for
    /// each device and kind of memory, and a debug message after that.
    fn say_refused(&self, at: usize, memory: ToPin, why: &RailError) {
        let ToPin { span: Span { len, .. }, kind, .. } = memory;
        let name = self.rails.get(at).map_or("?", |rail| &rail.info().name);
        if !self.said.lock().insert((at, kind)) {
            return tracing::debug!("{name} takes no {len} bytes of {kind} memory: {why}");
        }
        let instead = match self.moves_untaken(kind) {
            Moves::Staged => "such memory is copied through locked host memory",
            Moves::Direct | Moves::Tcp => "where no other device takes it, it goes over TCP",
        };
        let remedy = match kind.device_only() {
            Some(_) => {
                "for GPUDirect, load the module nvidia-peermem, or use a kernel, a driver and an rdma-core \
                 (34 or later) that have dma-buf"
            }
            None => {
                "raise the limit for locked memory (ulimit -l unlimited, or memlock in \
                 /etc/security/limits.conf)"
            }
        };
        tracing::warn!(
            "{name} takes no {len} bytes of {kind} memory ({why}); {instead}. {remedy}; `uccl doctor` says what is \
             missing. It is not said again of this device and this kind of memory"
        );
    }

    /// The slowest way in which any region moves.
    pub(super) fn slowest(&self) -> Moves {
        self.book.read().slowest()
    }

    /// Retires the region of this slot, which is about to end: no new request of ours uses its registration, even where
    /// another region lies in the same memory. True the first time.
    pub fn retire(&self, slot: u32) -> bool {
        self.of_slot(slot).is_some_and(|pinned| pinned.retire())
    }

    /// Whether the region of this slot is being registered for a peer that asked. That ends by itself.
    pub fn is_busy_with(&self, slot: u32) -> bool {
        self.of_slot(slot).is_some_and(|pinned| pinned.is_busy())
    }

    /// Ends the registrations of the region of this slot. The region must have ended, and peers must have released it.
    ///
    /// # Errors
    /// When a device did not end its registration. It may still reach the memory, which must stay; this may be called
    /// again.
    pub fn remove(&self, slot: u32) -> Result<(), RailError> {
        let Some(pinned) = self.of_slot(slot) else { return Ok(()) };
        pinned.end()?;
        self.book.write().remove_region(slot);
        Ok(())
    }

    /// Ends what [`Self::hold`] began.
    ///
    /// # Errors
    /// As for [`Self::remove`].
    pub(super) fn let_go(&self, pinned: &Pinned) -> Result<(), RailError> {
        pinned.end()?;
        self.book.write().remove(pinned);
        Ok(())
    }

    /// The registration of a region.
    pub(super) fn of_slot(&self, slot: u32) -> Option<Arc<Pinned>> {
        self.book.read().of_slot(slot).cloned()
    }

    /// The shortest registration that covers this memory of ours.
    pub(super) fn over(&self, span: Span) -> Option<Arc<Pinned>> {
        self.book.read().over(span).cloned()
    }
}
