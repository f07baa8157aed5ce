//! One process reading and writing another's registered memory, on its own thread, with one copy.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use uccl_device::Process;
use uccl_fabric::guarded::{self, UnmappedMemory};
use uccl_fabric::mem::{Access, RemoteSpan, Span};
use uccl_fabric::pieces::Stretch;
use uccl_fabric::region::{AccessError, Rights, offset_within};
use uccl_fabric::signal::change_word;
use uccl_wire::signal::Change;

use super::accesses::{Accesses, HazardGuard, patiently};
use super::hazard::Hazards;
use super::mappings::PeerMappings;
use super::memo::Memo;
use super::published::{PeerCheck, PeerTable, RegionSnapshot};
use crate::cma::{CmaError, PeerMemory};

/// How the peer's memory can be reached from here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// It is mapped here.
    Mapped,
    /// By a copy through the kernel.
    Cma,
    /// By a GPU.
    Gpu,
    /// Not at all: ask the peer.
    None,
}

/// Why a direct copy did not happen, or not wholly.
#[derive(Debug, thiserror::Error)]
pub enum DirectError {
    /// The peer's region does not allow it. With more than [`BATCH`] regions in one call, part of
    /// the bytes may have moved if a region was revoked during the call; otherwise none has.
    #[error(transparent)]
    Refused(#[from] AccessError),
    /// The peer's memory cannot be reached by this process's CPU.
    #[error("the memory can neither be mapped nor copied through the kernel")]
    Unreachable,
    /// The two sides differ in length.
    #[error("{local} bytes here, {remote} at the peer")]
    Length {
        /// Bytes on this side.
        local: u64,
        /// Bytes on the peer's.
        remote: u64,
    },
    /// This side has closed its access to the peer.
    #[error("the peer has been given up")]
    Closed,
    /// No hazard word became free for seconds: as many accesses are under way as there are words.
    #[error("copies to and from the peer's memory do not end")]
    Stuck,
    /// Our own memory is not mapped any more. Some of the bytes may have moved.
    #[error("local memory could not be touched")]
    Unmapped,
    /// The copy through the kernel failed.
    #[error(transparent)]
    Cma(#[from] CmaError),
}

impl From<UnmappedMemory> for DirectError {
    fn from(_: UnmappedMemory) -> Self {
        // The peer's is a mapping of this process's own, and can lose no page.
        Self::Unmapped
    }
}

impl From<PeerCheck> for DirectError {
    fn from(check: PeerCheck) -> Self {
        match check {
            PeerCheck::Unpublished => Self::Unreachable,
            PeerCheck::Refused(error) => Self::Refused(error),
        }
    }
}

/// How many distinct regions a call holds hazards on. It releases these before it claims the next
/// ones.
pub const BATCH: usize = 16;

/// A region of the peer's, and where it is mapped here.
#[derive(Clone, Copy, Debug)]
struct PeerRegion {
    addr: u64,
    len: u64,
    rights: Rights,
    /// Where it is mapped; null when it is not.
    base: *mut u8,
    /// Whether it is a GPU's memory, which is never mapped and which no CPU copies.
    device: bool,
}

/// The bit of a GPU's memory in the memo, beside those of the rights.
const DEVICE: u64 = 1 << 63;

impl PeerRegion {
    /// The address in our mapping at which an access starts: null when the region is not mapped.
    #[inline(always)]
    fn admit(&self, span: &RemoteSpan, needed: impl Into<Rights>) -> Result<*mut u8, AccessError> {
        self.rights.admit(needed)?;
        let offset = offset_within(self.addr, self.len, span.addr, span.len)?;
        if self.base.is_null() {
            return Ok(self.base);
        }
        // The region lies within a mapping, so the offset fits.
        Ok(self.base.wrapping_add(offset as usize))
    }
}

/// Access to the peer's memory, without the peer's help.
#[derive(Debug)]
pub struct Direct {
    pub(super) table: PeerTable,
    pub(super) accesses: Arc<Accesses>,
    /// The peer's memory through the kernel, if that can be reached.
    memory: Option<PeerMemory>,
    pub(super) mappings: PeerMappings,
    /// Key, slot + 1, version, epoch, address, length, rights, and where the region is mapped here,
    /// or 0.
    memo: Memo<8>,
    closed: AtomicBool,
}

impl Direct {
    /// `hazards` are the words that the peer reads. Without `process`, only mapped memory is
    /// reached.
    #[must_use]
    pub fn new(table: PeerTable, hazards: Hazards, process: Option<Process>) -> Self {
        Self {
            table,
            accesses: Arc::new(Accesses::new(hazards)),
            memory: process.map(PeerMemory::of),
            mappings: PeerMappings::new(),
            memo: Memo::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Maps the segment of at most `max_len` bytes that the peer calls `id`.
    ///
    /// # Errors
    /// As for [`PeerMappings::insert`].
    pub fn insert_mapping(&self, id: u32, fd: OwnedFd, max_len: usize) -> io::Result<()> {
        self.mappings.insert(id, fd, max_len, &self.accesses)
    }

    /// Forgets the peer's segment `id`. True if it was there.
    pub fn remove_mapping(&self, id: u32) -> bool {
        self.mappings.remove(id, &self.accesses)
    }

    /// Ends every access, for good: refuses new ones, and waits until `until` for those under way,
    /// which are this process's own. Between its checks it calls `meanwhile`, which should do the
    /// work that the accesses wait for. Returns whether all have ended. An access does not end
    /// while the kernel waits in it for a page of the peer's that never comes;
    /// [`is_idle`](Self::is_idle) shows when it has ended.
    ///
    /// The peer stops reading our hazards when our socket closes, so the socket must stay open
    /// until this has returned.
    pub fn close(&self, until: Instant, mut meanwhile: impl FnMut()) -> bool {
        self.closed.store(true, Ordering::SeqCst);
        let mut uses = self.accesses.in_use();
        while !self.accesses.ended(&mut uses) {
            if Instant::now() > until {
                return false;
            }
            meanwhile();
            std::thread::yield_now();
        }
        self.mappings.close();
        true
    }

    /// Whether no access is under way at this moment. Once closed, it stays so.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.accesses.ended(&mut self.accesses.in_use())
    }

    /// Claims a hazard word for an access, unless this is closed. Either [`close`](Self::close)
    /// sees the access, or the access sees that this is closed.
    #[inline(always)]
    fn access(&self, slot: u32) -> Result<HazardGuard<'_>, DirectError> {
        let guard = self.accesses.claim(slot).ok_or(DirectError::Stuck)?;
        self.admits()?;
        Ok(guard)
    }

    /// Refuses an access after [`close`](Self::close) has begun. The caller must have claimed its
    /// hazard word before.
    #[inline(always)]
    pub(super) fn admits(&self) -> Result<(), DirectError> {
        if self.closed.load(Ordering::SeqCst) { Err(DirectError::Closed) } else { Ok(()) }
    }

    /// How many of the peer's segments are mapped here (those about to be unmapped included).
    #[must_use]
    pub fn mapped(&self) -> usize {
        self.mappings.mapped()
    }

    /// How [`copy`](Self::copy) would reach a range now. [`Reach::None`] also when it would be
    /// refused.
    #[must_use]
    pub fn reach(&self, remote: &RemoteSpan) -> Reach {
        match self.access(remote.slot).and_then(|_access| self.find(remote)) {
            Ok(found) if found.device => Reach::Gpu,
            Ok(found) if offset_within(found.addr, found.len, remote.addr, remote.len).is_err() => {
                Reach::None
            }
            Ok(found) if !found.base.is_null() => Reach::Mapped,
            Ok(_) if self.memory.is_some() => Reach::Cma,
            _ => Reach::None,
        }
    }

    /// The process that the kernel copies to or from, for a region that is not mapped here.
    #[inline(always)]
    fn process_of(&self, found: &PeerRegion) -> Result<&PeerMemory, DirectError> {
        self.memory.as_ref().filter(|_| !found.device).ok_or(DirectError::Unreachable)
    }

    /// Finds the region of a range, in the memo if nothing has changed. The caller must have
    /// claimed a hazard before.
    #[inline(always)]
    fn find(&self, remote: &RemoteSpan) -> Result<PeerRegion, DirectError> {
        let version = self.table.version(remote.slot).ok_or(DirectError::Unreachable)?;
        let epoch = self.mappings.epoch();
        if let Some([key, slot, seen, mapped, addr, len, rights, base]) = self.memo.get(remote.slot)
        {
            let same = key == remote.key && slot == u64::from(remote.slot) + 1;
            if same && seen == version && mapped == epoch && version & 1 == 1 {
                let (device, rights) = (rights & DEVICE != 0, Rights::from_bits(rights));
                return Ok(PeerRegion { addr, len, rights, base: base as *mut u8, device });
            }
        }
        self.find_anew(remote, epoch)
    }

    #[cold]
    fn find_anew(&self, remote: &RemoteSpan, epoch: u64) -> Result<PeerRegion, DirectError> {
        let checked = self.table.find(remote)?;
        let RegionSnapshot { version, addr, len, rights, backing, device, .. } = checked;
        // Copies by GPUs look a GPU's memory up elsewhere.
        let base = backing
            .filter(|_| !device)
            .and_then(|b| self.mappings.locate(b.id, b.offset, len))
            .unwrap_or(ptr::null_mut());
        let bits = rights.to_bits() | if device { DEVICE } else { 0 };
        let slot = u64::from(remote.slot) + 1;
        self.memo
            .put(remote.slot, &[remote.key, slot, version, epoch, addr, len, bits, base as u64]);
        Ok(PeerRegion { addr, len, rights, base, device })
    }

    /// Copies the bytes of `local`, in order, to those of `remote` ([`Access::Write`]) or the other
    /// way round ([`Access::Read`]), and returns how many. Checks everything before the first byte
    /// moves.
    ///
    /// # Errors
    /// When the lengths differ, the peer's regions do not allow it, or the memory cannot be reached
    /// or is not there.
    ///
    /// # Safety
    /// `local` must be memory that may be read, or for [`Access::Read`] written, during the call.
    #[inline]
    pub unsafe fn copy(
        &self,
        access: Access,
        local: &[Span],
        remote: &[RemoteSpan],
    ) -> Result<u64, DirectError> {
        if let ([here], [there]) = (local, remote)
            && here.len as u64 == there.len
        {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_one(access, here, there) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_many(access, local, remote) }
    }

    #[inline]
    unsafe fn copy_one(
        &self,
        access: Access,
        local: &Span,
        remote: &RemoteSpan,
    ) -> Result<u64, DirectError> {
        let _access = self.access(remote.slot)?;
        let found = self.find(remote)?;
        let there = found.admit(remote, access)?;
        if there.is_null() {
            let process = self.process_of(&found)?;
            // SAFETY: the caller's promise.
            return Ok(unsafe { process.copy(access, &[*local], &[(remote.addr, remote.len)])? });
        }
        // SAFETY: the caller's promise for here; `there` is within a mapping, which stays while the
        // access is counted.
        unsafe { move_bytes(access, local.addr as *mut u8, there, local.len)? };
        Ok(remote.len)
    }

    /// Writes a piece and then changes a word, with one lookup, if both are in one region that is
    /// mapped here. Otherwise returns `None`, and nothing has happened.
    ///
    /// # Errors
    /// When the peer's region does not allow it, or this is closed; then nothing has happened
    /// either. When our own memory is not mapped: then the word has not changed.
    ///
    /// # Safety
    /// `local` must be memory that may be read during the call.
    pub unsafe fn write_and_signal(
        &self,
        local: &Span,
        remote: &RemoteSpan,
        word: &RemoteSpan,
        change: Change,
    ) -> Result<Option<()>, DirectError> {
        if (word.slot, word.key, local.len as u64) != (remote.slot, remote.key, remote.len) {
            return Ok(None);
        }
        let _access = self.access(remote.slot)?;
        let found = self.find(remote)?;
        let there = found.admit(remote, Rights::WRITE)?;
        let word = found.admit(word, Rights::SIGNAL)?;
        if there.is_null() || !word.cast::<u64>().is_aligned() {
            return Ok(None);
        }
        // SAFETY: the caller's promise for here; `there` and the word are within a mapping, which
        // stays while the access is counted.
        unsafe {
            move_bytes(Access::Write, local.addr as *mut u8, there, local.len)?;
            change_word(word, change).map_err(|_| AccessError::OutOfBounds)?;
        }
        Ok(Some(()))
    }

    /// Changes a word of the peer's, if it is mapped here: `None` if it is not.
    ///
    /// # Errors
    /// When the peer's region does not allow it, or this is closed.
    pub fn signal(&self, word: &RemoteSpan, change: Change) -> Result<Option<()>, DirectError> {
        let _access = self.access(word.slot)?;
        let there = self.find(word)?.admit(word, Rights::SIGNAL)?;
        if there.is_null() {
            return Ok(None);
        }
        // SAFETY: mapped for the length of the word while the access is counted.
        unsafe { change_word(there, change) }.map_err(|_| AccessError::OutOfBounds)?;
        Ok(Some(()))
    }

    unsafe fn copy_many(
        &self,
        access: Access,
        local: &[Span],
        remote: &[RemoteSpan],
    ) -> Result<u64, DirectError> {
        let here = local.iter().fold(0u64, |sum, span| sum.saturating_add(span.len as u64));
        let there = remote.iter().fold(0u64, |sum, span| sum.saturating_add(span.len));
        if here != there {
            return Err(DirectError::Length { local: here, remote: there });
        }
        let mut held = BatchHazards::new(&self.accesses);
        let mut first = held.claim(remote)?;
        if first < remote.len() {
            // Regions beyond the first batch of hazards are checked in advance too.
            self.check_all(access, &remote[first..])?;
        }
        let mut rest = remote;
        let process = self.memory.as_ref();
        let mut walk =
            Walk { local, rest: Stretch::all(local), access, process, queue: Vec::new() };
        loop {
            let (batch, after) = rest.split_at(first);
            self.admits()?;
            self.check_all(access, batch)?;
            for span in batch {
                let there = self.check(access, span)?;
                // SAFETY: the caller's promise for here; the accesses held keep `there` mapped.
                unsafe { walk.piece(there, span)? };
            }
            // SAFETY: the caller's promise.
            unsafe { walk.flush()? };
            if after.is_empty() {
                return Ok(here);
            }
            rest = after;
            first = held.claim(rest)?;
        }
    }

    fn check_all(&self, access: Access, remote: &[RemoteSpan]) -> Result<(), DirectError> {
        for span in remote {
            self.check(access, span)?;
        }
        Ok(())
    }

    /// The address in our mapping at which an access starts: null when the kernel has to copy.
    fn check(&self, access: Access, span: &RemoteSpan) -> Result<*mut u8, DirectError> {
        let found = self.find(span)?;
        let there = found.admit(span, access)?;
        if there.is_null() {
            self.process_of(&found)?;
        }
        Ok(there)
    }
}

/// The hazards of one batch.
struct BatchHazards<'a> {
    accesses: &'a Accesses,
    slots: [u32; BATCH],
    guards: [Option<HazardGuard<'a>>; BATCH],
    count: usize,
}

impl<'a> BatchHazards<'a> {
    fn new(accesses: &'a Accesses) -> Self {
        Self { accesses, slots: [0; BATCH], guards: [const { None }; BATCH], count: 0 }
    }

    /// Releases the hazards that it held and claims the slots of as many `spans` as it can; returns
    /// how many. It never holds some words while it waits for others, so two callers cannot wait
    /// for each other's words.
    fn claim(&mut self, spans: &[RemoteSpan]) -> Result<usize, DirectError> {
        self.release();
        if let Some(covered) = self.try_claim(spans) {
            return Ok(covered);
        }
        let claimed = patiently(|| {
            self.release();
            self.try_claim(spans)
        });
        claimed.ok_or(DirectError::Stuck)
    }

    fn release(&mut self) {
        self.guards[..self.count].fill_with(|| None);
        self.count = 0;
    }

    fn try_claim(&mut self, spans: &[RemoteSpan]) -> Option<usize> {
        for (covered, span) in spans.iter().enumerate() {
            if self.slots[..self.count].contains(&span.slot) {
                continue;
            }
            if self.count == BATCH {
                return Some(covered);
            }
            self.guards[self.count] = Some(self.accesses.try_claim(span.slot)?);
            self.slots[self.count] = span.slot;
            self.count += 1;
        }
        Some(spans.len())
    }
}

/// The local side of a copy, paired piece by piece with the remote one.
struct Walk<'a> {
    local: &'a [Span],
    /// The part of it that is not done.
    rest: Stretch,
    access: Access,
    process: Option<&'a PeerMemory>,
    /// Pieces that will go through the kernel in one call.
    queue: Vec<(Span, (u64, u64))>,
}

/// How many pieces the kernel takes at once.
const QUEUE: usize = 1024;

impl Walk<'_> {
    /// Copies one remote span, mapped at `there` or, if that is null, through the kernel.
    ///
    /// # Safety
    /// The local spans must be memory that the access may touch; `there` must be null or mapped for
    /// the length of `remote`.
    unsafe fn piece(&mut self, there: *mut u8, remote: &RemoteSpan) -> Result<(), DirectError> {
        let (mut at, len) = (0, remote.len as usize);
        while at < len {
            let Some(here) = self.rest.take_first(self.local, len - at) else { return Ok(()) };
            if there.is_null() {
                self.queue.push((here, (remote.addr + at as u64, here.len as u64)));
                if self.queue.len() == QUEUE {
                    // SAFETY: the caller's promise.
                    unsafe { self.flush()? };
                }
            } else {
                let there = there.wrapping_add(at);
                // SAFETY: the caller's promise; `at + here.len` is within the span.
                unsafe { move_bytes(self.access, here.addr as *mut u8, there, here.len)? };
            }
            at += here.len;
        }
        Ok(())
    }

