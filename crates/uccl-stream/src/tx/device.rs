//! Sends data from GPU memory, in frames of at most a chunk each; the data is copied ahead.

use std::{mem, sync::atomic::Ordering::SeqCst};

use parking_lot::Mutex;
use uccl_fabric::{
    gpu::{CHUNK, Chunk, StepEnd},
    lane::OpError,
    mem::{Access, LocatedSpan, Span},
    pipe::PipeTx,
};
use uccl_wire::frame::Status;

use super::{Tx, TxContext};
use crate::{
    ops::Ops,
    queue::{Frame, Turn},
    remote_of,
};

/// A frame with data that is being copied.
pub(super) struct FrameCopy {
    head: Vec<u8>,
    frame: Frame,
}

impl<P: PipeTx> Tx<P> {
    /// Whether copies by GPUs are under way. Only a look shows their end.
    pub(crate) fn is_copying(&self) -> bool {
        !self.fetching.is_idle()
    }

    /// Whether a copy may be reading our region in this slot.
    pub(crate) fn touches(&mut self, slot: u32) -> bool {
        self.fetching.touches(slot)
    }

    /// Whether data of our own operations (`own`), or else of the peer's reads, is being copied.
    pub(super) fn is_fetching(&self, own: bool) -> bool {
        self.fetching.waiting().any(|fetched| fetched.frame.turn.is_own() == own)
    }

    /// Starts to copy the data of the next frames to chunks, as far as there is room. Our
    /// operations and the peer's take turns.
    pub(super) fn fetch(&mut self, around: &TxContext<'_>) {
        while !self.fetching.is_full() {
            self.fetch_replies = !self.fetch_replies;
            let fetched = match self.fetch_replies {
                true => self.fetch_reply(around) || self.fetch_own(around.ops),
                false => self.fetch_own(around.ops) || self.fetch_reply(around),
            };
            if !fetched {
                return;
            }
        }
    }

    fn fetch_own(&mut self, ops: &Mutex<Ops>) -> bool {
        let Some(own) = self.own.front().filter(|own| own.is_fetched()) else { return false };
        let device = own.device;
        self.blocked = !ops.lock().begin(own.name);
        if self.blocked {
            return false;
        }
        let Some(frame) = self.cut_write(CHUNK as u64) else { return false };
        self.located.clear();
        self.located.extend(self.payload.iter().map(|span| LocatedSpan { span: *span, device }));
        // SAFETY: the memory of our own operations stays valid until these have ended, and they
        // cannot end before this frame has been sent.
        unsafe { self.start_fetch(frame) };
        true
    }

    fn fetch_reply(&mut self, around: &TxContext<'_>) -> bool {
        let Some(reply) = self.replies.front_mut().filter(|reply| reply.is_fetched) else {
            return false;
        };
        let regions = around.regions.lock();
        let refused = |piece| regions.locate(&remote_of(&piece), Access::Read).is_err();
        if reply.rest.parts(&reply.pieces[..]).any(refused) {
            // Treated as host memory from here on: the check before the send refuses it.
            reply.is_fetched = false;
            return false;
        }
        let Some(frame) = self.cut_reply(CHUNK as u64) else { return false };
        self.located.clear();
        self.located.extend(
            self.pieces.iter().filter_map(|piece| regions.locate(piece, Access::Read).ok()),
        );
        around.copying.store(true, SeqCst);
        // SAFETY: the memory is in regions checked under the lock that is held, and counts as
        // touched until the copy has ended.
        unsafe { self.start_fetch(frame) };
        true
    }

    /// Starts to copy the located memory, the data of the frame that was cut last.
    ///
    /// # Safety
    /// The memory must be at most a chunk, and stay valid until the frame begins; memory in the
    /// peer's pieces, while it is [touched](Self::touches).
    unsafe fn start_fetch(&mut self, frame: Frame) {
        let head = mem::replace(&mut self.head, self.heads.pop().unwrap_or_default());
        let device = self.located.iter().find_map(|at| at.device).unwrap_or(0);
        // The pieces of our own operations are the peer's regions, not ours.
        let is_own = frame.turn.is_own();
        let slots = self.pieces.iter().filter(|_| !is_own).map(|piece| piece.slot);
        let fetched = FrameCopy { head, frame };
        match self.fetching.chunk(device) {
            // SAFETY: the caller's promise.
            Ok(chunk) => unsafe { self.fetching.start(fetched, chunk, &self.located, slots) },
            Err(e) => self.fetching.follow(fetched, Err(e)),
        }
    }

    /// Begins the first frame that was fetched, if its copy has ended.
    pub(super) fn begin_fetched(&mut self, ops: &Mutex<Ops>) -> bool {
        let Some(StepEnd { what, result }) = self.fetching.ended() else { return false };
        let FrameCopy { head, frame } = what;
        let mut sent = mem::replace(&mut self.head, head);
        sent.clear();
        self.heads.push(sent);
        self.payload.clear();
        match result {
            Ok(chunk) => {
                let filled = |chunk: &Chunk| Span { addr: chunk.addr(), len: frame.len };
                self.payload.extend(chunk.as_ref().map(filled));
                self.start(frame, chunk);
            }
            Err(e) => {
                if let Turn::Own { name, .. } = frame.turn {
                    ops.lock().doom(name, OpError::from(e));
                }
                self.start(frame, None);
                self.poison(Status::Fault);
            }
        }
        true
    }
}
