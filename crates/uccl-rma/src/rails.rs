//! The devices of an endpoint, and the memory that is registered with them.

mod waiting;

use std::{
    collections::HashSet,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::{Builder, JoinHandle},
};

use parking_lot::{Mutex, RwLock};
use uccl_device::{MemoryKind, cuda};
use uccl_fabric::rail::{Rail, RailError};
use uccl_fabric::{gpu::CopyBy, lane::Moves, mem::Span, region::Rights};
use uccl_wire::rails::{MAX_RAILS, RailOffer};

use self::waiting::RegistrationQueue;
use super::pinned::{PinRegistry, PinRequest, PinnedRegion};

/// The devices that an endpoint has opened, and the endpoint's regions as registered with them.
///
/// Each region is registered by itself, even where regions overlap. So the keys that a peer was
/// given for a region end with that region.
///
/// To open devices takes long, and to register much memory takes longer. A thread of its own does
/// both for the regions that are older than the devices.
pub struct Rails {
    shared: Arc<SharedRails>,
    /// Opens the devices and registers the regions that wait.
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct SharedRails {
    /// Empty until the devices are open.
    rails: OnceLock<Vec<Arc<dyn Rail>>>,
    copy_by: CopyBy,
    book: RwLock<PinRegistry>,
    waiting: RegistrationQueue,
    /// Whether a device is being opened again, by index.
    reopening: Vec<Mutex<()>>,
    /// Locked for writing while memory is registered with a device that was opened again, and for
    /// reading while new memory is registered: so each region is registered with the device as it
    /// is then.
    renewing: RwLock<()>,
    next: AtomicU64,
    /// The devices, by index, and the kinds of memory for which a refusal has been logged already.
    said: Mutex<HashSet<(usize, MemoryKind)>>,
    /// The devices, by index, the peers' devices and the reasons of which it has been logged that
    /// they cannot be joined.
    said_apart: Mutex<HashSet<(usize, String)>>,
}

/// The name of the link over these devices, as people are told it.
#[must_use]
pub fn link_of(rails: &[Arc<dyn Rail>]) -> &'static str {
    let link = rails.first().map(|rail| rail.info().link.as_str());
    match link.unwrap_or_default() {
        link if link.starts_with("verbs") => "verbs",
        link if link.starts_with("libfabric") => "libfabric",
        "udp" => "udp",
        _ => "rma",
    }
}

/// After so many different warnings about devices that cannot be joined, there are no more.
const MOST_APART: usize = 1000;

impl Default for Rails {
    /// Rails with devices that are opened later, by [`Self::open_by`]. Regions may be added before.
    fn default() -> Self {
        let shared = SharedRails {
            rails: OnceLock::new(),
            copy_by: CopyBy::default(),
            book: RwLock::default(),
            waiting: RegistrationQueue::default(),
            reopening: (0..MAX_RAILS).map(|_| Mutex::default()).collect(),
            renewing: RwLock::default(),
            next: AtomicU64::new(1),
            said: Mutex::default(),
            said_apart: Mutex::default(),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }
}

impl Rails {
    /// Takes these devices, with no memory registered yet. If there are more than a connection can
    /// have, only the first are used.
    #[must_use]
    pub fn new(rails: Vec<Arc<dyn Rail>>) -> Self {
        let this = Self::default();
        this.shared.opened(rails);
        this
    }

    /// Opens the devices with this function, on a thread of its own, and then registers the regions
    /// that were added before. Lanes may be made meanwhile: they offer the devices to their peers
    /// when all are open.
    pub fn open_by(&self, open: impl FnOnce() -> Vec<Arc<dyn Rail>> + Send + 'static) {
        let mut thread = self.thread.lock();
        let shared = Arc::clone(&self.shared);
        let work = move || {
            let work = WorkerGuard(shared);
            work.0.opened(open());
            work.0.register_waiting();
        };
        match Builder::new().name("uccl-devices".into()).spawn(work) {
            Ok(started) => *thread = Some(started),
            Err(e) => {
                tracing::warn!("no device is used, as no thread can be started to open them: {e}");
                drop(WorkerGuard(Arc::clone(&self.shared)));
            }
        }
    }

    /// Sets the copier of memory that no device takes. The default is the GPUs themselves.
    ///
    /// # Panics
    /// When the devices are being opened already.
    #[must_use]
    pub fn copying_by(mut self, copy_by: CopyBy) -> Self {
        Arc::get_mut(&mut self.shared).expect("no thread has it").copy_by = copy_by;
        self
    }

    pub(super) fn copy_by(&self) -> &CopyBy {
        &self.shared.copy_by
    }

    /// The ordinal of the GPU that copies memory of this kind to memory that devices take. None if
    /// nobody does.
    pub(super) fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        self.shared.copier_of(kind)
    }