    /// # Safety
    /// The local spans must be memory that the access may touch.
    unsafe fn flush(&mut self) -> Result<(), DirectError> {
        if self.queue.is_empty() {
            return Ok(());
        }
        let process = self.process.ok_or(DirectError::Unreachable)?;
        let (local, remote): (Vec<_>, Vec<_>) = self.queue.drain(..).unzip();
        // SAFETY: the caller's promise.
        unsafe { process.copy(self.access, &local, &remote)? };
        Ok(())
    }
}

/// # Safety
/// `len` bytes must be accessible at both pointers, for writing where the access writes, as far as
/// they are mapped.
#[inline(always)]
unsafe fn move_bytes(
    access: Access,
    here: *mut u8,
    there: *mut u8,
    len: usize,
) -> Result<(), UnmappedMemory> {
    let (from, to) = match access {
        Access::Read => (there, here),
        Access::Write => (here, there),
    };
    // SAFETY: the caller's promise. Two mappings of the same memory do not overlap as addresses.
    unsafe { guarded::copy(from, to, len) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::shm::hazard::{SLOT_MASK, mark};
    use uccl_device::MemoryKind;
    use uccl_fabric::alloc::{SharedBuf, lookup};
    use uccl_fabric::region::{Region, RegionTable};
    use uccl_fabric::shm::Segment;

    /// An owner and an initiator, both in this process.
    struct BothSides {
        table: RegionTable,
        owner: Hazards,
        direct: Direct,
    }

    fn both(process: bool) -> BothSides {
        let table = RegionTable::new().unwrap();
        let connection = Segment::create("test", 4096).unwrap();
        let owner = Hazards::new(&connection, 0).unwrap();
        let peer = PeerTable::map(table.published_fd().try_clone_to_owned().unwrap()).unwrap();
        let process = process.then(|| Process::open(std::process::id() as i32).unwrap());
        let direct = Direct::new(peer, owner.clone(), process);
        BothSides { table, owner, direct }
    }

    impl BothSides {
        fn share(&self, buf: &SharedBuf) {
            let fd = buf.fd().try_clone_to_owned().unwrap();
            self.direct.insert_mapping(buf.id(), fd, buf.span().len).unwrap();
        }

        fn register(&self, span: Span) -> Region {
            self.table.insert(span, Rights::ALL, lookup(span).map(|(backing, _)| backing)).unwrap()
        }

        fn write(&self, data: &[u8], remote: &[RemoteSpan]) -> Result<u64, DirectError> {
            let local = Span { addr: data.as_ptr() as usize, len: data.len() };
            // SAFETY: the slice is readable.
            unsafe { self.direct.copy(Access::Write, &[local], remote) }
        }
    }

    fn part(span: Span, at: usize, len: usize) -> Span {
        Span { addr: span.addr + at, len }
    }

    fn bytes(buf: &SharedBuf) -> &[u8] {
        // SAFETY: the buffer lives, and nobody writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(buf.as_ptr(), buf.span().len) }
    }

    #[test]
    fn memory_of_a_gpu_is_known_from_the_lookup_and_no_cpu_copies_it() {
        let both = both(true);
        // Host memory in the place of a GPU's, which a copy would change.
        let place = [0_u64; 4];
        let span = Span { addr: place.as_ptr() as usize, len: 32 };
        let kind = MemoryKind::Cuda { device: 0 };
        let region = both.table.insert_kind(kind, span, Rights::ALL, None).unwrap();
        let whole = region.remote();
        // The second time from the memo.
        for _ in 0..2 {
            assert_eq!(both.direct.reach(&whole), Reach::Gpu);
            let one = both.write(&[1; 32], &[whole]);
            assert!(matches!(one, Err(DirectError::Unreachable)), "{one:?}");
            let halves = [0, 16].map(|at| RemoteSpan { addr: whole.addr + at, len: 16, ..whole });
            let two = both.write(&[1; 32], &halves);
            assert!(matches!(two, Err(DirectError::Unreachable)), "{two:?}");
            let word = RemoteSpan { len: 8, ..whole };
            assert!(matches!(both.direct.signal(&word, Change::Set(1)), Ok(None)));
        }
        assert_eq!(std::hint::black_box(&place), &[0; 4]);
    }

    #[test]
    fn more_regions_than_hazards_at_once() {
        let both = both(false);
        let buf = SharedBuf::new(4096).unwrap();
        both.share(&buf);
        let regions: Vec<_> = (0..3 * BATCH + 1)
            .map(|i| both.register(part(buf.span(), i * 64, 3 + i % 3)))
            .collect();
        let remote: Vec<_> = regions.iter().map(Region::remote).collect();
        let total: usize = regions.iter().map(|region| region.span.len).sum();
        let data: Vec<u8> = (0..total).map(|i| i as u8 | 1).collect();
        assert_eq!(both.write(&data, &remote).unwrap(), total as u64);
        let mut rest = data.as_slice();
        for (i, region) in regions.iter().enumerate() {
            let (this, after) = rest.split_at(region.span.len);
            assert_eq!(&bytes(&buf)[i * 64..][..this.len()], this);
            rest = after;
        }
        // The last one is in another batch than the first, which must not move without it.
        let last = regions.last().unwrap();
        drop(both.table.revoke(last.slot, last.key).unwrap());
        let before = bytes(&buf).to_vec();
        let refused = both.write(&vec![0; total], &remote);
        assert!(matches!(refused, Err(DirectError::Refused(AccessError::UnknownKey))));
        assert_eq!(bytes(&buf), before);
        assert!(regions.iter().all(|region| !both.owner.holds(region.slot)));
    }

    #[test]
    fn one_call_goes_both_ways_to_the_memory() {
        let both = both(true);
        let (buf, private) = (SharedBuf::new(100).unwrap(), vec![0u8; 100]);
        both.share(&buf);
        let mapped = both.register(buf.span());
        let other = both.register(Span { addr: private.as_ptr() as usize, len: 100 });
        let reach = [mapped, other].map(|region| both.direct.reach(&region.remote()));
        assert_eq!(reach, [Reach::Mapped, Reach::Cma]);
        let piece = |region: Region, at: u64| RemoteSpan {
            addr: region.remote().addr + at,
            len: 2,
            ..region.remote()
        };
        let remote = [piece(mapped, 0), piece(other, 5), piece(other, 1), piece(mapped, 50)];
        both.write(b"abcdefgh", &remote).unwrap();
        assert_eq!((&bytes(&buf)[..2], &bytes(&buf)[50..52]), (&b"ab"[..], &b"gh"[..]));
        assert_eq!(std::hint::black_box(&private)[..8], *b"\0ef\0\0cd\0");
    }

    #[test]
    fn a_write_with_its_signal_happens_wholly_or_not_at_all() {
        let both = both(false);
        let buf = SharedBuf::new(4096).unwrap();
        both.share(&buf);
        let with = |rights| {
            let backing = lookup(buf.span()).map(|(backing, _)| backing);
            both.table.insert(buf.span(), rights, backing).unwrap().remote()
        };
        let [all, other] = [Rights::ALL; 2].map(with);
        let (no_signals, no_writes) =
            (with(Rights { signal: false, ..Rights::ALL }), with(Rights::SIGNAL));
        let at = |region: RemoteSpan, at: u64, len: u64| RemoteSpan {
            addr: region.addr + at,
            len,
            ..region
        };
        let data = [7_u8; 16];
        let local = Span { addr: data.as_ptr() as usize, len: data.len() };
        let begin = |remote: RemoteSpan, word: RemoteSpan| {
            // SAFETY: the data is readable.
            unsafe { both.direct.write_and_signal(&local, &remote, &word, Change::Add(1)) }
        };
        for word in [
            at(all, 1028, 8),
            at(other, 1024, 8),
            RemoteSpan { key: all.key ^ 1, ..at(all, 1024, 8) },
        ] {
            assert!(matches!(begin(at(all, 0, 16), word), Ok(None)), "{word:?}");
        }
        for (region, remote, word, why) in [
            (no_signals, (0, 16), 1024, AccessError::Denied),
            (no_writes, (0, 16), 1024, AccessError::Denied),
            (all, (4081, 16), 1024, AccessError::OutOfBounds),
            (all, (0, 16), 4089, AccessError::OutOfBounds),
        ] {
            let refused = begin(at(region, remote.0, remote.1), at(region, word, 8));
            assert!(matches!(refused, Err(DirectError::Refused(e)) if e == why), "{refused:?}");
        }
        for region in [no_signals, RemoteSpan { key: all.key ^ 1, ..all }] {
            let refused = both.direct.signal(&at(region, 1024, 8), Change::Add(1));
            assert!(matches!(refused, Err(DirectError::Refused(_))), "{refused:?}");
        }
        assert!(bytes(&buf).iter().all(|byte| *byte == 0), "something of it has happened");
        assert!(matches!(begin(at(all, 0, 16), at(all, 1024, 8)), Ok(Some(()))));
        assert_eq!((&bytes(&buf)[..16], bytes(&buf)[1024]), (&data[..], 1));
    }

    #[test]
    fn memory_that_is_not_mapped_is_reached_once_it_is() {
        let both = both(false);
        let buf = SharedBuf::new(100).unwrap();
        let region = both.register(buf.span());
        let write = || both.write(&[1; 100], &[region.remote()]);
        assert!(matches!(write(), Err(DirectError::Unreachable)));
        assert_eq!(both.direct.reach(&region.remote()), Reach::None);
        both.share(&buf);
        assert_eq!(write().unwrap(), 100);
        assert!(both.direct.remove_mapping(buf.id()));
        assert!(!both.direct.remove_mapping(buf.id()));
        assert_eq!(both.direct.mapped(), 0);
        assert!(matches!(write(), Err(DirectError::Unreachable)));
    }

    #[test]
    fn both_sides_of_a_copy_are_as_long() {
        let both = both(false);
        let buf = SharedBuf::new(200).unwrap();
        both.share(&buf);
        let all = both.register(buf.span()).remote();
        for len in [99, 101] {
            let (whole, first) = (RemoteSpan { len, ..all }, RemoteSpan { len: 1, ..all });
            let rest = RemoteSpan { addr: all.addr + 1, len: len - 1, ..all };
            for remote in [&[whole][..], &[first, rest]] {
                let refused = both.write(&[1; 100], remote);
                let told = matches!(refused, Err(DirectError::Length { local: 100, remote })
                    if remote == len);
                assert!(told, "{refused:?}");
            }
        }
        assert_eq!(bytes(&buf), [0; 200]);
    }

    /// The memo keeps the place of a region under its slot, which another region may have taken
    /// since.
    #[test]
    fn the_memo_of_a_region_ends_with_it() {
        let both = both(false);
        let bufs = [0; 2].map(|_| SharedBuf::new(100).unwrap());
        bufs.iter().for_each(|buf| both.share(buf));
        let first = both.register(bufs[0].span());
        assert_eq!(both.write(&[1; 100], &[first.remote()]).unwrap(), 100);
        let unknown = || {
            let refused = both.write(&[2; 100], &[first.remote()]);
            matches!(refused, Err(DirectError::Refused(AccessError::UnknownKey)))
        };
        drop(both.table.revoke(first.slot, first.key).unwrap());
        assert!(unknown(), "it has ended");
        let second = both.register(bufs[1].span());
        assert_eq!(second.slot, first.slot);
        assert!(unknown(), "another is in its slot");
        assert_eq!(both.write(&[3; 100], &[second.remote()]).unwrap(), 100);
        assert!(unknown(), "and has been written to");
        assert_eq!((bytes(&bufs[0]), bytes(&bufs[1])), (&[1; 100][..], &[3; 100][..]));
    }

    /// The copy's source is the hazard words themselves, so the copied bytes show their values
    /// during the copy.
    #[test]
    fn a_hazard_word_holds_the_slot_while_a_copy_is_made() {
        let both = both(true);
        let words = both.owner.words();
        let local = [Span { addr: words.as_ptr() as usize, len: size_of_val(words) }];
        let (buf, mut private) = (SharedBuf::new(local[0].len).unwrap(), vec![0u8; local[0].len]);
        both.share(&buf);
        // Takes the first slot, which has the least mark, so that no region of the test has it.
        let _other = both.register(buf.span());
        let private = Span { addr: private.as_mut_ptr() as usize, len: private.len() };
        for (to, reach) in [(buf.span(), Reach::Mapped), (private, Reach::Cma)] {
            let region = both.register(to);
            let all = region.remote();
            assert_eq!(both.direct.reach(&all), reach);
            let half = RemoteSpan { len: all.len / 2, ..all };
            let rest = RemoteSpan { addr: all.addr + half.len, ..half };
            for remote in [&[all][..], &[half, rest]] {
                // SAFETY: the memory is the test's, and only the copy uses the destination.
                let moved = unsafe { both.direct.copy(Access::Write, &local, remote) };
                assert_eq!(moved.unwrap(), all.len);
                // SAFETY: the copy is over.
                let seen = unsafe { std::slice::from_raw_parts(to.addr as *const u8, to.len) };
                let held = |word: &[u8; 8]| u64::from_ne_bytes(*word) & SLOT_MASK == mark(all.slot);
                assert!(seen.as_chunks().0.iter().any(held), "{reach:?} {} pieces", remote.len());
                assert!(!both.owner.holds(all.slot), "it is over");
            }
        }
    }

    /// An owner may publish a backing that its segment does not hold. That must not make us touch
    /// other memory.
    #[test]
    fn a_backing_outside_of_its_segment_is_not_believed() {
        let both = both(false);
        let buf = SharedBuf::new(4096).unwrap();
        both.share(&buf);
        for offset in [1, 4096, 1 << 40, u64::MAX - 4096] {
            let backing = Some(uccl_fabric::region::SharedBacking { id: buf.id(), offset });
            let region = both.table.insert(buf.span(), Rights::ALL, backing).unwrap();
            assert!(matches!(
                both.write(&[1; 4096], &[region.remote()]),
                Err(DirectError::Unreachable)
            ));
        }
    }

    /// If a mapping went during a copy, this would be a segmentation fault.
    #[test]
    fn a_mapping_goes_only_when_nobody_is_in_it() {
        let both = both(false);
        let buf = SharedBuf::new(200_000).unwrap();
        let region = both.register(buf.span());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let data = vec![1; 200_000];
                    while !stop.load(Ordering::Relaxed) {
                        match both.write(&data, &[region.remote()]) {
                            Ok(_) | Err(DirectError::Unreachable) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            for _ in 0..500 {
                both.share(&buf);
                std::thread::yield_now();
                both.direct.remove_mapping(buf.id());
            }
            stop.store(true, Ordering::Relaxed);
        });
        both.direct.remove_mapping(buf.id());
        assert_eq!(both.direct.mapped(), 0);
    }

    /// Callers that want more hazards than there are wait for each other, and never for ever.
    #[test]
    fn many_callers_share_the_hazards() {
        let both = both(false);
        let buf = SharedBuf::new(4096).unwrap();
        both.share(&buf);
        let remote: Vec<_> =
            (0..BATCH).map(|i| both.register(part(buf.span(), i * 8, 8)).remote()).collect();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        assert_eq!(both.write(&[7; 8 * BATCH], &remote).unwrap(), 8 * BATCH as u64);
                    }
                });
            }
        });
        assert!(remote.iter().all(|remote| !both.owner.holds(remote.slot)));
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Calls `close` in a thread of its own, and `check`s whether it waits.
    fn closing(direct: &Direct, check: impl FnOnce(&dyn Fn() -> bool)) {
        std::thread::scope(|scope| {
            let closed = scope.spawn(|| direct.close(Instant::now() + PATIENCE, || ()));
            while !direct.closed.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            check(&|| {
                std::thread::sleep(Duration::from_millis(100));
                !closed.is_finished()
            });
        });
    }

    #[test]
    fn closing_waits_for_the_access_under_way_and_admits_no_other() {
        let both = both(false);
        let buf = SharedBuf::new(100).unwrap();
        both.share(&buf);
        let region = both.register(buf.span());
        assert_eq!(both.write(&[1; 100], &[region.remote()]).unwrap(), 100);
        let access = both.direct.accesses.try_claim(region.slot).unwrap();
        let outlives = both.direct.claim_owned(region.slot).unwrap();
        closing(&both.direct, |waits| {
            assert!(waits(), "a copy is under way");
            assert!(both.owner.holds(region.slot));
            drop(access);
            assert!(waits(), "a copy by a GPU is under way");
            assert!(both.direct.mapped() == 1, "what it copies to is still there");
            drop(outlives);
        });
        // Checked first: a copy that is wrongly admitted would write to where nothing is mapped any
        // more.
        assert!(matches!(both.direct.admits(), Err(DirectError::Closed)));
        assert_eq!(both.direct.reach(&region.remote()), Reach::None);
        assert_eq!(both.direct.mapped(), 0);
        for remote in [&[region.remote()][..], &[region.remote(), region.remote()]] {
            let data = vec![2; 100 * remote.len()];
            assert!(matches!(both.write(&data, remote), Err(DirectError::Closed)));
        }
        assert_eq!(bytes(&buf), [1; 100]);
        let fd = buf.fd().try_clone_to_owned().unwrap();
        assert!(both.direct.insert_mapping(buf.id(), fd, 100).is_err());
    }

    /// The accesses may wait for something that only the closing thread can do.
    #[test]
    fn the_closing_thread_does_the_work_that_accesses_wait_for() {
        let both = both(false);
        let mut flights =
            vec![both.direct.claim_owned(1).unwrap(), both.direct.claim_owned(2).unwrap()];
        assert!(both.direct.close(Instant::now() + PATIENCE, || drop(flights.pop())));
        assert!(flights.is_empty());
    }

    /// A copy through the kernel can wait for the peer's pages without a limit.
    #[test]
    fn closing_does_not_wait_for_ever_and_tells() {
        let both = both(false);
        let buf = SharedBuf::new(100).unwrap();
        both.share(&buf);
        let stuck = both.direct.accesses.try_claim(1).unwrap();
        assert!(!both.direct.close(Instant::now() + Duration::from_millis(20), || ()));
        assert!(!both.direct.is_idle());
        assert_eq!(both.direct.mapped(), 1, "unmapped under a copy");
        drop(stuck);
        assert!(both.direct.is_idle());
    }

    /// The peer can write every hazard word, at any time.
    #[test]
    fn words_that_the_peer_writes_unmap_nothing_and_block_nobody() {
        let both = both(false);
        let buf = SharedBuf::new(100).unwrap();
        both.share(&buf);
        let region = both.register(buf.span());
        let scribble = |value| {
            let words: &[AtomicU64] = both.owner.words();
            words.iter().for_each(|word| word.store(value, Ordering::SeqCst));
        };
        let access = both.direct.accesses.try_claim(region.slot).unwrap();
        scribble(0);
        assert!(both.direct.remove_mapping(buf.id()));
        assert_eq!(both.direct.mapped(), 1, "unmapped under a copy");
        drop(access);
        both.share(&buf);
        assert_eq!(both.direct.mapped(), 1);
        for value in [u64::MAX, u64::from(region.slot) + 1] {
            scribble(value);
            assert_eq!(both.write(&[3; 100], &[region.remote()]).unwrap(), 100);
            let halves = [0, 50].map(|at| RemoteSpan {
                addr: region.remote().addr + at,
                len: 50,
                ..region.remote()
            });
            assert_eq!(both.write(&[4; 100], &halves).unwrap(), 100);
        }
        scribble(u64::MAX);
        assert!(both.direct.close(Instant::now() + PATIENCE, || ()));
    }
}
