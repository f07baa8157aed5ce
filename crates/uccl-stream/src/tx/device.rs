//! Sends data from GPU memory, in frames of at most a chunk each, whose data is copied ahead.

use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use uccl_fabric::{
    gpu::CHUNK,
    lane::OpError,
    mem::{Access, Located, Span},
    pipe::PipeTx,
};
use uccl_wire::frame::Status;

use super::{Tx, TxSurroundings};
use crate::{fetch::Ready, ops::Ops, queue::Turn, remote_of};

impl<P: PipeTx> Tx<P> {
    /// Whether copies by GPUs are under way. Only a look shows their end.
    pub(crate) fn is_copying(&self) -> bool {
        !self.fetcher.is_idle()
    }

    /// Whether a copy may be reading our region in this slot.
    pub(crate) fn touches(&mut self, slot: u32) -> bool {
        self.fetcher.touches(slot)
    }

    /// Starts to copy the data of the next frames to chunks, as far as there is room. Our operations and the peer's
    /// take turns.
    pub(super) fn fetch(&mut self, around: &TxSurroundings<'_>) {
        while self.fetcher.has_room() {
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
        self.located.extend(self.payload.iter().map(|span| Located { span: *span, device }));
        // SAFETY: the memory of our own operations stays valid until these have ended, and they cannot end before
        // this frame has been sent.
        unsafe { self.fetcher.start(&mut self.head, frame, &self.located, []) };
        true
    }

    fn fetch_reply(&mut self, around: &TxSurroundings<'_>) -> bool {
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
        let slots = self.pieces.iter().map(|piece| piece.slot);
        // SAFETY: the memory is in regions checked under the lock that is held, and counts as touched until the copy
        // has ended.
        unsafe { self.fetcher.start(&mut self.head, frame, &self.located, slots) };
        true
    }

    /// Begins the first frame that was fetched, if its copy has ended.
    pub(super) fn begin_fetched(&mut self, ops: &Mutex<Ops>) -> bool {
        let Some(Ready { head, frame, chunk }) = self.fetcher.ready() else { return false };
        self.fetcher.recycle(std::mem::replace(&mut self.head, head));
        self.payload.clear();
        match chunk {
            Ok(chunk) => {
                self.payload.push(Span { addr: chunk.addr(), len: frame.len });
                self.start(frame, Some(chunk));
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
