//! Locked host memory, through which bytes pass where no rail takes the memory that they are in; and the copies between
//! the two.

use std::{collections::VecDeque, sync::Arc};

use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Direction, GpuError},
};
use uccl_fabric::{
    gpu::{CHUNK, Copier, CopyBy, Copying, Slab},
    mem::{Located, Span},
};
use uccl_wire::rails::LANDING_CHUNK;

use super::{pinned::Pinned, rails::Rails};

/// How many chunks an area has: enough for a link of 50 GB/s to stay busy while some chunks are copied, some are
/// carried, some are reported to the other end, and some are copied there.
pub(super) const CHUNKS: usize = 16;

const _: () = assert!(CHUNK == LANDING_CHUNK, "peers count in the same chunks");

/// Chunks in locked memory that the rails take.
pub(super) struct Area {
    slab: Arc<Slab>,
    rails: Arc<Rails>,
    pinned: Arc<Pinned>,
}

impl Area {
    /// # Errors
    /// When no more memory can be locked.
    pub(super) fn new(rails: &Arc<Rails>, device: u32) -> Result<Self, GpuError> {
        let slab = Arc::new(match rails.copy_by() {
            CopyBy::Gpus => Slab::near(device, CHUNKS)?,
            CopyBy::StandIn(_) => Slab::plain(CHUNKS),
        });
        let pinned = rails.hold(slab.span(), MemoryKind::Pinned);
        Ok(Self { slab, rails: Arc::clone(rails), pinned })
    }

    pub(super) fn span(&self) -> Span {
        self.slab.span()
    }

    pub(super) fn pinned(&self) -> &Arc<Pinned> {
        &self.pinned
    }

    /// The first bytes of a chunk.
    pub(super) fn chunk(&self, at: u16, len: usize) -> Span {
        Span { addr: self.slab.chunk(at.into()).addr(), len }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if let Err(e) = self.rails.let_go(&self.pinned) {
            tracing::error!(
                "locked memory is kept until the process ends, as a device may reach it: {e}"
            );
            std::mem::forget(Arc::clone(&self.slab));
        }
    }
}

/// Which side a copy is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// A batch of ours.
    Batch(usize),
    /// The peer, which named this chunk of its landing area.
    Peer(u16),
}

/// The copies under way, in both directions. Copies of the same direction end in the order in which they began.
pub(super) struct Copies {
    down: Line,
    up: Line,
}

struct Line {
    copier: Copier,
    under_way: VecDeque<(Copying, Whose)>,
}

impl Line {
    fn new(by: &CopyBy) -> Self {
        Self { copier: Copier::new(by), under_way: VecDeque::new() }
    }

    fn ended(&mut self) -> Option<(Whose, Result<(), GpuError>)> {
        let result = self.copier.ended(&self.under_way.front()?.0)?;
        let (copying, whose) = self.under_way.pop_front()?;
        drop(self.copier.release(copying));
        Some((whose, result))
    }

    fn holds(&self, whose: Whose) -> bool {
        self.under_way.iter().any(|(_, other)| *other == whose)
    }

    fn may_touch(&mut self, slot: u32) -> bool {
        let Self { copier, under_way } = self;
        under_way.iter().any(|(copying, _)| copier.may_touch(copying, slot))
    }

    fn clear(&mut self) {
        while !self.under_way.is_empty() {
            drop(self.ended());
        }
    }
}

/// A request to copy between a chunk and memory of this process.
pub(super) struct Copy<'a> {
    pub(super) area: &'a Area,
    pub(super) chunk: u16,
    pub(super) memory: &'a [Located],
    /// The slots of our regions that it touches for the peer.
    pub(super) slots: SmallVec<[u32; 4]>,
    pub(super) direction: Direction,
}

impl Copies {
    pub(super) fn new(by: &CopyBy) -> Self {
        Self { down: Line::new(by), up: Line::new(by) }
    }

    /// Starts a copy. [`Self::ended`] reports its end.
    ///
    /// # Errors
    /// When the copy could not be started. Then none of it moves.
    ///
    /// # Safety
    /// The memory must fit the chunk, and nobody else may use the chunk until the copy has ended. The memory must stay
    /// valid until then; memory of the regions of `slots`, while they [may be touched](Self::may_touch).
    pub(super) unsafe fn start(&mut self, copy: Copy<'_>, whose: Whose) -> Result<(), GpuError> {
        let Copy { area, chunk, memory, slots, direction } = copy;
        let line = match direction {
            Direction::DeviceToHost => &mut self.down,
            _ => &mut self.up,
        };
        let chunk = area.slab.chunk(chunk.into());
        // SAFETY: the caller's promise.
        let copying = unsafe { line.copier.start(chunk, memory, slots, direction) };
        line.under_way.push_back((copying, whose));
        Ok(())
    }

    /// The next copy that has ended, if there is one.
    pub(super) fn ended(&mut self) -> Option<(Whose, Result<(), GpuError>)> {
        self.down.ended().or_else(|| self.up.ended())
    }

    /// Whether some copies have not ended. No event tells when they do.
    pub(super) fn are_under_way(&self) -> bool {
        !self.down.under_way.is_empty() || !self.up.under_way.is_empty()
    }

    /// Whether a copy that the peer asked for through this chunk has not ended yet.
    pub(super) fn is_copying_for_peer(&self, chunk: u16) -> bool {
        let whose = Whose::Peer(chunk);
        self.down.holds(whose) || self.up.holds(whose)
    }

    /// Whether a copy for the peer may be touching this region of ours.
    pub(super) fn may_touch(&mut self, slot: u32) -> bool {
        self.down.may_touch(slot) || self.up.may_touch(slot)
    }

    /// Waits for all copies, and forgets them.
    pub(super) fn clear(&mut self) {
        self.down.clear();
        self.up.clear();
    }
}
