//! Registered memory: the ranges that peers may access, the keys for them, and their revocation.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use uccl_device::MemoryKind;
use uccl_wire::frame::Status;

use crate::mem::{Access, LocatedSpan, RemoteSpan, Span};
use crate::shm::published::{Listing, PublishedTable};
use crate::status_of;

pub use crate::rights::{AccessError, Rights, SharedBacking, offset_within};

/// A registered region. Its owner hands this description to peers so that they can reach the
/// memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its index in the region table.
    pub slot: u32,
    /// The random key that a peer must present to access it.
    pub key: u64,
    /// The address range, in the owner's process.
    pub span: Span,
    /// Which accesses peers may make.
    pub rights: Rights,
    /// Where it lies in shared memory, if it does.
    pub backing: Option<SharedBacking>,
}

impl Region {
    /// The span with which a peer addresses the whole region.
    #[must_use]
    pub fn remote(&self) -> RemoteSpan {
        let Span { addr, len } = self.span;
        RemoteSpan { addr: addr as u64, len: len as u64, key: self.key, slot: self.slot }
    }
}

/// Why a region cannot be registered or revoked.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The table is full.
    #[error("too many regions")]
    Full,
    /// The range wraps around the end of the address space, or does not fit its backing.
    #[error("the range wraps around")]
    BadRange,
    /// No random key could be drawn.
    #[error("no random key: {0}")]
    Random(getrandom::Error),
    /// There is no such region (any more).
    #[error("no such region")]
    Unknown,
}

/// The most regions in a table: a frame's descriptor cannot name a larger slot.
const MAX_REGIONS: u32 = uccl_wire::frame::MAX_SLOT + 1;

/// Random keys, drawn in batches: one system call per key would be most of the cost of a
/// registration.
#[derive(Debug)]
struct Keys {
    drawn: [u64; 64],
    left: usize,
}

impl Keys {
    fn next(&mut self) -> Result<u64, RegionError> {
        if self.left == 0 {
            let mut bytes = [0; 64 * 8];
            getrandom::fill(&mut bytes).map_err(RegionError::Random)?;
            for (key, bytes) in self.drawn.iter_mut().zip(bytes.as_chunks().0) {
                *key = u64::from_le_bytes(*bytes);
            }
            self.left = self.drawn.len();
        }
        self.left -= 1;
        Ok(std::mem::take(&mut self.drawn[self.left]))
    }
}

#[derive(Clone, Copy, Debug)]
struct Live {
    key: u64,
    listing: Listing,
    /// For a part: the slot of the region that contains it.
    part_of: Option<u32>,
}

/// Memory that passed the access check: the peer may make the access it asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmittedMemory {
    /// The memory.
    pub span: Span,
    /// Its kind.
    pub kind: MemoryKind,
    /// The slot of the region. For a [part](RegionTable::insert_part): the slot of the region that
    /// contains it.
    pub region: u32,
}

/// The description of a region for a peer that has its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionDescription {
    /// The memory.
    pub span: Span,
    /// The accesses that peers may make.
    pub rights: Rights,
    /// Its kind.
    pub kind: MemoryKind,
    /// The slot of the region. For a [part](RegionTable::insert_part): the slot of the region that
    /// contains it.
    pub region: u32,
}

#[derive(Debug)]
struct State {
    slots: Vec<Option<Live>>,
    /// Freed slots. The last freed is used first: its entry is the likeliest to be in cache.
    free: Vec<u32>,
    keys: Keys,
    /// Whether regions are also listed in the published table. That costs one hash per region, so
    /// it starts only when the table is first handed out.
    publishing: bool,
}

impl State {
    /// Puts a region into a free slot.
    fn place(&mut self, live: Live) -> Result<u32, RegionError> {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(live);
            return Ok(slot);
        }
        let slot = u32::try_from(self.slots.len()).map_err(|_| RegionError::Full)?;
        if slot >= MAX_REGIONS {
            return Err(RegionError::Full);
        }
        self.slots.push(Some(live));
        Ok(slot)
    }

    fn locate(
        &self,
        span: &RemoteSpan,
        needed: Rights,
    ) -> Result<(LocatedSpan, Live), AccessError> {
        let live = self.slots.get(span.slot as usize).copied().flatten();
        let live = live.filter(|live| live.key == span.key).ok_or(AccessError::UnknownKey)?;
        let Listing { span: region, rights, kind, .. } = live.listing;
        rights.admit(needed)?;
        offset_within(region.addr as u64, region.len as u64, span.addr, span.len)?;
        // Both conversions fit: the range lies within one of ours.
        let span = Span { addr: span.addr as usize, len: span.len as usize };
        Ok((LocatedSpan { span, device: kind.device_only() }, live))
    }
}

