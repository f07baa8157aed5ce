//! The paths of operations: a copy by this process's CPU or a GPU of ours, or both sides through
//! the rings.

use std::{ops::Range, sync::Arc, time::Instant};

use uccl_device::{MemoryKind, cuda::Event};
use uccl_fabric::{
    lane::{Lane, LaneError, MessageLane, OpError, OpName, Operation, PostOutcome, access_of},
    mem::RemoteSpan,
    pieces::{firsts, group},
    signal::Word,
};

use super::{
    AT_ONCE, GPU, INLINE, JOB, LocalLane,
    job::CHUNK_PIECES,
    sharing::{CopyThreads, cost_of},
};
use crate::{
    cuda_ipc::{GpuJobs, Pieces, PostRequest, batches, batches_of, is_sliced},
    shm::Reach,
};

/// The copier of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// This process's CPU.
    Direct,
    /// A GPU of this process, to or from GPU memory of the peer's.
    Gpu,
    /// A GPU of this process, to or from host memory that it reaches.
    GpuToHost,
    /// Both sides, through the rings.
    Stream,
}

impl LocalLane {
    /// Posts an operation on the path that its memory needs, or in parts on several paths.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    pub(super) unsafe fn route(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        let (way, apart) = self.ways(op.memory, op.remote.regions());
        if !apart {
            // SAFETY: the caller's promise.
            return unsafe { self.post_one_way(way, op) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.post_apart(&op) }
    }

