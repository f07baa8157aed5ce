//! From a transfer to operations: adjacent iovs are merged, large ones are cut, lanes are chosen by
//! what each has outstanding.

use std::sync::Arc;

use uccl_fabric::{
    lane::{LaneError, OpKind, Operation, Posted, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};

use super::{connection::Connection, failover::Piece, transfer::Transfer};
use crate::endpoint::Op;

/// Transfers are spread over lanes in pieces of at least this many bytes.
const STRIPE: u64 = 512 << 10;

/// Local and remote memory of a transfer, iov by iov, neighbours merged.
#[derive(Default)]
pub(crate) struct Pieces {
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
}

impl Pieces {
    /// Adds an iov.
    pub(crate) fn push(&mut self, local: Span, remote: RemoteSpan) {
        if let (Some(last), Some(peer)) = (self.local.last_mut(), self.remote.last_mut())
            && last.addr + last.len == local.addr
            && peer.addr + peer.len == remote.addr
            && (peer.key, peer.slot) == (remote.key, remote.slot)
        {
            last.len += local.len;
            peer.len += remote.len;
            return;
        }
        self.local.push(local);
        self.remote.push(remote);
    }
}

impl Connection {
    /// Posts the operations of a transfer. Local and remote pieces pair up.
    pub(crate) fn post_ops(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        op: Op,
        local: Spans,
        remote: RemoteSpans,
    ) {
        let kind = if op == Op::Read { OpKind::Read } else { OpKind::Write };
        let total: u64 = local.iter().map(|span| span.len as u64).sum();
        let max_pieces = self.lanes.iter().map(|lane| lane.caps().max_pieces).min().unwrap_or(1);
        transfer.note_checksum(self.lanes[0].caps().checksum && total > 0);
        let stripes = (total / STRIPE).clamp(1, self.living().count().max(1) as u64);
        if stripes == 1 && local.len() <= max_pieces {
            return self.post_one(transfer, kind, local, remote);
        }
        let limit = total.div_ceil(stripes).next_multiple_of(4096);
        let mut cut = Cut { local: &local, remote: &remote, offset: 0 };
        while let Some((local, remote)) = cut.next(limit, max_pieces) {
            self.post_one(transfer, kind, local, remote);
        }
    }

    fn post_one(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        kind: OpKind,
        local: Spans,
        remote: RemoteSpans,
    ) {
        transfer.expect_ops(1);
        if self.lanes.len() > 1 {
            let transfer = Arc::clone(transfer);
            return self.post_piece(Piece { transfer, kind, local, remote, lane: 0 });
        }
        let op = Operation { kind, local, remote, done: transfer.clone() };
        if let Err(e) = self.post_on(0, transfer, op) {
            self.not_posted(transfer, e);
        }
    }

    /// Posts an operation that its transfer expects already, on a lane that takes it.
    pub(crate) fn post_piece(self: &Arc<Self>, mut piece: Piece) {
        loop {
            piece.lane = self.least_loaded();
            let lane = piece.lane;
            let shared = Arc::new(piece);
            let op = Operation {
                kind: shared.kind,
                local: shared.local.clone(),
                remote: shared.remote.clone(),
                done: Arc::clone(&shared) as _,
            };
            match self.post_on(lane, &shared.transfer, op) {
                Ok(()) => return,
                Err(e) if self.survives(lane, &e) && !self.is_failed() => self.condemn(lane, e),
                Err(e) => return self.not_posted(&shared.transfer, e),
            }
            piece = Arc::unwrap_or_clone(shared);
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

    /// An operation could not be begun: whoever makes progress next ends the connection.
    fn not_posted(&self, transfer: &Arc<Transfer>, e: LaneError) {
        transfer.note_error(self.lost_to(e));
        transfer.op_ended();
        self.kick();
    }

    fn least_loaded(&self) -> usize {
        if self.lanes.len() == 1 {
            return 0;
        }
        self.living().min_by_key(|(_, lane)| lane.load()).map_or(0, |(lane, _)| lane)
    }
}

/// What is left of a transfer's pieces while it is cut into operations.
struct Cut<'a> {
    local: &'a [Span],
    remote: &'a [RemoteSpan],
    offset: usize,
}

impl Cut<'_> {
    fn next(&mut self, limit: u64, max_pieces: usize) -> Option<(Spans, RemoteSpans)> {
        let (mut local, mut remote) = (Spans::new(), RemoteSpans::new());
        let mut left = limit as usize;
        while let (Some(span), Some(peer)) = (self.local.first(), self.remote.first()) {
            if left == 0 || local.len() == max_pieces {
                break;
            }
            let len = (span.len - self.offset).min(left);
            local.push(Span { addr: span.addr + self.offset, len });
            remote.push(RemoteSpan {
                addr: peer.addr + self.offset as u64,
                len: len as u64,
                ..*peer
            });
            left -= len;
            self.offset += len;
            if self.offset == span.len {
                self.local = &self.local[1..];
                self.remote = &self.remote[1..];
                self.offset = 0;
            }
        }
        (!local.is_empty()).then_some((local, remote))
    }
}