#[derive(Debug)]
struct Inner {
    state: RwLock<State>,
    published: PublishedTable,
    refused: AtomicU64,
    /// Slots of regions that are accessed without the lock, one entry for each access.
    in_use: Mutex<Vec<u32>>,
}

/// An endpoint's regions.
///
/// This process holds [`lock`](Self::lock) while it accesses memory for a peer. A peer on this host
/// that accesses memory by itself holds its hazard words (`uccl_local::shm::Hazards`) instead.
#[derive(Clone, Debug)]
pub struct RegionTable {
    inner: Arc<Inner>,
}

impl RegionTable {
    /// An empty table.
    ///
    /// # Errors
    /// When its shared segment cannot be made.
    pub fn new() -> io::Result<Self> {
        let keys = Keys { drawn: [0; 64], left: 0 };
        let state =
            RwLock::new(State { slots: Vec::new(), free: Vec::new(), keys, publishing: false });
        let published = PublishedTable::new()?;
        let (refused, in_use) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { inner: Arc::new(Inner { state, published, refused, in_use }) })
    }

    /// Counts an access that was refused to a peer.
    pub fn note_refusal(&self) {
        self.inner.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// How many accesses were refused to peers.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.inner.refused.load(Ordering::Relaxed)
    }

    /// Lets peers touch `span` until it is revoked. Cheap enough to be done for one transfer.
    /// `span` may be empty, and regions may overlap.
    ///
    /// # Errors
    /// When the range wraps around, the table is full, or there is no randomness.
    pub fn insert(
        &self,
        span: Span,
        rights: Rights,
        backing: Option<SharedBacking>,
    ) -> Result<Region, RegionError> {
        self.list(Listing { span, rights, backing, kind: MemoryKind::Host }, None)
    }

    /// As [`insert`](Self::insert), for memory of any kind.
    ///
    /// # Errors
    /// As there.
    pub fn insert_kind(
        &self,
        kind: MemoryKind,
        span: Span,
        rights: Rights,
        backing: Option<SharedBacking>,
    ) -> Result<Region, RegionError> {
        self.list(Listing { span, rights, backing, kind }, None)
    }

    /// As [`insert_kind`](Self::insert_kind), for a part of the region in slot `of`, under a key of
    /// its own.
    ///
    /// # Errors
    /// As there.
    pub fn insert_part(
        &self,
        of: u32,
        kind: MemoryKind,
        span: Span,
        rights: Rights,
        backing: Option<SharedBacking>,
    ) -> Result<Region, RegionError> {
        self.list(Listing { span, rights, backing, kind }, Some(of))
    }

    fn list(&self, listing: Listing, part_of: Option<u32>) -> Result<Region, RegionError> {
        let Listing { span, rights, backing, .. } = listing;
        span.addr.checked_add(span.len).ok_or(RegionError::BadRange)?;
        if backing.is_some_and(|b| b.offset.checked_add(span.len as u64).is_none()) {
            return Err(RegionError::BadRange);
        }
        let mut state = self.inner.state.write();
        let key = state.keys.next()?;
        let slot = state.place(Live { key, listing, part_of })?;
        let publishing = state.publishing;
        drop(state);
        if publishing {
            // Without the lock: no one else has the slot, nor the key yet.
            self.inner.published.publish(slot, key, &listing);
        }
        Ok(Region { slot, key, span, rights, backing })
    }

    /// Revokes a region. When this returns, no access under [`lock`](Self::lock) touches it. Peers
    /// on this host may still be accessing it by themselves: their accesses have ended once none of
    /// their hazard words holds the slot (`uccl_local::shm::Hazards::holds`). Keep the returned
    /// value until then.
    ///
    /// Must not be called by a thread that holds a [`TableGuard`].
    ///
    /// # Errors
    /// [`RegionError::Unknown`] when the slot holds no region, or a region with another key.
    pub fn revoke(&self, slot: u32, key: u64) -> Result<RevokedRegion, RegionError> {
        let mut state = self.inner.state.write();
        let entry = state.slots.get_mut(slot as usize).ok_or(RegionError::Unknown)?;
        let live = entry.take_if(|live| live.key == key).ok_or(RegionError::Unknown)?;
        self.inner.published.retire(slot);
        drop(state);
        Ok(RevokedRegion { inner: self.inner.clone(), slot, span: live.listing.span })
    }

    /// Locks the table against revocation: an access checked under the guard stays allowed while
    /// the guard lives. A thread must not take it twice, nor hold it for long: registration waits
    /// for it too.
    #[must_use]
    pub fn lock(&self) -> TableGuard<'_> {
        TableGuard(self.inner.state.read())
    }

    /// Checks a peer's access to `span` and returns the memory, which the CPU reaches. Counts a
    /// refusal.
    ///
    /// # Errors
    /// The reason for the refusal, as a wire status.
    pub fn admit(&self, span: &RemoteSpan, access: Access) -> Result<AdmittedMemory, Status> {
        self.admit_any(span, access).and_then(|admitted| {
            if admitted.kind.is_host_accessible() {
                return Ok(admitted);
            }
            self.note_refusal();
            Err(status_of(AccessError::Device))
        })
    }

    /// As [`admit`](Self::admit), but also admits memory that only a GPU reaches.
    ///
    /// # Errors
    /// As there.
    pub fn admit_any(&self, span: &RemoteSpan, access: Access) -> Result<AdmittedMemory, Status> {
        let located = self.inner.state.read().locate(span, access.into());
        let admitted = located.map(|(located, live)| {
            let region = live.part_of.unwrap_or(span.slot);
            AdmittedMemory { span: located.span, kind: live.listing.kind, region }
        });
        admitted.map_err(|e| {
            self.note_refusal();
            status_of(e)
        })
    }

    /// Checks a peer's access to `span` and returns the memory, which is [in use](Self::is_in_use)
    /// until the guard is dropped. For long accesses, such as those by GPUs, during which the table
    /// must not stay locked.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn locate_for_use(
        &self,
        span: &RemoteSpan,
        needed: impl Into<Rights>,
    ) -> Result<(LocatedSpan, RegionUse), AccessError> {
        let state = self.inner.state.read();
        let (located, live) = state.locate(span, needed.into())?;
        let slot = live.part_of.unwrap_or(span.slot);
        // Added before the lock is released, so that a thread that revokes the region then sees it.
        self.inner.in_use.lock().push(slot);
        Ok((located, RegionUse { inner: Arc::clone(&self.inner), slot }))
    }

    /// Whether the region in a slot, revoked or not, is being accessed without the table's lock.
    #[must_use]
    pub fn is_in_use(&self, slot: u32) -> bool {
        self.inner.in_use.lock().contains(&slot)
    }

    /// Describes a region to a peer that knows its key. Counts a refusal.
    ///
    /// # Errors
    /// The reason for the refusal, as a wire status.
    pub fn describe(&self, slot: u32, key: u64) -> Result<RegionDescription, Status> {
        let live = self.inner.state.read().slots.get(slot as usize).copied().flatten();
        let Some(Live { listing, part_of, .. }) = live.filter(|live| live.key == key) else {
            self.note_refusal();
            return Err(Status::UnknownKey);
        };
        let Listing { span, rights, kind, .. } = listing;
        Ok(RegionDescription { span, rights, kind, region: part_of.unwrap_or(slot) })
    }

    /// The memfd of the published table, to hand to peers on this host. The first call lists all
    /// live regions in the table; from then on the table is kept up to date.
    #[must_use]
    pub fn published_fd(&self) -> BorrowedFd<'_> {
        let mut state = self.inner.state.write();
        if !std::mem::replace(&mut state.publishing, true) {
            for (slot, live) in (0..).zip(&state.slots) {
                if let Some(Live { key, listing, .. }) = live {
                    self.inner.published.publish(slot, *key, listing);
                }
            }
        }
        self.inner.published.fd()
    }

    /// How many regions live.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.state.read().slots.iter().flatten().count()
    }

    /// Whether no region lives.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A region is in use while this exists.