    /// The path of the first piece, and whether another piece needs a different one. `regions` has
    /// a piece of each region.
    fn ways<'a>(
        &self,
        ours: MemoryKind,
        mut regions: impl Iterator<Item = &'a RemoteSpan>,
    ) -> (Way, bool) {
        let Some(first) = regions.next() else { return (Way::Stream, false) };
        let way = self.way(ours, first);
        (way, regions.any(|span| self.way(ours, span) != way))
    }

    /// The copier of a piece between memory of this kind and the peer's.
    fn way(&self, ours: MemoryKind, remote: &RemoteSpan) -> Way {
        let on_gpu = ours.device().is_some();
        match self.direct.reach(remote) {
            Reach::Gpu => Way::Gpu,
            Reach::Mapped if on_gpu => Way::GpuToHost,
            Reach::Cma | Reach::Mapped => Way::Direct,
            Reach::None => Way::Stream,
        }
    }

    /// Whether all of a write goes through the rings, in one operation.
    pub(super) fn is_streamed(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool {
        let is_one = remote.len() <= self.stream.caps().max_pieces;
        is_one
            && self.ways(ours, firsts(remote)) == (Way::Stream, false)
            && self.stream.carries_signal(ours, remote)
    }

    /// Whether a GPU copies such a piece.
    pub(super) fn is_gpu_way(&self, ours: MemoryKind, remote: &RemoteSpan) -> bool {
        matches!(self.way(ours, remote), Way::Gpu | Way::GpuToHost)
    }

    /// Posts pieces that need different paths as separate operations.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_apart(&self, op: &Operation) -> Result<PostOutcome, LaneError> {
        let way_of = |_, remote| self.way(op.memory, &remote);
        let parts = group((&op.local[..], &op.remote[..]), way_of);
        let split = self.splits.begin(parts.len(), &op.done);
        for (way, (local, remote)) in parts {
            let (kind, memory) = (op.kind, op.memory);
            let part = Operation { kind, local, memory, remote, done: split.done() };
            // SAFETY: the caller's promise.
            split.add(unsafe { self.post_one_way(way, part) });
        }
        Ok(split.posted())
    }

    /// Posts pieces that all take one path.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_one_way(&self, way: Way, op: Operation) -> Result<PostOutcome, LaneError> {
        match way {
            // SAFETY: the caller's promise.
            Way::Gpu | Way::GpuToHost => unsafe { self.post_gpu(op, None) },
            // SAFETY: the caller's promise.
            Way::Stream => unsafe { self.post_stream(op) },
            // SAFETY: the caller's promise.
            Way::Direct => unsafe { self.post_direct(op) },
        }
    }

    /// Copies a short operation right now; a longer one becomes a job.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_direct(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        if self.bell.ended() {
            return Err(LaneError::Ended);
        }
        let (len, few) = (op.len(), self.has_few(&op));
        if few && len <= INLINE {
            // SAFETY: the caller's promise.
            return Ok(PostOutcome::Done(unsafe {
                self.copy(access_of(op.kind), &op.local, &op.remote)
            }));
        }
        if op.memory.device().is_some() {
            return self.jobs.post(op, CopyThreads::Many, None, JOB).map(PostOutcome::Pending);
        }
        let cost = cost_of(len, op.remote.len());
        let threads = self.sharing.choose(cost);
        if few && len <= AT_ONCE && threads == CopyThreads::One {
            let started = Instant::now();
            // SAFETY: the caller's promise.
            let copied = unsafe { self.copy(access_of(op.kind), &op.local, &op.remote) };
            if copied.is_ok() {
                self.sharing.learn(threads, cost, started.elapsed());
            }
            return Ok(PostOutcome::Done(copied));
        }
        let sharing = Some(Arc::clone(&self.sharing));
        self.jobs.post(op, threads, sharing, JOB).map(PostOutcome::Pending)
    }

    /// Whether the CPU copies it in few steps: through the kernel, each piece costs as much as some
    /// thousand bytes.
    fn has_few(&self, op: &Operation) -> bool {
        let mapped = |first| self.direct.reach(first) == Reach::Mapped;
        let few = || op.remote.len() <= CHUNK_PIECES || op.remote.first().is_some_and(mapped);
        op.memory.device().is_none() && few()
    }

    /// Whether a GPU that makes all copies of a write changes this word behind them, in one job.
    pub(super) fn gpu_signals(&self, ours: MemoryKind, remote: &[RemoteSpan], word: &Word) -> bool {
        let (way, apart) = self.ways(ours, firsts(remote));
        matches!(way, Way::Gpu | Way::GpuToHost)
            && !apart
            && batches(remote).len() == 1
            && GpuJobs::signals(&self.direct, ours, word)
    }

    /// Makes a GPU copy, and change a signal's word afterwards. Pieces that none of our GPUs
    /// reaches go through the rings, unless a signal follows them.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    pub(super) unsafe fn post_gpu(
        &self,
        op: Operation,
        word: Option<Word>,
    ) -> Result<PostOutcome, LaneError> {
        if self.bell.ended() {
            return Err(LaneError::Ended);
        }
        let in_slices = is_sliced(op.len());
        let Operation { kind, local, memory, remote, done } = op;
        let pieces = Arc::new(Pieces { local, remote });
        let batches = batches_of(&pieces.remote);
        let posting = |range: &Range<usize>, done| {
            let (pieces, range) = (&pieces, range.clone());
            PostRequest { kind, memory, pieces, range, in_slices, word, done }
        };
        if let [all] = &batches[..] {
            // SAFETY: the caller's promise.
            return unsafe { self.launch(&posting(all, &done)) };
        }
        let split = self.splits.begin(batches.len(), &done);
        let done = split.done();
        for range in &batches {
            // SAFETY: the caller's promise.
            split.add(unsafe { self.launch(&posting(range, &done)) });
        }
        Ok(split.posted())
    }

    /// Makes a GPU copy all of an operation, behind an event.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    pub(super) unsafe fn post_gpu_behind(
        &self,
        op: Operation,
        event: &Event,
    ) -> Result<OpName, Operation> {
        let (way, apart) = self.ways(op.memory, op.remote.regions());
        let one = !apart && matches!(way, Way::Gpu | Way::GpuToHost);
        if !one || self.bell.ended() || batches_of(&op.remote).len() != 1 {
            return Err(op);
        }
        let Operation { kind, local, memory, remote, done } = op;
        let (range, pieces) = (0..remote.len(), Arc::new(Pieces { local, remote }));
        let (pieces_of, done_of) = (&pieces, &done);
        let posting = PostRequest {
            kind,
            memory,
            pieces: pieces_of,
            range,
            in_slices: false,
            word: None,
            done: done_of,
        };
        let launch = || {
            // SAFETY: the caller's promise.
            unsafe { self.gpu.post_behind(&self.direct, &posting, event) }
        };
        let launched = launch().or_else(|e| match e {
            OpError::HostOnly(_) => {
                self.bell.listen();
                launch()
            }
            e => Err(e),
        });
        match launched {
            Ok(name) => Ok(OpName(name.0 | GPU)),
            Err(_) => Err(posting.operation()),
        }
    }

    /// Makes a GPU copy some pieces. If memory is missing, receives the peer's latest offers and
    /// tries again.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn launch(&self, posting: &PostRequest<'_>) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        let launch = || unsafe { self.gpu.post(&self.direct, posting) };
        let launched = match launch() {
            Err(OpError::HostOnly(_)) => {
                self.bell.listen();
                launch()
            }
            launched => launched,
        };
        match launched {
            Ok(name) => Ok(PostOutcome::Pending(OpName(name.0 | GPU))),
            // SAFETY: the caller's promise.
            Err(OpError::HostOnly(_)) if posting.word.is_none() => unsafe {
                self.post_stream(posting.operation())
            },
            Err(e) => Ok(PostOutcome::Done(Err(e))),
        }
    }

    /// Sends pieces through the rings, in as many frames as they take.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_stream(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        let (most, count) = (self.stream.caps().max_pieces, op.remote.len());
        if count <= most {
            // SAFETY: the caller's promise.
            return unsafe { self.stream.post(op) };
        }
        let split = self.splits.begin(count.div_ceil(most), &op.done);
        for start in (0..count).step_by(most) {
            let part = op.part(start..count.min(start + most), &split.done());
            // SAFETY: the caller's promise.
            split.add(unsafe { self.stream.post(part) });
        }
        Ok(split.posted())
    }
}
