//! Operations under way: how much of each is still to be requested, and how many of its requests
//! are under way.

use std::{sync::Arc, time::Instant};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, OpError, OpKind, OpResult, Operation, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
    pieces::{Piece as _, Stretch},
};

/// An operation's generation, its completion, and its result.
pub(super) type EndedOp = (u32, Arc<dyn Completion>, OpResult);

/// An operation under way.
pub(super) struct Flight {
    pub(super) kind: OpKind,
    /// The kind of our memory.
    pub(super) memory: MemoryKind,
    local: Spans,
    remote: RemoteSpans,
    /// The bytes that are still to be requested.
    rest: Stretch,
    done: Arc<dyn Completion>,
    len: u64,
    left: u64,
    /// How many parts are requested or wait to be requested again, plus how many batches there are.
    pub(super) parts: u32,
    /// Why the operation has failed. Once set, nothing more of it is requested.
    pub(super) verdict: Option<OpError>,
    /// When it was first cancelled.
    pub(super) cancelled_at: Option<Instant>,
    /// Tells it from operations that had the same index before.
    pub(super) generation: u32,
}

/// A contiguous part of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) flight: usize,
    pub(super) kind: OpKind,
    pub(super) local: Span,
    pub(super) remote: RemoteSpan,
    /// The batch it belongs to, if its bytes pass through chunks.
    pub(super) batch: Option<usize>,
    /// How often the peer's device refused it.
    pub(super) refusals: u8,
    /// The number of the registration: its key names our memory in the request. Set when it is
    /// posted.
    pub(super) registration: u64,
}

impl Part {
    /// Splits it after `len` bytes: the first part, and the rest if there is one.
    pub(super) fn split(self, len: usize) -> (Self, Option<Self>) {
        let (both, whole) = ((self.local, self.remote), self.local.len);
        if len >= whole {
            return (self, None);
        }
        let with = |(local, remote)| Self { local, remote, ..self };
        (with(both.part(0, len)), Some(with(both.part(len, whole - len))))
    }
}

impl Flight {
    pub(super) fn new(op: Operation, generation: u32) -> Self {
        let len = op.len();
        let Operation { kind, local, memory, remote, done } = op;
        let mut rest = Stretch::all((&local[..], &remote[..]));
        // Devices are not asked for empty pieces: a cut takes those behind it along.
        rest.cut((&local[..], &remote[..]), 0);
        Self {
            kind,
            memory,
            local,
            remote,
            rest,
            done,
            len,
            left: len,
            parts: 0,
            verdict: None,
            cancelled_at: None,
            generation,
        }
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Bytes that are not requested yet.
    pub(super) fn left(&self) -> u64 {
        if self.verdict.is_some() { 0 } else { self.left }
    }

    /// The next contiguous part, as long as possible. Does not take it.
    pub(super) fn next(&self, flight: usize) -> Option<Part> {
        if self.left() == 0 {
            return None;
        }
        let (local, remote) = self.rest.first((&self.local[..], &self.remote[..]))?;
        let kind = self.kind;
        Some(Part { flight, kind, local, remote, batch: None, refusals: 0, registration: 0 })
    }

    /// Takes `len` bytes of the part that [`Self::next`] returned.
    pub(super) fn take(&mut self, len: usize) {
        self.rest.cut((&self.local[..], &self.remote[..]), len);
        self.left -= len as u64;
    }

    /// Makes the operation fail: nothing more of it is requested. The first reason counts.
    pub(super) fn fail(&mut self, why: OpError) {
        self.verdict.get_or_insert(why);
    }

    /// Whether none of its bytes is under way or still to be requested.
    pub(super) fn is_over(&self) -> bool {
        self.parts == 0 && self.left() == 0
    }

    /// Its generation, its completion, and its result.
    pub(super) fn end(self) -> (u32, Arc<dyn Completion>, OpResult) {
        (self.generation, self.done, self.verdict.map_or(Ok(()), Err))
    }
}
