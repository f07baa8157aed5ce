//! Memory of a rank that its peers read in place. A peer maps it when a call first names it.

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use smallvec::SmallVec;
use uccl_fabric::shm::{MapMode, Mapping, Segment, segment};
use uccl_wire::ep_card::EpCard;

use crate::shared::{
    error::{Error, Result},
    places::SLOTS,
};

/// Bytes before a block's memory: its owner's nonce and its number.
const HEAD: usize = 4096;
/// Blocks of peers that stay mapped: far more than calls use in turn.
const MAX_MAPPED: usize = 64;

/// Memory that peers can read in place.
#[derive(Debug)]
pub struct Block {
    segment: Segment,
    id: u32,
    /// Calls that peers may still read from it.
    pub(crate) calls: Mutex<SmallVec<[u64; SLOTS]>>,
}

impl Block {
    /// The address of its first byte. The memory is zero at first.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: a segment is longer than its head.
        unsafe { self.segment.as_ptr().add(HEAD) }
    }

    fn range(&self) -> Range<usize> {
        let start = self.as_ptr().addr();
        start..start + self.segment.len() - HEAD
    }

    /// The word that peers get: the block's descriptor and its number, never 0.
    pub(crate) fn word(&self) -> u64 {
        u64::from(self.segment.fd().as_raw_fd().cast_unsigned()) << 32 | u64::from(self.id)
    }

    /// The offset of an address in the block's segment.
    pub(crate) fn offset_of(&self, address: *const u8) -> u64 {
        (address.addr() - self.segment.as_ptr().addr()) as u64
    }
}

/// A peer with blocks that can be mapped.
#[derive(Clone, Copy, Debug)]
struct BlockOwner {
    pid: u32,
    nonce: u64,
}

/// A peer's block.
#[derive(Debug)]
struct MappedBlock {
    rank: usize,
    word: u64,
    mapping: Arc<Mapping>,
}

/// A rank's blocks, and those of its peers that it has mapped.
#[derive(Debug)]
pub(crate) struct Blocks {
    nonce: u64,
    own: Mutex<Vec<Weak<Block>>>,
    next_id: AtomicU32,
    peers: Vec<Option<BlockOwner>>,
    mapped: Mutex<VecDeque<MappedBlock>>,
}

impl Blocks {
    /// `cards` are those of all ranks, and `me` is this one. Ranks of another node have no blocks
    /// here.
    pub(crate) fn new(cards: &[Option<EpCard>], me: usize) -> Self {
        let own = cards.get(me).copied().flatten();
        let is_near = |card: &EpCard| own.is_some_and(|own| own.is_near(card));
        let peer = |card: &Option<EpCard>| {
            card.filter(is_near).map(|card| BlockOwner { pid: card.pid, nonce: card.nonce })
        };
        Self {
            nonce: own.map_or(0, |own| own.nonce),
            own: Mutex::default(),
            next_id: AtomicU32::new(1),
            peers: cards.iter().map(peer).collect(),
            mapped: Mutex::default(),
        }
    }

    /// Makes a block of `len` bytes.
    pub(crate) fn make(&self, len: usize) -> Result<Arc<Block>> {
        let whole = len.checked_add(HEAD).ok_or_else(|| Error::invalid("a block is too long"))?;
        let os = |source| Error::Os { what: format!("making a block of {len} bytes"), source };
        let segment = Segment::create("uccl-ep-block", whole).map_err(os)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let head = segment::Words::new(&segment, 0, 2).map_err(os)?;
        head.as_slice()[0].store(self.nonce, Ordering::Relaxed);
        head.as_slice()[1].store(id.into(), Ordering::Release);
        let block = Arc::new(Block { segment, id, calls: Mutex::default() });
        let mut own = self.own.lock();
        own.retain(|block| block.strong_count() > 0);
        own.push(Arc::downgrade(&block));
        Ok(block)
    }

    /// Whether all ranks can map blocks of each other.
    pub(crate) fn are_near(&self) -> bool {
        self.peers.iter().all(Option::is_some)
    }

    /// The block that contains this memory.
    pub(crate) fn find(&self, memory: &Range<usize>) -> Option<Arc<Block>> {
        let has_it = |block: &Arc<Block>| {
            let range = block.range();
            range.start <= memory.start && memory.end <= range.end
        };
        self.own.lock().iter().filter_map(Weak::upgrade).find(has_it)
    }

    /// The block that a peer has named.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub(crate) fn of_peer(&self, rank: usize, word: u64) -> Result<Arc<Mapping>> {
        let mut mapped = self.mapped.lock();
        if let Some(known) = mapped.iter().find(|known| (known.rank, known.word) == (rank, word)) {
            return Ok(Arc::clone(&known.mapping));
        }
        let mapping = Arc::new(self.map(rank, word)?);
        if mapped.len() == MAX_MAPPED {
            mapped.pop_front();
        }
        mapped.push_back(MappedBlock { rank, word, mapping: Arc::clone(&mapping) });
        Ok(mapping)
    }

    fn map(&self, rank: usize, word: u64) -> Result<Mapping> {
        let (descriptor, id) = (word >> 32, u64::from(word as u32));
        let os = |source| Error::Os {
            what: format!("mapping block {id} of rank {rank}, its descriptor {descriptor}"),
            source,
        };
        let peer = self.peers[rank].ok_or_else(|| os(io::ErrorKind::NotFound.into()))?;
        let path = format!("/proc/{}/fd/{descriptor}", peer.pid);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd: OwnedFd =
            rustix::fs::open(&*path, flags, Mode::empty()).map_err(|e| os(e.into()))?;
        let mapping = Arc::new(Mapping::of(fd, MapMode::ReadOnly, usize::MAX).map_err(os)?);
        let is_it = {
            let head = segment::Words::new(&mapping, 0, 2).map_err(os)?;
            let [nonce, number] = [0, 1].map(|at| head.as_slice()[at].load(Ordering::Acquire));
            (nonce, number) == (peer.nonce, id)
        };
        let mapping = Arc::into_inner(mapping).filter(|_| is_it);
        mapping.ok_or_else(|| os(io::Error::other("it is other memory")))
    }
}
