//! A rank's window: memory that its peers write to, and its mappings of theirs.
//!
//! A window begins with words for each rank (see [`crate::protocol`]), a cache line of each kind, and its headers of the
//! calls that may be under way; then comes the pool in which calls are placed.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::fs::{Mode, OFlags};
use uccl_device::HostIdentity;
use uccl_fabric::shm::{MapMode, Mapping, Segment, segment};
use uccl_wire::ep_card::{EpCard, HOST_LEN};

use crate::{
    error::{Error, Result},
    header,
    placing::SLOTS,
    protocol::{Mark, Words},
};

pub(crate) const LINE: usize = 64;
/// Lines of each rank: `arrived`, `taken`, its fault with the window's nonce, and its headers.
pub(crate) const LINES: usize = 3 + SLOTS;
const _: () = assert!(header::WORDS * 8 == LINE && SLOTS * 8 <= LINE);
const PAGE: usize = 4096;

/// Bytes before the pool, for as many ranks.
#[must_use]
pub fn control_len(ranks: usize) -> usize {
    (ranks * LINES * LINE).next_multiple_of(PAGE)
}

/// One rank's mapping of a window: its own, or a peer's.
#[derive(Clone, Debug)]
pub(crate) struct View {
    mapping: Arc<Mapping>,
    words: segment::Words,
    control_len: usize,
}

impl View {
    /// # Errors
    /// It is too short for the words of so many ranks.
    fn new(mapping: Arc<Mapping>, ranks: usize) -> io::Result<Self> {
        let control_len = control_len(ranks);
        let words = segment::Words::new(&mapping, 0, control_len / 8)?;
        Ok(Self { mapping, words, control_len })
    }

    fn word(&self, rank: usize, line: usize, index: usize) -> &AtomicU64 {
        &self.words.as_slice()[(rank * LINES + line) * (LINE / 8) + index]
    }

    fn arrived(&self, from: usize, slot: usize) -> &AtomicU64 {
        self.word(from, 0, slot)
    }

    fn taken(&self, by: usize, slot: usize) -> &AtomicU64 {
        self.word(by, 1, slot)
    }

    fn fault(&self, of: usize) -> &AtomicU64 {
        self.word(of, 2, 0)
    }

    fn header(&self, of: usize, call: u64, index: usize) -> &AtomicU64 {
        self.word(of, 3 + call as usize % SLOTS, index)
    }

    fn nonce(&self) -> &AtomicU64 {
        self.word(0, 2, 1)
    }

    /// Bytes of the pool.
    pub(crate) fn pool_len(&self) -> usize {
        self.mapping.len() - self.control_len
    }

    /// `len` bytes of the pool. Peers may write to them at any time: whoever reads has seen a mark.
    pub(crate) fn pool(&self, at: usize, len: usize) -> *mut u8 {
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.pool_len());
        assert!(is_inside, "{len} bytes at {at} of a pool of {}", self.pool_len());
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.mapping.as_ptr().add(self.control_len + at) }
    }
}

/// A rank's own window and those of its peers.
pub(crate) struct Window {
    me: usize,
    host: [u8; HOST_LEN],
    segment: Segment,
    own: View,
    /// By rank; its own too.
    views: Vec<Option<View>>,
    nonce: u64,
}

impl Window {
    pub(crate) fn new(me: usize, ranks: usize, pool: usize) -> Result<Self> {
        let len = pool.checked_next_multiple_of(PAGE);
        let len = len.and_then(|pool| pool.checked_add(control_len(ranks)));
        let len = len.ok_or_else(|| Error::invalid(format!("a pool of {pool} bytes")))?;
        let what = || format!("making a window of {len} bytes");
        let os = |source| Error::Os { what: what(), source };
        let segment = Segment::create("uccl-ep", len).map_err(os)?;
        let own = View::new(Arc::clone(&segment), ranks).map_err(os)?;
        let nonce = getrandom::u64().map_err(|e| os(io::Error::other(e)))?;
        own.nonce().store(nonce, Ordering::Release);
        let views = (0..ranks).map(|rank| (rank == me).then(|| own.clone())).collect();
        Ok(Self { me, host: host()?, segment, own, views, nonce })
    }

