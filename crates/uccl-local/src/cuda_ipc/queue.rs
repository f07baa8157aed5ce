//! Operations that wait for a GPU, and the slices in which they are enqueued.
//!
//! An enqueued copy cannot be taken back. So a GPU gets a long operation a little at a time, which bounds how long a
//! cancel, a deadline or the end of the lane waits, and lets other operations pass.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::{MemoryKind, cuda::Context};
use uccl_fabric::{
    gpu::Engine,
    lane::{Completion, OpError, OpKind, OpName, OpResult, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};

use super::{
    flight::{Flight, Hazards, Way, claim},
    ledger::Ledger,
};
use crate::shm::Direct;

/// Bytes of a slice. Among four GPUs that exchange with each other, slices of this length, four of them enqueued, use
/// the links best; with shorter slices the time to begin each one shows.
pub(super) const SLICE: u64 = 32 << 20;

/// Whether an operation of so many bytes is enqueued in slices. An operation shorter than a slice is enqueued at
/// once, and passes those that wait.
pub(crate) fn is_sliced(bytes: u64) -> bool {
    bytes >= SLICE
}

/// Our memory and the peer's, piece by piece.
pub(crate) struct Pieces {
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
}

/// An operation that will be enqueued later.
pub(super) struct Plan {
    pub(super) name: OpName,
    pub(super) kind: OpKind,
    /// The kind of our memory.
    pub(super) memory: MemoryKind,
    pub(super) pieces: Arc<Pieces>,
    /// The pieces of this operation; the others belong to other parts of the posted operation.
    pub(super) range: Range<usize>,
    pub(super) direct: Arc<Direct>,
    pub(super) context: &'static Context,
    pub(super) engine: Arc<Mutex<Engine>>,
    pub(super) ledger: Arc<Ledger>,
}

/// An operation that is enqueued slice by slice.
pub(super) struct Sliced {
    plan: Plan,
    state: Mutex<State>,
}

/// How far it has come.
struct State {
    /// What has not been given out begins in this piece ...
    index: usize,
    /// ... so many bytes into it.
    offset: usize,
    /// Slices given out that have not ended.
    active: usize,
    /// Bytes that the lane's load still counts.
    left: u64,
    error: Option<OpError>,
    /// No slice is given out any more.
    closed: bool,
    done: Option<Arc<dyn Completion>>,
}

/// A range of an operation's pieces, of which the first and the last may be partial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cut {
    from: (usize, usize),
    to: (usize, usize),
    bytes: u64,
}

/// A part of an operation that was given out. Call [`enqueue`](Self::enqueue), which also reports a failure.
pub(super) struct Slice {
    of: Arc<Sliced>,
    cut: Cut,
    hazards: Hazards,
}

/// A slice that a GPU has.
pub(super) struct Flying {
    flight: Flight,
    of: Arc<Sliced>,
    pub(super) bytes: u64,
}

/// What a queue can give to a GPU.
pub(super) enum Next {
    Slice(Slice),
    /// A slice, once flights of the lane have ended: all hazard words are in use.
    Later,
    Nothing,
}

/// The operations of one lane for one GPU of which not all has been enqueued, the oldest first.
#[derive(Default)]
pub(super) struct Queue(Mutex<List>);

#[derive(Default)]
struct List {
    waiting: VecDeque<Arc<Sliced>>,
    /// No more are accepted.
    closed: bool,
}

impl Queue {
    /// Adds an operation; `done` is called at its end.
    ///
    /// # Errors
    /// [`OpError::LaneDown`] once closed.
    pub(super) fn push(&self, plan: Plan, done: Arc<dyn Completion>) -> Result<(), OpError> {
        let mut list = self.0.lock();
        if list.closed {
            return Err(OpError::LaneDown);
        }
        list.waiting.push_back(Arc::new(Sliced::new(plan, done)));
        Ok(())
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().waiting.is_empty()
    }

    /// The next slice, of at most so many bytes.
    pub(super) fn next(&self, most: u64) -> Next {
        let mut list = self.0.lock();
        while let Some(first) = list.waiting.front() {
            let next = first.next(most);
            if first.is_closed() {
                list.waiting.pop_front();
            }
            match next {
                Next::Nothing => {}
                next => return next,
            }
        }
        Next::Nothing
    }

    /// Enqueues no more of an operation; true if it waited here. It ends with the slices that the GPU has.
    pub(super) fn cancel(&self, name: OpName) -> bool {
        let found = {
            let mut list = self.0.lock();
            let at = list.waiting.iter().position(|other| other.plan.name == name);
            at.and_then(|at| list.waiting.remove(at))
        };
        if let Some(found) = &found {
            found.close(OpError::Cancelled);
        }
        found.is_some()
    }

    /// Enqueues no more of any operation, and accepts no more.
    pub(super) fn close(&self) {
        let waiting = {
            let mut list = self.0.lock();
            list.closed = true;
            std::mem::take(&mut list.waiting)
        };
        waiting.iter().for_each(|left| left.close(OpError::LaneDown));
    }
}

impl Sliced {
    fn new(plan: Plan, done: Arc<dyn Completion>) -> Self {
        let left = plan.pieces.local[plan.range.clone()].iter().map(|span| span.len as u64).sum();
        let state = State {
            index: plan.range.start,
            offset: 0,
            active: 0,
            left,
            error: None,
            closed: false,
            done: Some(done),
        };
        plan.ledger.queue();
        Self { plan, state: Mutex::new(state) }
    }

