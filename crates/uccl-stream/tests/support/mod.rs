//! Two stream lanes over a chaos pipe, and memory with every byte watched.
#![allow(dead_code, reason = "no test file uses all of it")]

pub(crate) mod stage;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use uccl_chaos::{ChaosEnd, ChaosPipe, Faults, GpuFaults, pair_of};
use uccl_conformance::Inbox;
use uccl_device::MemoryKind;
use uccl_fabric::gpu::CopyBy;
use uccl_fabric::lane::{
    Completion, Lane, LaneError, MessageLane, OpKind, OpName, OpResult, Operation, PostOutcome,
    RemoteSpans, Spans,
};
use uccl_fabric::mem::{RemoteSpan, Span};
use uccl_fabric::region::{Region, RegionTable, Rights};
use uccl_stream::{StreamLane, StreamOptions};

/// One end: its lane, its regions, its messages.
pub(crate) struct Side {
    pub(crate) lane: StreamLane<ChaosPipe>,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) inbox: Inbox,
}

impl Side {
    pub(crate) fn new((pipe, tx, rx): ChaosEnd, checksum: bool, gpu: GpuFaults) -> Self {
        let regions = Arc::new(RegionTable::new().expect("a table"));
        let copy_by = CopyBy::from(gpu);
        let options = StreamOptions { regions: Arc::clone(&regions), checksum, copy_by };
        Self { lane: StreamLane::new(pipe, tx, rx, options), regions, inbox: Inbox::default() }
    }

    pub(crate) fn progress(&self) -> Result<bool, LaneError> {
        self.lane.progress(&self.inbox)
    }

    pub(crate) fn register(&self, span: Span, rights: Rights) -> Region {
        self.register_as(MemoryKind::Host, span, rights)
    }

    pub(crate) fn register_as(&self, kind: MemoryKind, span: Span, rights: Rights) -> Region {
        self.regions.insert_kind(kind, span, rights, None).expect("a region")
    }

    /// Posts an operation on memory that the caller keeps.
    pub(crate) fn post(
        &self,
        kind: OpKind,
        local: Spans,
        remote: RemoteSpans,
        done: &Arc<ResultAndCopy>,
    ) -> Result<OpName, LaneError> {
        self.post_from(MemoryKind::Host, kind, local, remote, done)
    }

    /// The same, on memory of this kind.
    pub(crate) fn post_from(
        &self,
        memory: MemoryKind,
        kind: OpKind,
        local: Spans,
        remote: RemoteSpans,
        done: &Arc<ResultAndCopy>,
    ) -> Result<OpName, LaneError> {
        let done = Arc::clone(done) as Arc<dyn Completion>;
        // SAFETY: the tests keep their memory until both lanes are gone.
        match unsafe { self.lane.post(Operation { kind, local, memory, remote, done }) }? {
            PostOutcome::Pending(name) => Ok(name),
            PostOutcome::Done(result) => panic!("streams answer later, not {result:?}"),
        }
    }

    pub(crate) fn send(&self, bytes: &[u8]) {
        let (a, b) = bytes.split_at(bytes.len() / 2);
        self.lane.send(&[a, b]).expect("a live lane");
    }
}

/// Two sides over a pipe with faults in each direction.
pub(crate) fn sides(seed: u64, a_to_b: Faults, b_to_a: Faults, checksum: [bool; 2]) -> [Side; 2] {
    sides_with_gpus(seed, [a_to_b, b_to_a], checksum, Default::default())
}

/// The same, with copies to and from GPUs that have these faults.
pub(crate) fn sides_with_gpus(
    seed: u64,
    [a_to_b, b_to_a]: [Faults; 2],
    checksum: [bool; 2],
    gpus: [GpuFaults; 2],
) -> [Side; 2] {
    let (a, b) = pair_of(seed, a_to_b, b_to_a).expect("a pair");
    let [gpu_a, gpu_b] = gpus;
    [Side::new(a, checksum[0], gpu_a), Side::new(b, checksum[1], gpu_b)]
}

/// Two sides over a pipe without faults.
pub(crate) fn plain_sides(checksum: bool) -> [Side; 2] {
    sides(0, Faults::default(), Faults::default(), [checksum; 2])
}

