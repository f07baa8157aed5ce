//! A rank's window: memory that its peers write to, and its mappings of theirs.
//!
//! A window begins with the words of streams (see [`crate::protocol`]), a cache line of each kind, and their headers of the
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
    protocol::{Mark, Stream, Words},
};

const LINE: usize = 64;
/// Lines of a stream: `arrived`, `taken`, the fault of the rank with its number and the window's nonce, and its headers.
const LINES: usize = 3 + SLOTS;
const _: () = assert!(header::WORDS * 8 == LINE && SLOTS * 8 <= LINE);
const PAGE: usize = 4096;

/// Bytes before the pool, for as many ranks.
#[must_use]
pub fn control_len(ranks: usize) -> usize {
    // No spreading over nodes has more words: see `protocol::words_of`.
    (3 * ranks * LINES * LINE).next_multiple_of(PAGE)
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

    fn word(&self, word: usize, line: usize, index: usize) -> &AtomicU64 {
        &self.words.as_slice()[(word * LINES + line) * (LINE / 8) + index]
    }

    fn arrived(&self, word: usize, slot: usize) -> &AtomicU64 {
        self.word(word, 0, slot)
    }

    fn taken(&self, word: usize, slot: usize) -> &AtomicU64 {
        self.word(word, 1, slot)
    }

    fn fault(&self, of: usize) -> &AtomicU64 {
        self.word(of, 2, 0)
    }

    fn header(&self, word: usize, call: u64, index: usize) -> &AtomicU64 {
        self.word(word, 3 + call as usize % SLOTS, index)
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
    node: u64,
    segment: Segment,
    own: View,
    /// By rank; its own too.
    views: Vec<Option<View>>,
    nonce: u64,
}

impl Window {
    pub(crate) fn new(me: usize, ranks: usize, pool: usize, node: Option<u64>) -> Result<Self> {
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
        let (host, node) = (host()?, node.unwrap_or_default());
        Ok(Self { me, host, node, segment, own, views, nonce })
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
            node: self.node,
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

    /// Begins to write to the window of a stream's peer; `None` if it is not there any more.
    pub(crate) fn letter(&self, stream: &Stream) -> Option<Letter<'_>> {
        Some(Letter { view: self.of(stream.peer)?, word: stream.there })
    }

    /// What a stream's peer told of a call, once its mark has been seen.
    pub(crate) fn header(&self, stream: &Stream, call: u64) -> header::Words {
        let word = |index| self.own.header(stream.here, call, index).load(Ordering::Relaxed);
        std::array::from_fn(word)
    }

    /// Tells a stream's peer that data is in its place. All that was written there before is visible to whoever sees the mark.
    pub(crate) fn set_arrived(&self, stream: &Stream, mark: Mark) {
        if let Some(view) = self.of(stream.peer) {
            view.arrived(stream.there, mark.call as usize % SLOTS)
                .store(mark.to_word(), Ordering::Release);
        }
    }

    /// Tells a rank, by one of its words, how far data was taken out.
    pub(crate) fn set_taken(&self, at: usize, word: usize, mark: Mark) {
        if let Some(view) = self.of(at) {
            view.taken(word, mark.call as usize % SLOTS).store(mark.to_word(), Ordering::Release);
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
    fn arrived(&self, word: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.arrived(word, slot).load(Ordering::Acquire))
    }

    fn taken(&self, word: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.taken(word, slot).load(Ordering::Acquire))
    }
}

/// What is being written to a rank's window.
pub(crate) struct Letter<'a> {
    view: &'a View,
    word: usize,
}

impl Letter<'_> {
    /// Tells the rank of a call.
    pub(crate) fn tell(&mut self, call: u64, words: header::Words) {
        for (index, word) in words.into_iter().enumerate() {
            self.view.header(self.word, call, index).store(word, Ordering::Relaxed);
        }
    }

    /// Memory for `len` bytes at `at` of the rank's pool: to be filled before the next is asked for.
    pub(crate) fn at(&mut self, at: usize, len: usize) -> *mut u8 {
        self.view.pool(at, len)
    }
}

/// The kernel that this process runs on.
fn host() -> Result<[u8; HOST_LEN]> {
    let boot_id = HostIdentity::of_this_process().boot_id;
    let bytes = boot_id.as_ref().and_then(|id| id.as_bytes().first_chunk().copied());
    bytes.ok_or_else(|| {
        let source = io::ErrorKind::InvalidData.into();
        Error::Os { what: "reading the kernel's boot id".into(), source }
    })
}
