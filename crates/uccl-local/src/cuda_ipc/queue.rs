//! Operations that wait for a GPU, and the slices in which they are enqueued.
//!
//! An enqueued copy cannot be taken back. So a GPU gets a long operation in slices. That bounds how
//! long a cancel, a deadline or the end of the lane waits, and lets other operations pass.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::{MemoryKind, cuda::Context};
use uccl_fabric::{
    gpu::Engine,
    lane::{Completion, OpError, OpKind, OpName, OpResult, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
    pieces::{Pieces as _, Stretch},
    signal::Word,
};

use super::{
    copy_end::CopyEnd,
    flight::{Flight, Hazards, Way, claim},
    ledger::Ledger,
};
use crate::shm::Direct;

/// The fewest bytes of an operation that takes turns. A shorter one is enqueued at once, and passes
/// those that wait.
const SLICED_FROM: u64 = 8 << 20;

/// Whether an operation of this length is enqueued in slices.
pub(crate) fn is_sliced(bytes: u64) -> bool {
    bytes >= SLICED_FROM
}

/// Our memory and the peer's, piece by piece.
pub(crate) struct Pieces {
    pub(crate) local: Spans,
    pub(crate) remote: RemoteSpans,
}

/// An operation that will be enqueued later.
pub(super) struct Plan {
    pub(super) name: OpName,
    /// The GPU at the other end.
    pub(super) other: CopyEnd,
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
    /// The signal, which the last slice carries.
    pub(super) word: Option<Word>,
}

/// An operation that is enqueued slice by slice.
pub(super) struct SlicedOperation {
    plan: Plan,
    state: Mutex<State>,
}

/// The progress of an operation.
struct State {
    /// The rest that has not been given out.
    rest: Stretch,
    /// Slices given out that have not ended.
    active: usize,
    /// Bytes that the lane's load still counts.
    left: u64,
    error: Option<OpError>,
    /// No slice is given out any more.
    closed: bool,
    done: Option<Arc<dyn Completion>>,
}

/// A part of an operation that was given out. Call [`enqueue`](Self::enqueue), which also reports a
/// failure.
pub(super) struct Slice {
    of: Arc<SlicedOperation>,
    cut: Stretch,
    bytes: u64,
    hazards: Hazards,
    /// The signal, which stands for the slices before this one too: a GPU copies them in order.
    word: Option<Word>,
}

/// A slice that a GPU has.
pub(super) struct SliceFlight {
    flight: Flight,
    of: Arc<SlicedOperation>,
    pub(super) bytes: u64,
}

/// The answer of a queue to a GPU that has room for a slice.
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
    waiting: VecDeque<Arc<SlicedOperation>>,
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
        list.waiting.push_back(Arc::new(SlicedOperation::new(plan, done)));
        Ok(())
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().waiting.is_empty()
    }

    /// The GPU at the other end of the next slice; `None` if nothing waits.
    pub(super) fn front(&self) -> Option<CopyEnd> {
        self.0.lock().waiting.front().map(|first| first.plan.other)
    }

    /// The next slice, of at most `most` bytes.
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

    /// The next slice of one operation, as much as is left; `None` if it does not wait here.
    pub(super) fn next_of(&self, name: OpName) -> Option<Next> {
        let mut list = self.0.lock();
        let at = list.waiting.iter().position(|sliced| sliced.plan.name == name)?;
        let next = list.waiting[at].next(u64::MAX / 4);
        if list.waiting[at].is_closed() {
            list.waiting.remove(at);
        }
        Some(next)
    }

    /// Enqueues no more of an operation; true if it waited here. It ends with the slices that the
    /// GPU has.
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

impl Plan {
    /// The pieces of this operation.
    fn pieces(&self) -> (&[Span], &[RemoteSpan]) {
        (&self.pieces.local[self.range.clone()], &self.pieces.remote[self.range.clone()])
    }
}

impl SlicedOperation {
    fn new(plan: Plan, done: Arc<dyn Completion>) -> Self {
        let pieces = plan.pieces();
        let state = State {
            rest: Stretch::all(pieces),
            active: 0,
            left: pieces.len_bytes(),
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
        let (pieces, mut rest) = (self.plan.pieces(), state.rest);
        let cut = rest.cut(pieces, most as usize);
        let word = self.plan.word.filter(|_| rest.is_empty());
        let there = cut.parts(pieces).map(|(_, there)| there);
        let there = there.chain(word.map(|word| word.span));
        let Some(hazards) = claim(&self.plan.direct, there) else { return Next::Later };
        state.rest = rest;
        state.closed = rest.is_empty();
        state.active += 1;
        let bytes = cut.parts(pieces).map(|(here, _)| here.len as u64).sum();
        Next::Slice(Slice { of: Arc::clone(self), cut, bytes, hazards, word })
    }

    fn is_closed(&self) -> bool {
        self.state.lock().closed
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
        self.plan.ledger.count_dequeued();
    }
}

impl Slice {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Enqueues the slice on the GPU. `None`: it failed, and no copy of it runs. After a failed
    /// slice no other slice of its operation is given out.
    pub(super) fn enqueue(self, blocks: u32) -> Option<SliceFlight> {
        let Self { of, cut, bytes, hazards, word } = self;
        let &Plan { kind, memory, ref direct, context, ref engine, .. } = &of.plan;
        let way = Way {
            direct,
            kind,
            memory,
            context,
            passes_slices: false,
            word,
            blocks,
            behind: None,
            uploads: None,
        };
        // SAFETY: the local memory of an operation stays valid until the operation has ended, and
        // that waits for its slices.
        match unsafe { way.enqueue(cut.parts(of.plan.pieces()), engine, hazards) } {
            Ok(flight) => {
                if let Some(e) = flight.failed() {
                    of.close(e.clone());
                }
                Some(SliceFlight { flight, of, bytes })
            }
            Err(e) => {
                of.ended(bytes, Err(e));
                None
            }
        }
    }
}

impl SliceFlight {
    /// The result; `None` while it is under way.
    pub(super) fn result(&self) -> Option<OpResult> {
        self.flight.ended()
    }

    /// The engine that has enqueued it, if it is part of this operation of the lane with that
    /// ledger.
    pub(super) fn engine_of(
        &self,
        name: OpName,
        ledger: &Arc<Ledger>,
    ) -> Option<Arc<Mutex<Engine>>> {
        let plan = &self.of.plan;
        let is_it = plan.name == name && Arc::ptr_eq(&plan.ledger, ledger);
        is_it.then(|| Arc::clone(&plan.engine))
    }

    /// The GPU at the other end.
    pub(super) fn other(&self) -> CopyEnd {
        self.of.plan.other
    }

    /// Releases the resources of an ended slice, and reports the end to its operation.
    pub(super) fn land(self, result: OpResult) {
        self.flight.land();
        self.of.ended(self.bytes, result);
    }
}