#[derive(Debug)]
pub struct RegionUse {
    inner: Arc<Inner>,
    slot: u32,
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        let mut in_use = self.inner.in_use.lock();
        if let Some(at) = in_use.iter().position(|slot| *slot == self.slot) {
            in_use.swap_remove(at);
        }
    }
}

/// The region table, locked against changes.
#[derive(Debug)]
pub struct TableGuard<'a>(RwLockReadGuard<'a, State>);

impl TableGuard<'_> {
    /// Checks a peer's access to `span` and returns the memory, which the CPU reaches.
    ///
    /// # Errors
    /// The reason for the refusal.
    #[inline]
    pub fn check(&self, span: &RemoteSpan, needed: impl Into<Rights>) -> Result<Span, AccessError> {
        let LocatedSpan { span, device } = self.locate(span, needed)?;
        if device.is_some() { Err(AccessError::Device) } else { Ok(span) }
    }

    /// Checks a peer's access to `span` and returns the memory, with its GPU if the CPU does not
    /// reach it.
    ///
    /// # Errors
    /// The reason for the refusal.
    #[inline]
    pub fn locate(
        &self,
        span: &RemoteSpan,
        needed: impl Into<Rights>,
    ) -> Result<LocatedSpan, AccessError> {
        self.0.locate(span, needed.into()).map(|(located, _)| located)
    }
}