    /// The devices. None before they are open.
    #[must_use]
    pub fn all(&self) -> &[Arc<dyn Rail>] {
        self.shared.rails()
    }

    /// Whether the devices are open, or it is known that there are none.
    #[must_use]
    pub fn are_open(&self) -> bool {
        self.shared.rails.get().is_some()
    }

    /// The offer of these devices that a peer is sent.
    pub(super) fn offer(&self) -> Vec<RailOffer> {
        let offer = |rail: &Arc<dyn Rail>| {
            let info = rail.info();
            let (name, link, network) = (&info.name, &info.link, &info.network);
            RailOffer { name: name.clone(), link: link.clone(), network: network.clone() }
        };
        self.all().iter().map(offer).collect()
    }

    /// Registers the region of this slot with every device that takes it, with the rights that
    /// peers have. If no device takes it, its bytes go another way. Before the devices are open
    /// this only notes the region: it is registered when they are.
    pub fn add(&self, slot: u32, span: Span, kind: MemoryKind, rights: Rights) {
        let SharedRails { waiting, book, .. } = &*self.shared;
        let memory = PinRequest { span, kind, rights };
        if span.len == 0 || waiting.add_unless(slot, memory, || self.are_open()) {
            return;
        }
        if self.all().is_empty() || waiting.has(slot) || self.of_slot(slot).is_some() {
            return;
        }
        let _as_it_is = self.shared.renewing.read();
        let pinned = self.shared.pin(memory);
        // Another thread may have registered the region meanwhile. Then this registration was given
        // to nobody and ends here.
        book.write().add_region(slot, &pinned);
    }

    /// If this device was lost and is there again, opens it and registers all memory with it. May
    /// take long.
    pub(super) fn reopen(&self, at: usize) {
        let SharedRails { reopening, renewing, book, .. } = &*self.shared;
        let (Some(rail), Some(reopening)) = (self.all().get(at), reopening.get(at)) else { return };
        let _one_at_a_time = reopening.lock();
        if !rail.reopen() {
            return;
        }
        let _quiet = renewing.write();
        let all: Vec<_> = book.read().all().cloned().collect();
        let name = &rail.info().name;
        tracing::warn!("{name} was lost and is used again");
        for pinned in all {
            if let Err(e) = pinned.renew(at, rail) {
                tracing::warn!("{name} does not take memory again that it had before: {e}");
            }
        }
    }

    /// Whether the region of this slot has yet to be registered: an answer about it has to wait.
    pub(super) fn is_to_register(&self, slot: u32) -> bool {
        self.shared.waiting.has(slot)
    }

    /// Whether a region that contains this memory has yet to be registered.
    pub(super) fn is_to_reach(&self, span: Span) -> bool {
        self.shared.waiting.reaches(span)
    }

    /// A number that grows when a region that waited has been registered, or does not wait any
    /// more.
    pub(super) fn registered(&self) -> u64 {
        self.shared.waiting.ended()
    }

    /// Registers memory that is not a region, until it is [let go](Self::let_go). May take long.
    pub(super) fn hold(&self, span: Span, kind: MemoryKind) -> Arc<PinnedRegion> {
        let _as_it_is = self.shared.renewing.read();
        let pinned = self.shared.pin(PinRequest { span, kind, rights: Rights::ALL });
        self.shared.book.write().add(&pinned);
        pinned
    }

    /// Logs that a device does not reach a peer's: data between them takes a slower way. It is a
    /// warning once for each pair and reason, and a debug message after that.
    pub(super) fn say_not_joined(&self, ours: usize, theirs: &str, why: &str) {
        let name = self.all().get(ours).map_or("?", |rail| &rail.info().name);
        let mut said = self.shared.said_apart.lock();
        let is_new = said.len() < MOST_APART && said.insert((ours, format!("{theirs}: {why}")));
        drop(said);
        if !is_new {
            return tracing::debug!("{name} does not reach the peer's {theirs}: {why}");
        }
        tracing::warn!(
            "{name} does not reach the peer's {theirs} ({why}); data takes other devices, or TCP. It is tried again, ever \
             more rarely, and not said again of these two and this reason"
        );
    }

    /// The slowest way in which any region moves.
    pub(super) fn slowest(&self) -> Moves {
        self.shared.book.read().slowest()
    }

    /// Retires the region of this slot, which is about to end: no new request of ours uses its
    /// registration, even where another region lies in the same memory. True the first time.
    pub fn retire(&self, slot: u32) -> bool {
        self.shared.waiting.retire(slot);
        self.of_slot(slot).is_some_and(|pinned| pinned.retire())
    }