/// Makes progress on both sides, asleep whenever there is nothing to do, until `done`. Panics when
/// both sleep and nothing would ever wake them.
pub(crate) fn run_until(
    sides: &[Side; 2],
    mut done: impl FnMut() -> bool,
) -> Result<(), LaneError> {
    while !done() {
        let moved = sides[0].progress()? | sides[1].progress()?;
        if !moved && !done() && sides[0].lane.arm() && sides[1].lane.arm() {
            sleep(sides);
        }
    }
    Ok(())
}

fn sleep(sides: &[Side; 2]) {
    let [a, b] = sides.each_ref().map(|side| side.lane.interest());
    assert!(!a.write && !b.write, "chaos pipes have their own way to show room");
    let mut fds = [a.fd, b.fd].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let wait = Duration::from_secs(5).try_into().expect("a short time");
    assert!(poll(&mut fds, Some(&wait)).expect("polled") > 0, "asleep for ever");
}

/// Memory for one operation: pieces, with bytes between them that must not change.
pub(crate) struct Patch {
    bytes: Box<[u8]>,
    /// Its contents at first.
    pub(crate) before: Vec<u8>,
    pieces: Vec<Range<usize>>,
}

impl Patch {
    pub(crate) fn new(rng: &mut Rng, lens: &[usize]) -> Self {
        let mut pieces = Vec::new();
        let mut at = 0;
        for len in lens {
            at += rng.usize(1..20);
            pieces.push(at..at + len);
            at += len;
        }
        let mut bytes = vec![0; at + rng.usize(1..20)].into_boxed_slice();
        rng.fill(&mut bytes);
        Self { before: bytes.to_vec(), bytes, pieces }
    }

    pub(crate) fn whole(&self) -> Span {
        Span { addr: self.bytes.as_ptr() as usize, len: self.bytes.len() }
    }

    pub(crate) fn spans(&self) -> Spans {
        let base = self.whole().addr;
        self.pieces.iter().map(|p| Span { addr: base + p.start, len: p.len() }).collect()
    }

    /// The pieces as a peer names them.
    pub(crate) fn remote(&self, region: &Region) -> RemoteSpans {
        let named = |span: Span| RemoteSpan {
            addr: span.addr as u64,
            len: span.len as u64,
            ..region.remote()
        };
        self.spans().into_iter().map(named).collect()
    }

    /// Its contents now.
    pub(crate) fn now(&self) -> Vec<u8> {
        copy_of(self.whole())
    }

    /// The pieces of `bytes`, which are those of a whole patch, in one.
    pub(crate) fn pieces_of(&self, bytes: &[u8]) -> Vec<u8> {
        self.pieces.iter().map(|p| &bytes[p.clone()]).collect::<Vec<_>>().concat()
    }

    /// Panics if a byte between the pieces has changed.
    pub(crate) fn assert_guards(&self) {
        let mut now = self.now();
        for piece in &self.pieces {
            now[piece.clone()].copy_from_slice(&self.before[piece.clone()]);
        }
        assert!(now == self.before, "a byte beside the pieces was touched");
    }

    /// Overwrites all of it, as the next owner of freed memory does.
    pub(crate) fn scribble(&mut self, rng: &mut Rng) {
        rng.fill(&mut self.bytes);
    }
}

/// Copies memory that links write to.
pub(crate) fn copy_of(span: Span) -> Vec<u8> {
    let mut out = vec![0; span.len];
    // SAFETY: a patch, which the tests keep until both lanes are gone.
    unsafe { std::ptr::copy_nonoverlapping(span.addr as *const u8, out.as_mut_ptr(), span.len) };
    out
}

/// Records an operation's result, and its destination's contents at that moment.
pub(crate) struct ResultAndCopy {
    watched: Span,
    end: Mutex<Option<(OpResult, Vec<u8>)>>,
}

impl ResultAndCopy {
    pub(crate) fn watching(watched: Span) -> Arc<Self> {
        Arc::new(Self { watched, end: Mutex::new(None) })
    }

    pub(crate) fn result(&self) -> Option<OpResult> {
        self.end.lock().as_ref().map(|end| end.0.clone())
    }

    /// Contents of the destination when the operation ended.
    pub(crate) fn held(&self) -> Vec<u8> {
        self.end.lock().as_ref().expect("it has ended").1.clone()
    }
}

impl Completion for ResultAndCopy {
    fn complete(self: Arc<Self>, result: OpResult) {
        let end = self.end.lock().replace((result, copy_of(self.watched)));
        assert!(end.is_none(), "an operation ends once");
    }
}