/// A revoked region. Its slot becomes free only when this is dropped: otherwise a peer's hazard on
/// this region could be mistaken for one on the next region in the slot.
#[derive(Debug)]
#[must_use = "dropping it frees the slot: wait for the peers' hazards first"]
pub struct RevokedRegion {
    inner: Arc<Inner>,
    slot: u32,
    span: Span,
}

impl RevokedRegion {
    /// The region's slot in the table, which hazard words name.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The memory range of the revoked region.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }
}

impl Drop for RevokedRegion {
    fn drop(&mut self) {
        self.inner.state.write().free.push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table() -> RegionTable {
        RegionTable::new().unwrap()
    }

    fn span(addr: usize, len: usize) -> Span {
        Span { addr, len }
    }

    #[test]
    fn a_region_is_reached_with_its_key_only() {
        let table = table();
        let region = table.insert(span(0x1000, 64), Rights::ALL, None).unwrap();
        let all = region.remote();
        let check = |remote: RemoteSpan| table.lock().check(&remote, Access::Write);
        assert_eq!(check(all), Ok(region.span));
        assert_eq!(check(RemoteSpan { key: all.key ^ 1, ..all }), Err(AccessError::UnknownKey));
        assert_eq!(check(RemoteSpan { slot: 1, ..all }), Err(AccessError::UnknownKey));
        assert_eq!(check(RemoteSpan { slot: u32::MAX, ..all }), Err(AccessError::UnknownKey));
        assert!(matches!(table.revoke(region.slot, all.key ^ 1), Err(RegionError::Unknown)));
        drop(table.revoke(region.slot, region.key).unwrap());
        assert_eq!(check(all), Err(AccessError::UnknownKey));
        assert!(matches!(table.revoke(region.slot, region.key), Err(RegionError::Unknown)));
    }

    #[test]
    fn a_region_is_reached_within_its_bounds_only() {
        let table = table();
        let region = table.insert(span(0x1000, 64), Rights::ALL, None).unwrap();
        let check = |addr, len| {
            let remote = RemoteSpan { addr, len, ..region.remote() };
            assert_eq!(table.admit(&remote, Access::Write).is_ok(), {
                table.lock().check(&remote, Access::Read).is_ok()
            });
            table.lock().check(&remote, Access::Write)
        };
        for (addr, len) in [(0x1000, 64), (0x1000, 0), (0x1040, 0), (0x103f, 1), (0x1010, 8)] {
            assert_eq!(check(addr, len), Ok(span(addr as usize, len as usize)));
        }
        for (addr, len) in [
            (0x1000, 65),
            (0x1001, 64),
            (0xfff, 64),
            (0xfff, 1),
            (0x1040, 1),
            (0x1041, 0),
            (0, u64::MAX),
            (u64::MAX, 2),
            (0x1008, u64::MAX - 4),
        ] {
            assert_eq!(check(addr, len), Err(AccessError::OutOfBounds), "{addr:#x} {len}");
        }
    }

    #[test]
    fn rights_are_kept() {
        let table = table();
        for (rights, read, write) in [
            (Rights::READ, Ok(()), Err(AccessError::Denied)),
            (Rights::WRITE, Err(AccessError::Denied), Ok(())),
            (Rights::NONE, Err(AccessError::Denied), Err(AccessError::Denied)),
        ] {
            let remote = table.insert(span(0x1000, 8), rights, None).unwrap().remote();
            assert_eq!(table.lock().check(&remote, Access::Read).map(drop), read);
            assert_eq!(table.lock().check(&remote, Access::Write).map(drop), write);
        }
    }

    #[test]
    fn a_slot_is_not_used_again_before_its_revocation_is_over() {
        let table = table();
        let first = table.insert(span(0x1000, 8), Rights::ALL, None).unwrap();
        let revoked = table.revoke(first.slot, first.key).unwrap();
        assert_eq!((revoked.slot(), revoked.span()), (first.slot, first.span));
        assert_ne!(table.insert(span(0x1000, 8), Rights::ALL, None).unwrap().slot, first.slot);
        drop(revoked);
        let again = table.insert(span(0x1000, 8), Rights::ALL, None).unwrap();
        assert_eq!(again.slot, first.slot);
        assert_ne!(again.key, first.key);
        assert_eq!(table.lock().check(&first.remote(), Access::Read), Err(AccessError::UnknownKey));
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn ranges_that_wrap_are_refused() {
        let table = table();
        let wraps = table.insert(span(usize::MAX, 2), Rights::ALL, None);
        assert!(matches!(wraps, Err(RegionError::BadRange)));
        let backing = Some(SharedBacking { id: 1, offset: u64::MAX });
        assert!(matches!(
            table.insert(span(8, 8), Rights::ALL, backing),
            Err(RegionError::BadRange)
        ));
        assert!(table.is_empty());
    }

    #[test]
    fn an_access_under_the_lock_holds_off_revocation() {
        let table = table();
        let region = table.insert(span(0x1000, 8), Rights::ALL, None).unwrap();
        let locked = table.lock();
        let (started, revoked) =
            (std::sync::Barrier::new(2), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                started.wait();
                let token = table.revoke(region.slot, region.key).unwrap();
                revoked.store(true, std::sync::atomic::Ordering::SeqCst);
                drop(token);
            });
            started.wait();
            for _ in 0..1000 {
                std::thread::yield_now();
                assert!(!revoked.load(std::sync::atomic::Ordering::SeqCst));
            }
            locked.check(&region.remote(), Access::Read).unwrap();
            drop(locked);
        });
        assert!(revoked.into_inner());
    }

    #[test]
    fn error_codes_go_there_and_back() {
        use AccessError::{Denied, Device, OutOfBounds, UnknownKey};
        for error in [UnknownKey, OutOfBounds, Denied, Device] {
            assert_eq!(AccessError::from_code(error.code()), Some(error));
        }
        assert_eq!((AccessError::from_code(0), AccessError::from_code(5)), (None, None));
    }

    proptest! {
        #[test]
        fn bounds_are_those_of_wide_arithmetic(
            base in prop_oneof![0..1000u64, any::<u64>(), u64::MAX - 100..=u64::MAX],
            size in prop_oneof![0..1000u64, any::<u64>()],
            addr in prop_oneof![0..1000u64, any::<u64>(), u64::MAX - 100..=u64::MAX],
            len in prop_oneof![0..1000u64, any::<u64>()],
        ) {
            let (b, s) = (u128::from(base), u128::from(size));
            let (a, l) = (u128::from(addr), u128::from(len));
            let inside = a >= b && a + l <= b + s;
            let expected = if inside { Ok(addr - base) } else { Err(AccessError::OutOfBounds) };
            prop_assert_eq!(offset_within(base, size, addr, len), expected);
        }
    }
}
