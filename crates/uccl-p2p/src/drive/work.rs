//! The work of a transfer: pairs of local and remote pieces, merged, sorted by kind and cut.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, OpKind, Operation, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
    pieces::group,
};

use super::regions::contains;
use crate::ids::MrId;

/// Local and remote memory of a transfer, iov by iov. Neighbours are merged.
#[derive(Clone, Default, Debug)]
pub(crate) struct Pieces {
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
    /// The region of the last iov's local memory.
    last: Option<MrId>,
}

impl Pieces {
    /// Pieces that have been merged.
    pub(super) fn merged(local: Spans, remote: RemoteSpans) -> Self {
        Self { local, remote, last: None }
    }

    /// The same pieces, of which clones are no copies.
    pub(crate) fn share(self) -> Self {
        Self { local: self.local.share(), remote: self.remote.share(), ..self }
    }

    /// Makes room for this number of iovs.
    pub(crate) fn reserve(&mut self, iovs: usize) {
        self.local.reserve(iovs);
        self.remote.reserve(iovs);
    }

    /// Adds an iov. Neighbours are not merged where one region ends and another begins, on either
    /// side: devices use a different key for each region.
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

/// The work of one operation.
#[derive(Clone)]
pub(crate) struct Work {
    pub(crate) kind: OpKind,
    /// The kind of all of the local memory.
    pub(crate) memory: MemoryKind,
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
}

impl Work {
    pub(super) fn len_bytes(&self) -> u64 {
        self.local.len_bytes()
    }

    /// The operation that does all of it.
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

/// Spans of memory and their kinds.
pub(crate) struct Kinds(pub(crate) Vec<(Span, MemoryKind)>);

impl Kinds {
    fn of(&self, span: Span) -> MemoryKind {
        let found = self.0.iter().find(|(region, _)| contains(*region, span));
        found.map_or(MemoryKind::Host, |(_, kind)| *kind)
    }

    /// Cuts work into parts of one kind of memory each.
    pub(super) fn split(&self, work: &Work) -> impl Iterator<Item = Work> + use<> {
        let parts = group((&work.local[..], &work.remote[..]), |local, _| self.of(local));
        let kind = work.kind;
        parts.into_iter().map(move |(memory, (local, remote))| Work { kind, memory, local, remote })
    }
}

impl Work {
    /// How many pieces it has.
    pub(super) fn pieces(&self) -> usize {
        self.local.len()
    }

    pub(super) fn nothing(&self) -> Self {
        let (local, remote) = (Spans::new(), RemoteSpans::new());
        Self { kind: self.kind, memory: self.memory, local, remote }
    }

    /// Adds pieces of the same kind of work.
    pub(super) fn append(&mut self, mut other: Self) {
        self.local.append(&mut other.local);
        self.remote.append(&mut other.remote);
    }

    /// The pieces that are marked, and the others, as two works.
    pub(super) fn partition(self, marks: &[bool]) -> (Self, Self) {
        let (mut marked, mut others) = (self.nothing(), self.nothing());
        for ((local, remote), mark) in self.local.into_iter().zip(self.remote).zip(marks) {
            let part = if *mark { &mut marked } else { &mut others };
            part.local.push(local);
            part.remote.push(remote);
        }
        (marked, others)
    }

    /// Cuts it into parts of at most `most` pieces.
    pub(super) fn chunks(self, most: usize) -> impl Iterator<Item = Self> {
        let count = self.pieces();
        (0..count).step_by(most).map(move |start| {
            let range = start..count.min(start + most);
            let (local, remote) = (self.local[range.clone()].into(), self.remote[range].into());
            Self { local, remote, ..self.nothing() }
        })
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
