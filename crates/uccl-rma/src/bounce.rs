//! Locked host memory, through which bytes pass where no rail takes the memory that they are in;
//! and the copies between the two.

use std::{
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Direction, GpuError},
};
use uccl_fabric::{
    gpu::{CHUNK, CopyBy, PATIENCE, Slab, Staging, StepEnd},
    mem::{LocatedSpan, Span},
};
use uccl_wire::rails::LANDING_CHUNK;

use super::{aside::ChannelTeardown, pinned::PinnedRegion, rails::Rails};

/// How many chunks an area has: enough for a link of 50 GB/s to stay busy while some chunks are
/// copied, some are carried, some are reported to the other end, and some are copied there.
pub(super) const CHUNKS: usize = 16;

const _: () = assert!(CHUNK == LANDING_CHUNK, "peers count in the same chunks");

/// Chunks in locked memory that the rails take.
pub(super) struct Area {
    slab: Arc<Slab>,
    rails: Arc<Rails>,
    pinned: Arc<PinnedRegion>,
}

impl Area {
    /// # Errors
    /// When no more memory can be locked.
    pub(super) fn new(rails: &Arc<Rails>, device: u32) -> Result<Self, GpuError> {
        let slab = Arc::new(rails.copy_by().slab(device, CHUNKS)?);
        let pinned = rails.hold(slab.span(), MemoryKind::Pinned);
        Ok(Self { slab, rails: Arc::clone(rails), pinned })
    }

    pub(super) fn span(&self) -> Span {
        self.slab.span()
    }

    pub(super) fn pinned(&self) -> &Arc<PinnedRegion> {
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

/// Where an area is, once there is one. A thread of its own makes it: to lock memory takes long,
/// and to show it to devices takes longer.
#[derive(Default)]
pub(super) enum Site {
    #[default]
    Empty,
    Making(JoinHandle<Result<Area, GpuError>>),
    Made(Area),
    /// It could not be made. The next caller that needs it gets this error; after that it may be
    /// tried again.
    Refused(GpuError),
}

impl Site {
    /// Starts to make the area, near this GPU.
    pub(super) fn make(&mut self, rails: &Arc<Rails>, device: u32) {
        let ours = Arc::clone(rails);
        let make = move || Area::new(&ours, device);
        *self = match Builder::new().name("uccl-lock".into()).spawn(make) {
            Ok(thread) => Self::Making(thread),
            Err(e) => {
                let reason = format!("no thread can be started to lock memory: {e}");
                Self::Refused(GpuError::Unavailable { reason })
            }
        };
    }

    fn of(made: Result<Area, GpuError>) -> Self {
        made.map_or_else(Self::Refused, Self::Made)
    }

    /// Whether it is being made.
    pub(super) fn is_making(&self) -> bool {
        matches!(self, Self::Making(_))
    }

    /// Whether the thread that makes it, if there is one, has ended.
    pub(super) fn is_still(&self) -> bool {
        if let Self::Making(thread) = self { thread.is_finished() } else { true }
    }

    /// Takes the area from the thread that has made it. True if there was one.
    pub(super) fn look(&mut self) -> bool {
        if !self.is_making() || !self.is_still() {
            return false;
        }
        if let Self::Making(thread) = std::mem::take(self) {
            *self = Self::of(thread.join().unwrap_or_else(|_| {
                let reason = "the thread that locks memory panicked".into();
                Err(GpuError::Unavailable { reason })
            }));
        }
        true
    }

    pub(super) fn area(&self) -> Option<&Area> {
        if let Self::Made(area) = self { Some(area) } else { None }
    }

    /// Why it could not be made. Said once.
    pub(super) fn refusal(&mut self) -> Option<GpuError> {
        match std::mem::take(self) {
            Self::Refused(why) => Some(why),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Ends it. Returns the area, or the wait for its thread if it is still being made.
    pub(super) fn end(&mut self) -> (Option<Area>, Option<ChannelTeardown>) {
        self.look();
        match std::mem::take(self) {
            Self::Made(area) => (Some(area), None),
            Self::Making(thread) => (None, Some(ChannelTeardown::of_made(thread))),
            Self::Empty | Self::Refused(_) => (None, None),
        }
    }
}

/// Which side a copy is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopySide {
    /// A batch of ours.
    Batch(usize),
    /// The peer, which named this chunk of its landing area.
    Peer(u16),
}

/// The copies under way: to chunks, and from chunks.
pub(super) struct Copies([Staging<CopySide>; 2]);

/// A request to copy between a chunk and memory of this process.
pub(super) struct Copy<'a> {
    pub(super) area: &'a Area,
    pub(super) chunk: u16,
    pub(super) memory: &'a [LocatedSpan],
    /// The slots of our regions that it touches for the peer.
    pub(super) slots: SmallVec<[u32; 4]>,
    pub(super) direction: Direction,
}

impl Copies {
    pub(super) fn new(by: &CopyBy) -> Self {
        let both = [Direction::DeviceToHost, Direction::HostToDevice];
        Self(both.map(|direction| Staging::new(by, direction)))
    }

    /// Starts a copy. [`Self::ended`] reports its end, and that it could not be started.
    ///
    /// # Safety
    /// The memory must fit the chunk, and nobody else may use the chunk until the copy has ended.
    /// The memory must stay valid until then; memory of the regions of `slots`, while they [may be
    /// touched](Self::may_touch).
    pub(super) unsafe fn start(&mut self, copy: Copy<'_>, whose: CopySide) {
        let Copy { area, chunk, memory, slots, direction } = copy;
        let Self([down, up]) = self;
        let staging = if direction == Direction::DeviceToHost { down } else { up };
        // SAFETY: the caller's promise.
        unsafe { staging.start(whose, area.slab.chunk(chunk.into()), memory, slots) };
    }

    /// The next copy that has ended, if there is one.
    pub(super) fn ended(&mut self) -> Option<StepEnd<CopySide>> {
        self.0.iter_mut().find_map(Staging::ended)
    }

    /// Whether some copies have not ended. No event tells when they do.
    pub(super) fn are_under_way(&self) -> bool {
        !self.0.iter().all(Staging::is_idle)
    }

    /// Whether a copy that the peer asked for through this chunk has not ended yet.
    pub(super) fn is_copying_for_peer(&self, chunk: u16) -> bool {
        let whose = CopySide::Peer(chunk);
        self.0.iter().flat_map(Staging::waiting).any(|other| *other == whose)
    }

    /// Whether a copy for the peer may be touching this region of ours.
    pub(super) fn may_touch(&mut self, slot: u32) -> bool {
        self.0.iter_mut().any(|staging| staging.touches(slot))
    }

    /// Waits for all copies, and forgets them.
    ///
    /// # Errors
    /// When some do not end. Then they are kept.
    pub(super) fn clear(&mut self) -> Result<(), GpuError> {
        let Self([down, up]) = self;
        down.clear(PATIENCE).and(up.clear(PATIENCE))
    }
}