    /// Gives out the next slice, once the hazard words for its regions are claimed.
    fn next(self: &Arc<Self>, most: u64) -> Next {
        let mut state = self.state.lock();
        if state.closed {
            return Next::Nothing;
        }
        let local = &self.plan.pieces.local[..self.plan.range.end];
        let cut = cut(local, (state.index, state.offset), most);
        let Some(hazards) = claim(&self.plan.direct, self.pairs(cut).map(|(_, there)| there))
        else {
            return Next::Later;
        };
        (state.index, state.offset) = cut.to;
        state.closed = state.index == self.plan.range.end;
        state.active += 1;
        Next::Slice(Slice { of: Arc::clone(self), cut, hazards })
    }

    fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// The pieces of a slice.
    fn pairs(&self, cut: Cut) -> impl Iterator<Item = (Span, RemoteSpan)> + Clone {
        let Cut { from, to, .. } = cut;
        // The last piece counts if a part of it is in the slice.
        let end = to.0 + usize::from(to.1 > 0);
        let Pieces { local, remote } = &*self.plan.pieces;
        let both = local[from.0..end].iter().zip(&remote[from.0..end]);
        both.enumerate().map(move |(at, (here, there))| {
            let start = if at == 0 { from.1 } else { 0 };
            let len = if from.0 + at == to.0 { to.1 - start } else { here.len - start };
            let whole = len == here.len;
            let there_len = if whole { there.len } else { len as u64 };
            (
                Span { addr: here.addr + start, len },
                RemoteSpan { addr: there.addr + start as u64, len: there_len, ..*there },
            )
        })
    }

    /// A slice has ended.
    fn ended(&self, bytes: u64, result: OpResult) {
        let mut state = self.state.lock();
        state.active -= 1;
        state.left -= bytes;
        self.plan.ledger.moved(bytes);
        if let Err(e) = result {
            state.error.get_or_insert(e);
            state.closed = true;
        }
        self.settle(state);
    }

    /// Gives no slice out any more.
    fn close(&self, why: OpError) {
        let mut state = self.state.lock();
        if !state.closed {
            state.error.get_or_insert(why);
            state.closed = true;
        }
        self.settle(state);
    }

    /// Ends the operation if no slice of it is under way and none will be.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        if !state.closed || state.active > 0 {
            return;
        }
        let Some(done) = state.done.take() else { return };
        // The bytes that were never given out.
        self.plan.ledger.moved(std::mem::take(&mut state.left));
        let result = state.error.take().map_or(Ok(()), Err);
        drop(state);
        self.plan.ledger.landed(done, result);
        self.plan.ledger.unqueue();
    }
}

impl Slice {
    pub(super) fn bytes(&self) -> u64 {
        self.cut.bytes
    }

    /// Enqueues the slice on the GPU. `None`: it failed, and no copy of it runs. After a failed slice no other slice
    /// of its operation is given out.
    pub(super) fn enqueue(self) -> Option<Flying> {
        let Self { of, cut, hazards } = self;
        let &Plan { kind, memory, ref direct, context, ref engine, .. } = &of.plan;
        let way = Way { direct, kind, memory, context, passes_slices: false };
        // SAFETY: the local memory of an operation stays valid until the operation has ended, and that waits for its
        // slices.
        match unsafe { way.enqueue(of.pairs(cut), engine, hazards) } {
            Ok(flight) => {
                if let Some(e) = flight.failed() {
                    of.close(e.clone());
                }
                Some(Flying { flight, of, bytes: cut.bytes })
            }
            Err(e) => {
                of.ended(cut.bytes, Err(e));
                None
            }
        }
    }
}

impl Flying {
    /// The result; `None` while it is under way.
    pub(super) fn result(&self) -> Option<OpResult> {
        self.flight.ended()
    }

    /// Releases what an ended slice held, and reports the end to its operation.
    pub(super) fn land(self, result: OpResult) {
        self.flight.land();
        self.of.ended(self.bytes, result);
    }
}

/// The next pieces from `from` on, of at most `most` bytes together.
fn cut(local: &[Span], from: (usize, usize), most: u64) -> Cut {
    let ((mut index, mut offset), mut bytes) = (from, 0);
    while let Some(span) = local.get(index) {
        let (here, room) = ((span.len - offset) as u64, most - bytes);
        if here > room {
            // The cast fits: `room` is less than the length of a piece.
            offset += room as usize;
            bytes += room;
            break;
        }
        bytes += here;
        (index, offset) = (index + 1, 0);
    }
    Cut { from, to: (index, offset), bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_every_byte_once_and_in_order() {
        let mut rng = fastrand::Rng::with_seed(5);
        for _ in 0..500 {
            let most = rng.u64(1..2000);
            let local: Vec<Span> = (0..rng.usize(1..50))
                .map(|at| Span { addr: at << 20, len: rng.usize(0..3) * rng.usize(0..3000) })
                .collect();
            let (mut at, mut sum) = ((0, 0), 0);
            while at.0 < local.len() {
                let slice = cut(&local, at, most);
                assert_eq!(slice.from, at);
                assert!(slice.bytes <= most && slice.to > at, "{slice:?}");
                let before = |(index, offset): (usize, usize)| {
                    local[..index].iter().map(|span| span.len).sum::<usize>() + offset
                };
                assert_eq!(slice.bytes as usize, before(slice.to) - before(at));
                at = slice.to;
                sum += slice.bytes as usize;
                assert!(at.0 == local.len() || slice.bytes == most, "{slice:?} could be longer");
            }
            assert_eq!((at.1, sum), (0, local.iter().map(|span| span.len).sum()));
        }
    }
}
