//! Chooses the frame that is sent next, and writes its start.

use parking_lot::Mutex;
use uccl_fabric::{lane::OpError, pipe::PipeTx};
use uccl_wire::frame::{Header, Kind, MAX_PAYLOAD, Status};

use super::{GATHERED, Tx, TxContext, cut::push_head};
use crate::{ops::Ops, queue::OutgoingKind};

impl<P: PipeTx> Tx<P> {
    /// Begins the next frame: our operations and the peer's take turns.
    pub(super) fn begin(&mut self, around: &TxContext<'_>) {
        self.fetch(around);
        if self.begin_fetched(around.ops) {
            return;
        }
        self.replies_turn = !self.replies_turn;
        if self.replies_turn && self.begin_reply() {
            return;
        }
        if !self.begin_own(around.ops) {
            self.begin_reply();
        }
    }

    fn begin_own(&mut self, ops: &Mutex<Ops>) -> bool {
        if self.is_fetching(true) {
            return false;
        }
        while let Some(own) = self.own.front() {
            if own.is_fetched() {
                return false;
            }
            let (name, kind, is_short) = (own.name, own.kind, own.is_short());
            if is_short && self.control_len() >= GATHERED {
                return false;
            }
            let mut ops = ops.lock();
            self.blocked = !ops.begin(name);
            if self.blocked {
                return false;
            }
            match kind {
                OutgoingKind::Write if is_short => {
                    if !self.gather() {
                        ops.doom(name, OpError::LocalFault);
                    }
                }
                OutgoingKind::Write => {
                    drop(ops);
                    self.begin_write();
                    return true;
                }
                OutgoingKind::Read => self.send_read(),
                OutgoingKind::Fence => {
                    self.push_bare(Kind::Fence, name.0);
                    self.own.pop_front();
                }
            }
            // Not earlier: an operation that has been sent may end at any time.
            ops.sent(name);
        }
        false
    }

    /// Moves the first of our operations to the short frames. False: its data cannot be read.
    fn gather(&mut self) -> bool {
        let Some(own) = self.own.pop_front() else { return true };
        // SAFETY: the spans of our own operations stay valid until these have ended.
        unsafe { self.push_short(own.name, &own.local, &own.remote, own.word) }
    }

    fn send_read(&mut self) {
        let Some(own) = self.own.pop_front() else { return };
        let header = Header {
            descs: own.remote.len() as u16,
            checked: self.checked,
            ..Header::bare(Kind::Read, own.name.0, own.left)
        };
        push_head(&mut self.control, &header, own.remote.iter().copied());
    }

    fn begin_write(&mut self) {
        if let Some(frame) = self.cut_write(MAX_PAYLOAD) {
            self.start(frame, None);
        }
    }

    fn begin_reply(&mut self) -> bool {
        if self.is_fetching(false) || self.replies.front().is_some_and(|reply| reply.is_fetched) {
            return false;
        }
        let is_stopped = self.replies.front().is_some_and(|reply| reply.is_stopped);
        let Some(frame) = self.cut_reply(MAX_PAYLOAD) else { return false };
        self.start(frame, None);
        if is_stopped {
            self.poison(Status::Cut);
        }
        true
    }
}