    /// Whether the region of this slot is being registered, or registered again for a peer that
    /// asked or for a channel. That ends by itself.
    pub fn is_busy_with(&self, slot: u32) -> bool {
        self.is_to_register(slot) || self.of_slot(slot).is_some_and(|pinned| pinned.is_busy())
    }

    /// Ends the registrations of the region of this slot. The region must have ended, and peers
    /// must have released it.
    ///
    /// # Errors
    /// When a device did not end its registration. It may still reach the memory, which must stay;
    /// this may be called again.
    pub fn remove(&self, slot: u32) -> Result<(), RailError> {
        let Some(pinned) = self.of_slot(slot) else { return Ok(()) };
        pinned.end()?;
        self.shared.book.write().remove_region(slot);
        Ok(())
    }

    /// Ends the registrations that [`Self::hold`] made.
    ///
    /// # Errors
    /// As for [`Self::remove`].
    pub(super) fn let_go(&self, pinned: &PinnedRegion) -> Result<(), RailError> {
        pinned.end()?;
        self.shared.book.write().remove(pinned);
        Ok(())
    }

    /// The registration of a region.
    pub(super) fn of_slot(&self, slot: u32) -> Option<Arc<PinnedRegion>> {
        self.shared.book.read().of_slot(slot).cloned()
    }

    /// The shortest registration that covers this memory of ours.
    pub(super) fn over(&self, span: Span) -> Option<Arc<PinnedRegion>> {
        self.shared.book.read().over(span).cloned()
    }
}

impl Drop for Rails {
    /// Waits for the thread, so that no device is shown memory afterwards.
    fn drop(&mut self) {
        self.shared.waiting.clear();
        if let Some(thread) = self.thread.get_mut().take() {
            // A panic has been reported already.
            drop(thread.join());
        }
    }
}

/// The thread's work. If it ends early, by a panic, nobody waits for the rest of it.
struct WorkerGuard(Arc<SharedRails>);

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.0.opened(Vec::new());
        self.0.waiting.close();
    }
}

impl SharedRails {
    fn rails(&self) -> &[Arc<dyn Rail>] {
        self.rails.get().map_or(&[], Vec::as_slice)
    }

    fn opened(&self, mut rails: Vec<Arc<dyn Rail>>) {
        if let Some(first) = rails.get(MAX_RAILS) {
            let (name, rest) = (&first.info().name, rails.len() - MAX_RAILS);
            tracing::warn!(
                "{name} and what follows it, {rest} in all, are not used: {MAX_RAILS} are enough"
            );
            rails.truncate(MAX_RAILS);
        }
        // They are opened once.
        let _ = self.waiting.while_none_comes(|| self.rails.set(rails));
    }

    /// Registers the regions that were added before the devices were open.
    fn register_waiting(&self) {
        if self.rails().is_empty() {
            self.waiting.clear();
        }
        while let Some((slot, memory)) = self.waiting.begin() {
            let _as_it_is = self.renewing.read();
            let pinned = self.pin(memory);
            self.waiting.end(|is_retired| {
                if is_retired {
                    pinned.retire();
                }
                self.book.write().add_region(slot, &pinned);
            });
        }
    }

    fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        self.copy_by.copier_of(kind)
    }

    fn pin(&self, memory: PinRequest) -> Arc<PinnedRegion> {
        let PinRequest { span, kind, rights } = memory;
        // Before a device may write there.
        let expected = kind.device_only().map_or(Ok(()), cuda::expect_writes_to);
        let not_shown = expected.map_err(|e| format!("its writes could not be flushed: {e}"));
        let register = |(at, rail): (usize, &Arc<dyn Rail>)| {
            let registered = match &not_shown {
                Ok(()) => rail.register(span, kind, rights),
                Err(why) => Err(RailError::Unavailable(why.clone())),
            };
            registered.inspect_err(|why| self.say_refused(at, memory, why))
        };
        let by_rail: Vec<_> = self.rails().iter().enumerate().map(register).collect();
        let moves = match by_rail.iter().any(Result::is_ok) {
            true => Moves::Direct,
            false => self.moves_untaken(kind),
        };
        Arc::new(PinnedRegion::new(self.next.fetch_add(1, Relaxed), memory, by_rail, moves))
    }

    /// How memory of this kind moves if no device takes it.
    fn moves_untaken(&self, kind: MemoryKind) -> Moves {
        if self.copier_of(kind).is_some() { Moves::Staged } else { Moves::Tcp }
    }

    /// Logs that a device refused memory. Such memory is slow, and nothing else shows why. It is a
    /// warning once for each device and kind of memory, and a debug message after that.
    fn say_refused(&self, at: usize, memory: PinRequest, why: &RailError) {
        let PinRequest { span: Span { len, .. }, kind, .. } = memory;
        let name = self.rails().get(at).map_or("?", |rail| &rail.info().name);
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
}
