//! Operations under way: how much of each is still to be requested, and how many of its requests are under way.

use std::{sync::Arc, time::Instant};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, OpError, OpKind, OpResult, Operation, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};

/// The memory of both sides, of equal length, and how much of it is taken already.
pub(super) struct Both {
    local: Spans,
    remote: RemoteSpans,
    /// Where the rest begins: the index of the piece and the offset in it, in our memory and in the peer's.
    here: (usize, usize),
    there: (usize, u64),
}

impl Both {
    pub(super) fn new(local: Spans, remote: RemoteSpans) -> Self {
        Self { local, remote, here: (0, 0), there: (0, 0) }
    }

    /// The next stretch that is contiguous on both sides, as long as possible. Does not take it.
    pub(super) fn next(&mut self) -> Option<(Span, RemoteSpan)> {
        // Skip pieces that are empty or used up.
        while self.local.get(self.here.0)?.len == self.here.1 {
            self.here = (self.here.0 + 1, 0);
        }
        while self.remote.get(self.there.0)?.len == self.there.1 {
            self.there = (self.there.0 + 1, 0);
        }
        let (local, remote) = (self.local[self.here.0], self.remote[self.there.0]);
        let len = (local.len - self.here.1).min((remote.len - self.there.1) as usize);
        let addr = remote.addr + self.there.1;
        let local = Span { addr: local.addr + self.here.1, len };
        Some((local, RemoteSpan { addr, len: len as u64, ..remote }))
    }

    /// Takes `len` bytes of what [`Self::next`] returned.
    pub(super) fn take(&mut self, len: usize) {
        self.here.1 += len;
        self.there.1 += len as u64;
    }
}

/// An operation under way.
pub(super) struct Flight {
    pub(super) kind: OpKind,
    /// The kind of our memory.
    pub(super) memory: MemoryKind,
    both: Both,
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
    /// The number of the registration whose key its request uses for our memory. Set when it is posted.
    pub(super) registration: u64,
}

impl Part {
    /// Splits it after `len` bytes: the first part, and the rest if there is one.
    pub(super) fn split(self, len: usize) -> (Self, Option<Self>) {
        if len >= self.local.len {
            return (self, None);
        }
        let (mut first, mut rest) = (self, self);
        (first.local.len, first.remote.len) = (len, len as u64);
        rest.local = Span { addr: self.local.addr + len, len: self.local.len - len };
        rest.remote.addr += len as u64;
        rest.remote.len -= len as u64;
        (first, Some(rest))
    }
}

impl Flight {
    pub(super) fn new(op: Operation, generation: u32) -> Self {
        let len = op.len();
        let Operation { kind, local, memory, remote, done } = op;
        Self {
            kind,
            memory,
            both: Both::new(local, remote),
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
    pub(super) fn next(&mut self, flight: usize) -> Option<Part> {
        if self.left() == 0 {
            return None;
        }
        let (local, remote) = self.both.next()?;
        let kind = self.kind;
        Some(Part { flight, kind, local, remote, batch: None, refusals: 0, registration: 0 })
    }

    /// Takes `len` bytes of what [`Self::next`] returned.
    pub(super) fn take(&mut self, len: usize) {
        self.both.take(len);
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