    /// What peers need to map it.
    pub(crate) fn card(&self, next_call: u64) -> EpCard {
        EpCard {
            rank: self.me as u32,
            ranks: self.views.len() as u32,
            pool: self.own.pool_len() as u64,
            pid: std::process::id(),
            descriptor: self.segment.fd().as_raw_fd() as u32,
            nonce: self.nonce,
            next_call,
            host: self.host,
        }
    }

    /// Maps a peer's window.
    ///
    /// # Errors
    /// It is on another host, or not reachable by this process.
    pub(crate) fn open(&mut self, card: &EpCard) -> Result<()> {
        let rank = card.rank as usize;
        let view = if rank == self.me { self.own.clone() } else { self.of_peer(card)? };
        self.views[rank] = Some(view);
        Ok(())
    }

    fn of_peer(&self, card: &EpCard) -> Result<View> {
        let path = format!("/proc/{}/fd/{}", card.pid, card.descriptor);
        let what = || format!("opening the window of rank {} at {path}", card.rank);
        let os = |source| Error::Os { what: what(), source };
        if card.host != self.host {
            let why = "it is on another host, and ranks of several hosts are not supported yet";
            return Err(os(io::Error::new(io::ErrorKind::Unsupported, why)));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd: OwnedFd =
            rustix::fs::open(&*path, flags, Mode::empty()).map_err(|e| os(e.into()))?;
        let mapping = Mapping::of(fd, MapMode::ReadWrite, usize::MAX).map_err(os)?;
        let view = View::new(Arc::new(mapping), self.views.len()).map_err(os)?;
        let is_it = view.pool_len() as u64 == card.pool
            && view.nonce().load(Ordering::Acquire) == card.nonce;
        is_it.then_some(view).ok_or_else(|| os(io::Error::other("it is another process's memory")))
    }

    pub(crate) fn own(&self) -> &View {
        &self.own
    }

    /// The window of a rank that is there.
    pub(crate) fn of(&self, rank: usize) -> Option<&View> {
        self.views[rank].as_ref()
    }

    /// Tells a rank of a call, before its data.
    pub(crate) fn set_header(&self, at: usize, call: u64, words: header::Words) {
        if let Some(view) = self.of(at) {
            for (index, word) in words.into_iter().enumerate() {
                view.header(self.me, call, index).store(word, Ordering::Relaxed);
            }
        }
    }

    /// What a rank told of a call, once its mark has been seen.
    pub(crate) fn header(&self, from: usize, call: u64) -> header::Words {
        std::array::from_fn(|index| self.own.header(from, call, index).load(Ordering::Relaxed))
    }

    /// Tells a rank that data is in its place. All that was written there before is visible to whoever sees the mark.
    pub(crate) fn set_arrived(&self, at: usize, mark: Mark) {
        if let Some(view) = self.of(at) {
            view.arrived(self.me, mark.call as usize % SLOTS)
                .store(mark.to_word(), Ordering::Release);
        }
    }

    /// Tells a rank how far its data was taken out.
    pub(crate) fn set_taken(&self, at: usize, mark: Mark) {
        if let Some(view) = self.of(at) {
            view.taken(self.me, mark.call as usize % SLOTS)
                .store(mark.to_word(), Ordering::Release);
        }
    }

    /// Tells all peers that this rank gave up on a call.
    pub(crate) fn set_fault(&self, call: u64) {
        for view in self.views.iter().flatten() {
            view.fault(self.me).store(call, Ordering::Release);
        }
    }

    /// The call that a rank gave up on.
    pub(crate) fn fault(&self, of: usize) -> Option<u64> {
        Some(self.own.fault(of).load(Ordering::Acquire)).filter(|call| *call != 0)
    }
}

impl Words for Window {
    fn arrived(&self, from: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.arrived(from, slot).load(Ordering::Acquire))
    }

    fn taken(&self, by: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.taken(by, slot).load(Ordering::Acquire))
    }
}

/// The kernel that this process runs on.
pub(crate) fn host() -> Result<[u8; HOST_LEN]> {
    let boot_id = HostIdentity::of_this_process().boot_id;
    let bytes = boot_id.as_ref().and_then(|id| id.as_bytes().first_chunk().copied());
    bytes.ok_or_else(|| {
        let source = io::ErrorKind::InvalidData.into();
        Error::Os { what: "reading the kernel's boot id".into(), source }
    })
}
