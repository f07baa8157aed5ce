//! From a transfer to operations: adjacent iovs are merged, large ones are cut, lanes are chosen by
//! what each has outstanding.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, Lane, LaneError, OpKind, Operation, Posted, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};

use super::{connection::Connection, failover::Piece, rails::RailLane, transfer::Transfer};
use crate::{endpoint::Op, ids::MrId};

/// Transfers are spread over lanes in pieces of at least this many bytes.
const STRIPE: u64 = 512 << 10;

/// Local and remote memory of a transfer, iov by iov, neighbours merged.
#[derive(Default)]
pub(crate) struct Pieces {
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
    /// The region of the last one's local memory.
    last: Option<MrId>,
}

impl Pieces {
    /// Makes room for so many iovs.
    pub(crate) fn reserve(&mut self, iovs: usize) {
        self.local.reserve(iovs);
        self.remote.reserve(iovs);
    }

    /// Adds an iov. Neighbours stay apart where one region ends and another begins, on either side: a device names
    /// each of the two by a key of its own.
    pub(crate) fn push(&mut self, mr: MrId, local: Span, remote: RemoteSpan) {
        let last = self.last.replace(mr);
        if last == Some(mr)
            && let (Some(last), Some(peer)) = (self.local.last_mut(), self.remote.last_mut())
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

/// What one operation is to do.
#[derive(Clone)]
pub(crate) struct Work {
    pub(crate) kind: OpKind,
    /// The kind of the local memory, all of it.
    pub(crate) memory: MemoryKind,
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
}

impl Work {
    pub(super) fn len_bytes(&self) -> u64 {
        self.local.iter().map(|span| span.len as u64).sum()
    }

    /// One operation of it.
    pub(crate) fn operation(self, done: Arc<dyn Completion>) -> Operation {
        let Self { kind, memory, local, remote } = self;
        Operation { kind, local, memory, remote, done }
    }
}

/// The kinds of a transfer's local memory.
pub(crate) enum Memory {
    One(MemoryKind),
    Several(Kinds),
}

/// Where which kind of memory is.
pub(crate) struct Kinds(pub(crate) Vec<(Span, MemoryKind)>);

impl Kinds {
    fn of(&self, span: Span) -> MemoryKind {
        let found = self.0.iter().find(|(region, _)| super::regions::contains(*region, span));
        found.map_or(MemoryKind::Host, |(_, kind)| *kind)
    }

    /// Cuts work into parts of one kind of memory each.
    fn split(&self, work: Work) -> impl Iterator<Item = Work> + use<> {
        let mut parts: Vec<Work> = Vec::new();
        for (span, remote) in work.local.into_iter().zip(work.remote) {
            let memory = self.of(span);
            let at = parts.iter().position(|part| part.memory == memory).unwrap_or_else(|| {
                let (local, remote) = (Spans::new(), RemoteSpans::new());
                parts.push(Work { kind: work.kind, memory, local, remote });
                parts.len() - 1
            });
            parts[at].local.push(span);
            parts[at].remote.push(remote);
        }
        parts.into_iter()
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
        let mut all = Work { kind, memory: MemoryKind::Host, local, remote };
        match transfer.memory() {
            Memory::One(memory) => {
                all.memory = memory;
                self.ask_or_post(transfer, all);
            }
            Memory::Several(kinds) => {
                kinds.split(all).for_each(|part| self.ask_or_post(transfer, part));
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

    /// Posts the operations of one kind of local memory: over rails if they reach it.
    pub(super) fn post_work(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let Some(RailLane { index, .. }) = self.rails_for(&work) else {
            return self.post_on_streams(transfer, work);
        };
        transfer.expect_ops(1);
        self.post_piece(Piece { transfer: Arc::clone(transfer), work, lane: *index });
        self.forward_notes();
    }

    /// Posts them on the lanes that any memory can be sent over.
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
        let Work { kind, memory, .. } = work;
        let mut cut = Cut { local: &work.local, remote: &work.remote, offset: 0 };
        while let Some((local, remote)) = cut.next(limit, max_pieces) {
            self.post_one(transfer, Work { kind, memory, local, remote });
        }
    }

    fn most_pieces(&self, memory: MemoryKind) -> usize {
        let most = |lane: &Arc<dyn Lane>| match memory.device() {
            Some(_) => lane.caps().max_gpu_pieces,
            None => lane.caps().max_pieces,
        };
        let streams = self.lanes.iter().enumerate().filter(|(lane, _)| self.is_stream(*lane));
        streams.map(|(_, lane)| most(lane)).min().unwrap_or(1)
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

    /// Posts an operation that its transfer expects already, on its lane or on another that takes it.
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

    /// An operation could not be begun: whoever makes progress next ends the connection.
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

/// What is left of a transfer's pieces while it is cut into operations.
struct Cut<'a> {
    local: &'a [Span],
    remote: &'a [RemoteSpan],
    offset: usize,
}

impl Cut<'_> {
    fn next(&mut self, limit: u64, max_pieces: usize) -> Option<(Spans, RemoteSpans)> {
        let most = self.local.len().min(max_pieces);
        let (mut local, mut remote) =
            (Spans::with_capacity(most), RemoteSpans::with_capacity(most));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(iovs: &[(u64, usize, u32, u64)]) -> Vec<usize> {
        let mut pieces = Pieces::default();
        for (mr, addr, slot, there) in iovs.iter().copied() {
            let remote = RemoteSpan { addr: there, len: 10, key: 7, slot };
            pieces.push(MrId(mr), Span { addr, len: 10 }, remote);
        }
        assert_eq!(pieces.local.len(), pieces.remote.len());
        pieces.local.iter().map(|span| span.len).collect()
    }

    #[test]
    fn neighbours_in_one_region_of_each_side_are_one_piece() {
        assert_eq!(pieces(&[(1, 100, 5, 0), (1, 110, 5, 10), (1, 120, 5, 20)]), [30]);
        assert_eq!(pieces(&[(1, 100, 5, 0), (1, 111, 5, 10)]), [10, 10], "a gap here");
        assert_eq!(pieces(&[(1, 100, 5, 0), (1, 110, 5, 11)]), [10, 10], "a gap there");
    }

    #[test]
    fn neighbours_in_two_regions_stay_two_pieces() {
        assert_eq!(pieces(&[(1, 100, 5, 0), (2, 110, 5, 10), (2, 120, 5, 20)]), [10, 20], "here");
        assert_eq!(pieces(&[(1, 100, 5, 0), (1, 110, 6, 10)]), [10, 10], "there");
    }
}
