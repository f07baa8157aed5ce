//! From transfers to operations: large ones are cut, and go to the lanes with the least
//! outstanding.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{LaneError, OpError, OpKind, Operation, PostOutcome, RemoteSpans, Spans},
    pieces::Stretch,
};

use super::{
    core::connection::{Connection, talk::Piece, transfer::Transfer},
    route::Route,
    work::{Memory, Work},
};
use crate::types::Op;

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
                let route = self.choose(&all, transfer.free_signal().as_ref());
                self.post(transfer, all, route);
            }
            Memory::Several(kinds) => kinds.split(&all).for_each(|part| {
                let route = self.choose(&part, None);
                self.post(transfer, part, route);
            }),
        }
    }

    /// Posts work on one kind of local memory on its route.
    pub(super) fn post<'a>(
        self: &'a Arc<Self>,
        transfer: &Arc<Transfer>,
        work: Work,
        mut route: Route<'a>,
    ) {
        if let Route::GpuAndSignal(_) | Route::StreamAndSignal = route {
            if self.post_with_signal(transfer, &work, &route) {
                return;
            }
            route = self.choose(&work, None);
        }
        match route {
            Route::Owner(marks) => {
                let rest = self.ask_owner(transfer, work, &marks);
                if !rest.local.is_empty() {
                    let route = self.choose_lanes(&rest);
                    self.post(transfer, rest, route);
                }
            }
            Route::Rails(_) => {
                let (transfer, lane) = (Arc::clone(transfer), self.lanes.rails_place());
                transfer.expect_ops(1);
                self.post_piece(Piece { transfer, work, lane });
                self.forward_notes();
            }
            Route::Streams => {
                self.note_checksum(transfer, &work);
                self.post_cut(transfer, &work);
            }
            Route::GpuAndSignal(_) | Route::StreamAndSignal | Route::Stream => {
                self.note_checksum(transfer, &work);
                self.post_one(transfer, work);
            }
        }
    }

    /// Cuts work, and spreads it over the streams.
    fn post_cut(self: &Arc<Self>, transfer: &Arc<Transfer>, work: &Work) {
        let (total, max_pieces) = (work.len_bytes(), self.most_pieces(work.memory));
        let limit = total.div_ceil(self.stripes(total)).next_multiple_of(4096);
        let pieces = (&work.local[..], &work.remote[..]);
        let mut rest = Stretch::all(pieces);
        while !rest.is_empty() {
            let cut = rest.cut_few(pieces, limit as usize, max_pieces);
            let (local, remote) = cut.to_lists(pieces);
            self.post_one(transfer, Work { local, remote, ..work.nothing() });
        }
    }

    /// Posts a write and its signal as one operation. False: nothing has happened, and the signal
    /// has to follow the write.
    fn post_with_signal(&self, transfer: &Arc<Transfer>, work: &Work, route: &Route<'_>) -> bool {
        let Some(word) = transfer.take_signal() else { return false };
        transfer.expect_ops(1);
        let op = work.clone().operation(Arc::clone(transfer) as _);
        let done = Arc::clone(&op.done);
        // SAFETY: as for other operations of a transfer.
        let posted = unsafe {
            match route {
                Route::GpuAndSignal(host) => host.post_signalled_by_gpu(op, word),
                _ => {
                    self.note_checksum(transfer, work);
                    self.lanes.messages().post_signalled(op, word)
                }
            }
        };
        match posted {
            Ok(PostOutcome::Pending(name)) => transfer.body.lock().ops.push((0, name)),
            // The GPU reaches the word, but not the data. Nothing has moved: data and signal take
            // the way that they would take without a GPU.
            Ok(PostOutcome::Done(Err(OpError::HostOnly(_))))
                if matches!(route, Route::GpuAndSignal(_)) =>
            {
                transfer.return_signal(word);
                transfer.op_ended();
                return false;
            }
            Ok(PostOutcome::Done(result)) => done.complete(result),
            Err(e) => self.not_posted(transfer, e),
        }
        true
    }

    /// Notes that the data of a transfer carries a checksum, if it does.
    fn note_checksum(&self, transfer: &Transfer, work: &Work) {
        if self.lanes.all[0].caps().checksum && work.len_bytes() > 0 {
            transfer.note_checksum(true);
        }
    }

    fn post_one(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        transfer.expect_ops(1);
        if self.lanes.all.len() > 1 {
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
        match unsafe { self.lanes.all[lane].post(op)? } {
            PostOutcome::Pending(name) => transfer.body.lock().ops.push((lane as u16, name)),
            PostOutcome::Done(result) => done.complete(result),
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
        if self.lanes.all.len() == 1 {
            return 0;
        }
        self.lanes.living_streams().min_by_key(|(_, lane)| lane.load()).map_or(0, |(lane, _)| lane)
    }
}
