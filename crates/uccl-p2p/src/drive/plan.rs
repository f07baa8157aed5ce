//! From transfers to operations: large ones are cut, and go to the lanes with the least
//! outstanding.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{LaneError, MessageLane, OpError, OpKind, Operation, Posted, RemoteSpans, Spans},
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
                if let Some(all) = self.post_signalled(transfer, all) {
                    self.ask_or_post(transfer, all);
                }
            }
            Memory::Several(kinds) => {
                kinds.split(&all).for_each(|part| self.ask_or_post(transfer, part));
            }
        }
    }

    fn ask_or_post(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let asked_nothing = work.local.is_empty();
        let rest = self.ask_owner(transfer, work);
        if asked_nothing || !rest.local.is_empty() {
            self.post_work(transfer, rest);
        }
    }

    /// Posts work on one kind of local memory. If the rails reach the memory, it is one operation
    /// of the rail lane, which cuts and spreads it itself. Otherwise it goes over the streams.
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
        self.note_checksum(transfer, &work);
        if self.is_one_operation(&work) {
            return self.post_one(transfer, work);
        }
        let (total, max_pieces) = (work.len_bytes(), self.most_pieces(work.memory));
        let stripes = self.stripes(total);
        let limit = total.div_ceil(stripes).next_multiple_of(4096);
        let pieces = (&work.local[..], &work.remote[..]);
        let mut rest = Stretch::all(pieces);
        while !rest.is_empty() {
            let cut = rest.cut_few(pieces, limit as usize, max_pieces);
            let (local, remote) = cut.to_lists(pieces);
            self.post_one(transfer, Work { local, remote, ..work.nothing() });
        }
    }

    /// Posts a write and its signal as one operation of the first lane, or as one job of a GPU of
    /// ours, if that is possible. Otherwise returns the work.
    ///
    /// No operation of the first lane is ever posted again, because the connection ends with it. So
    /// the word changes once.
    fn post_signalled(&self, transfer: &Arc<Transfer>, work: Work) -> Option<Work> {
        let Some(word) = transfer.free_signal() else { return Some(work) };
        let op = work.clone().operation(Arc::clone(transfer) as _);
        let by_gpu = self.links.host.as_ref();
        let by_gpu =
            by_gpu.filter(|host| Self::is_for_gpu(&word) && host.signals_by_gpu(&op, &word));
        if by_gpu.is_none() && !self.streams_take_signal(&work, &op) {
            return Some(work);
        }
        let Some(word) = transfer.take_signal() else { return Some(work) };
        transfer.expect_ops(1);
        let done = Arc::clone(&op.done);
        // SAFETY: as for other operations of a transfer.
        let posted = unsafe {
            match by_gpu {
                Some(host) => host.post_signalled_by_gpu(op, word),
                None => {
                    self.note_checksum(transfer, &work);
                    self.messages().post_signalled(op, word)
                }
            }
        };
        match posted {
            Ok(Posted::Pending(name)) => transfer.body.lock().ops.push((0, name)),
            // The GPU reaches the word, but not the data. Nothing has moved: data and signal take
            // the way that they would take without a GPU.
            Ok(Posted::Done(Err(OpError::HostOnly(_)))) if by_gpu.is_some() => {
                transfer.return_signal(word);
                transfer.op_ended();
                return Some(work);
            }
            Ok(Posted::Done(result)) => done.complete(result),
            Err(e) => self.not_posted(transfer, e),
        }
        None
    }

    /// Whether a write is one operation of the first lane, which takes a signal along.
    fn streams_take_signal(&self, work: &Work, op: &Operation) -> bool {
        self.peer.takes_signals
            && self.is_one_operation(work)
            && self.rails_for(work).is_none()
            && !self.asks_about(work)
            && self.messages().carries_signal(op)
    }

    /// Notes that the data of a transfer carries a checksum, if it does.
    fn note_checksum(&self, transfer: &Transfer, work: &Work) {
        if self.lanes[0].caps().checksum && work.len_bytes() > 0 {
            transfer.note_checksum(true);
        }
    }

    /// Whether the streams carry it as one operation.
    fn is_one_operation(&self, work: &Work) -> bool {
        self.stripes(work.len_bytes()) == 1 && work.pieces() <= self.most_pieces(work.memory)
    }

    /// The number of streams over which this many bytes are spread.
    fn stripes(&self, bytes: u64) -> u64 {
        (bytes / STRIPE).clamp(1, self.streams().count().max(1) as u64)
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

    /// Posts an operation, on its lane or on another that takes it. Its transfer must expect it
    /// already.
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
        // SAFETY: the memory is inside regions that the transfer leases, or belongs to the transfer
        // itself, until its last operation has ended.
        match unsafe { self.lanes[lane].post(op)? } {
            Posted::Pending(name) => transfer.body.lock().ops.push((lane as u16, name)),
            Posted::Done(result) => done.complete(result),
        }
        Ok(())
    }

    /// Notes that an operation could not be posted. The next thread that makes progress ends the
    /// connection.
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
