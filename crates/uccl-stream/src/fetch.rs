//! Frames whose data is GPU memory. The data is copied into locked host memory some frames ahead of the one being
//! sent, so that copies and the pipe work at the same time.

use std::collections::VecDeque;

use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    gpu::{Chunk, Copier, CopyBy, Copying},
    mem::Located,
};

use super::queue::Frame;

/// The most frames whose data is copied ahead.
const AHEAD: usize = 4;

/// A frame whose data is being copied into a chunk.
struct Fetched {
    head: Vec<u8>,
    frame: Frame,
    copy: Result<Copying, GpuError>,
}

/// A frame whose copy has ended.
pub(super) struct Ready {
    pub(super) head: Vec<u8>,
    pub(super) frame: Frame,
    /// Its payload, or why there is none.
    pub(super) chunk: Result<Chunk, GpuError>,
}

/// The frames ahead, in the order in which they will be sent.
pub(super) struct Fetcher {
    copier: Copier,
    frames: VecDeque<Fetched>,
    /// Buffers of frames that were sent.
    heads: Vec<Vec<u8>>,
}

impl Fetcher {
    pub(super) fn new(by: &CopyBy) -> Self {
        Self { copier: Copier::new(by), frames: VecDeque::new(), heads: Vec::new() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.frames.len() < AHEAD
    }

    /// Whether a frame of our own operations (`own`), or else of the peer's reads, is ahead.
    pub(super) fn holds(&self, own: bool) -> bool {
        self.frames.iter().any(|fetched| fetched.frame.turn.is_own() == own)
    }

    /// Whether a copy may be reading our region in this slot.
    pub(super) fn touches(&mut self, slot: u32) -> bool {
        let Self { copier, frames, .. } = self;
        let copies = frames.iter().filter_map(|fetched| fetched.copy.as_ref().ok());
        copies.into_iter().any(|copy| copier.may_touch(copy, slot))
    }

    /// Starts to copy the data of the frame whose start is in `head`. Leaves an empty buffer there.
    ///
    /// # Safety
    /// The memory must be at most a chunk. It must stay valid until the frame is [ready](Self::ready); memory in the
    /// regions of `slots`, while it is [touched](Self::touches).
    pub(super) unsafe fn start(
        &mut self,
        head: &mut Vec<u8>,
        frame: Frame,
        memory: &[Located],
        slots: impl IntoIterator<Item = u32>,
    ) {
        let head = std::mem::replace(head, self.heads.pop().unwrap_or_default());
        let device = memory.iter().find_map(|at| at.device).unwrap_or(0);
        let copy = self.copier.chunk(device).and_then(|chunk| {
            // SAFETY: the caller's promise.
            unsafe { self.copier.start(chunk, memory, slots, Direction::DeviceToHost) }
        });
        self.frames.push_back(Fetched { head, frame, copy });
    }

    /// The next frame, if the copy of its data has ended or failed.
    pub(super) fn ready(&mut self) -> Option<Ready> {
        let first = self.frames.front()?;
        let ended = match &first.copy {
            Ok(copy) => self.copier.ended(copy)?,
            Err(e) => Err(e.clone()),
        };
        let Fetched { head, frame, copy } = self.frames.pop_front()?;
        let chunk = copy.map(|copy| self.copier.release(copy));
        let chunk = ended.and(chunk);
        Some(Ready { head, frame, chunk })
    }

    /// Takes back the buffer of a frame that was sent.
    pub(super) fn recycle(&mut self, mut head: Vec<u8>) {
        head.clear();
        self.heads.push(head);
    }

    /// Waits for the copies and forgets all frames, for a lane that dies.
    pub(super) fn clear(&mut self) {
        self.copier.settle();
        self.frames.clear();
    }
}
