//! From transfers to operations: large ones are cut, and go to the lanes with the least outstanding.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, LaneError, MessageLane, OpKind, Operation, Posted, RemoteSpans, Spans},
    pieces::Stretch,
};

use super::{
    connection::{Connection, Piece, Transfer},
    work::{Memory, Work},
};
use crate::types::Op;

/// Transfers are spread over lanes in pieces of at least this many bytes.
const STRIPE: u64 = 512 << 10;

impl Connection {
    /// Posts the operations of a transfer. Local and remote pieces belong together in pairs.
    pub(crate) fn post_ops(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        op: Op,
        local: Spans,
        remote: RemoteSpans,
    ) {
        let kind = if op == Op::Read { OpKind::Read } else { OpKind::Write };
        let mut all = Work { kind, memory: MemoryKind::Host, local, remote };
        match transfer.memory() {
            Memory::One(memory) => {
                all.memory = memory;
                if !self.post_with_signal(transfer, &all) {
                    self.ask_or_post(transfer, all);
                }
            }
            Memory::Several(kinds) => {
                kinds.split(&all).for_each(|part| self.ask_or_post(transfer, part));
            }
        }
    }

    /// Posts all that a transfer writes, and its signal, as one job of a GPU of ours. False: nothing has been posted.
    fn post_with_signal(self: &Arc<Self>, transfer: &Arc<Transfer>, work: &Work) -> bool {
        let (Some(host), Some(word)) = (&self.links.host, transfer.own_signal()) else {
            return false;
        };
        let write = work.clone().operation(transfer.clone());
        if !(Self::is_for_gpu(&word) && host.signals_by_gpu(&write, &word)) {
            return false;
        }
        transfer.signal_goes_along();
        transfer.expect_ops(1);
        // SAFETY: as in `post_on`.
        match unsafe { host.post_signalled_by_gpu(write, word) } {
            Ok(Posted::Pending(name)) => transfer.body.lock().ops.push((0, name)),
            Ok(Posted::Done(result)) => Arc::clone(transfer).complete(result),
            Err(e) => self.not_posted(transfer, e),
        }
        true
    }

    fn ask_or_post(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let asked_nothing = work.local.is_empty();
        let rest = self.ask_owner(transfer, work);
        if asked_nothing || !rest.local.is_empty() {
            self.post_work(transfer, rest);
        }
    }

    /// Posts work on one kind of local memory. If the rails reach the memory, it is one operation of the rail lane,
    /// which cuts and spreads it itself. Otherwise it goes over the streams.
    pub(super) fn post_work(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        if self.rails_for(&work).is_none() {
            return self.post_on_streams(transfer, work);
        }
        transfer.expect_ops(1);
        self.post_piece(Piece { transfer: Arc::clone(transfer), work, lane: self.rails_place() });
        self.forward_notes();
    }

    /// Posts work over the streams, which reach any memory. Large work is cut and spread over them.
    pub(super) fn post_on_streams(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let total = work.len_bytes();
        if self.lanes[0].caps().checksum && total > 0 {
            transfer.note_checksum(true);
        }
        let max_pieces = self.most_pieces(work.memory);
        let stripes = (total / STRIPE).clamp(1, self.streams().count().max(1) as u64);
        if stripes == 1 && work.local.len() <= max_pieces {
            return self.post_one(transfer, work);
        }
        let limit = total.div_ceil(stripes).next_multiple_of(4096);
        let pieces = (&work.local[..], &work.remote[..]);
        let mut rest = Stretch::all(pieces);
        while !rest.is_empty() {
            let cut = rest.cut_few(pieces, limit as usize, max_pieces);
            let (local, remote) = cut.to_lists(pieces);
            self.post_one(transfer, Work { local, remote, ..work.nothing() });
        }
    }

    fn most_pieces(&self, memory: MemoryKind) -> usize {
        let most = |lane: &Arc<dyn MessageLane>| match memory.device() {
            Some(_) => lane.caps().max_gpu_pieces,
            None => lane.caps().max_pieces,
        };
        self.links.streams.iter().map(most).min().unwrap_or(1)
    }

    fn post_one(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        transfer.expect_ops(1);
        if self.lanes.len() > 1 {
            let transfer = Arc::clone(transfer);
            return self.post_piece(Piece { transfer, work, lane: self.least_loaded() });
        }
        if let Err(e) = self.post_on(0, transfer, work.operation(transfer.clone())) {
            self.not_posted(transfer, e);
        }
    }

    /// Posts an operation, on its lane or on another that takes it. Its transfer must expect it already.
    pub(crate) fn post_piece(self: &Arc<Self>, mut piece: Piece) {
        loop {
            let lane = piece.lane;
            let shared = Arc::new(piece);
            let op = shared.work.clone().operation(Arc::clone(&shared) as _);
            match self.post_on(lane, &shared.transfer, op) {
                Ok(()) => return,
                Err(e) if self.survives(lane, &e) && !self.is_failed() => self.condemn(lane, e),
                Err(e) => return self.not_posted(&shared.transfer, e),
            }
            piece = Arc::unwrap_or_clone(shared);
            piece.lane = self.least_loaded();
        }
    }

    fn post_on(
        &self,
        lane: usize,
        transfer: &Arc<Transfer>,
        op: Operation,
    ) -> Result<(), LaneError> {
        let done = Arc::clone(&op.done);
        // SAFETY: the memory is inside regions whose leases the transfer holds, or belongs to the
        // transfer itself, until its last operation has ended.
        match unsafe { self.lanes[lane].post(op)? } {
            Posted::Pending(name) => transfer.body.lock().ops.push((lane as u16, name)),
            Posted::Done(result) => done.complete(result),
        }
        Ok(())
    }

    /// Notes that an operation could not be posted. The next thread that makes progress ends the connection.
    fn not_posted(&self, transfer: &Arc<Transfer>, e: LaneError) {
        transfer.note_error(self.lost_to(e));
        transfer.op_ended();
        self.kick();
    }

    pub(super) fn least_loaded(&self) -> usize {
        if self.lanes.len() == 1 {
            return 0;
        }
        self.streams().min_by_key(|(_, lane)| lane.load()).map_or(0, |(lane, _)| lane)
    }
}
