//! Who copies what: this process's CPU, a GPU of ours, or both sides through the rings.

use std::sync::{Arc, atomic::Ordering::*};

use uccl_device::MemoryKind;

use super::{GPU, INLINE, JOB, LocalLane, access_of, job::Job};
use crate::{
    cuda_ipc::Parts,
    lane::{Lane, LaneError, OpError, OpName, Operation, Posted, RemoteSpans, Spans},
    mem::RemoteSpan,
    shm::Reach,
};

/// Who copies.
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
    /// Posts an operation on the way that its memory takes, or on several.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    pub(super) unsafe fn route(&self, op: Operation) -> Result<Posted, LaneError> {
        let (way, apart) = self.ways(op.memory, &op.remote);
        if !apart {
            // SAFETY: the caller's promise.
            return unsafe { self.post_one_way(way, op) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.post_apart(&op) }
    }

    /// The way of the first piece, and whether others go another. Neighbours mostly lie in one region.
    fn ways(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> (Way, bool) {
        let Some(first) = remote.first() else { return (Way::Stream, false) };
        let way = self.way(ours, first);
        let mut last = first;
        let apart = remote.iter().any(|span| {
            let same = (span.slot, span.key) == (last.slot, last.key);
            last = span;
            !same && self.way(ours, span) != way
        });
        (way, apart)
    }

    /// Who copies a piece between memory of this kind and the peer's.
    fn way(&self, ours: MemoryKind, remote: &RemoteSpan) -> Way {
        let on_gpu = ours.device().is_some();
        match self.direct.reach(remote) {
            Reach::Gpu => Way::Gpu,
            Reach::Mapped if on_gpu => Way::GpuToHost,
            Reach::Cma | Reach::Mapped => Way::Direct,
            // What it is shows on the way: a GPU's copy says what is wrong.
            Reach::None if on_gpu => Way::Gpu,
            Reach::None => Way::Stream,
        }
    }

    /// Posts pieces that go different ways as operations of their own.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_apart(&self, op: &Operation) -> Result<Posted, LaneError> {
        let mut parts: Vec<(Way, Spans, RemoteSpans)> = Vec::new();
        for (local, remote) in op.local.iter().zip(&op.remote) {
            let way = self.way(op.memory, remote);
            let at = parts.iter().position(|part| part.0 == way).unwrap_or_else(|| {
                parts.push((way, Spans::new(), RemoteSpans::new()));
                parts.len() - 1
            });
            parts[at].1.push(*local);
            parts[at].2.push(*remote);
        }
        let done = Parts::of(parts.len(), Arc::clone(&op.done));
        for (way, local, remote) in parts {
            let done = Arc::clone(&done);
            let part =
                Operation { kind: op.kind, local, memory: op.memory, remote, done: done.clone() };
            // SAFETY: the caller's promise.
            match unsafe { self.post_one_way(way, part) } {
                Ok(Posted::Pending(_)) => {}
                Ok(Posted::Done(result)) => done.complete(result),
                Err(_) => done.complete(Err(OpError::LaneDown)),
            }
        }
        // It ends with its last part; there is no name to cancel them by.
        Ok(Posted::Pending(OpName(GPU)))
    }

    /// Posts pieces that all go one way.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_one_way(&self, way: Way, op: Operation) -> Result<Posted, LaneError> {
        match way {
            // SAFETY: the caller's promise.
            Way::Gpu | Way::GpuToHost => unsafe { self.post_gpu(op) },
            // SAFETY: the caller's promise.
            Way::Stream => unsafe { self.stream.post(op) },
            // SAFETY: the caller's promise.
            Way::Direct => unsafe { self.post_direct(op) },
        }
    }

    /// Copies what is short right now; threads share the rest.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_direct(&self, op: Operation) -> Result<Posted, LaneError> {
        if self.bell.ended() {
            return Err(LaneError::Ended);
        }
        let len = op.len();
        if len <= INLINE && op.memory.device().is_none() {
            let access = access_of(op.kind);
            // SAFETY: the caller's promise.
            return Ok(Posted::Done(unsafe { self.copy(access, &op.local, &op.remote) }));
        }
        let name = OpName(self.next_job.fetch_add(1, Relaxed) | JOB);
        let job = Arc::new(Job::new(op));
        self.job_bytes.fetch_add(len, Relaxed);
        let mut jobs = self.jobs.lock();
        jobs.push_back((name, job));
        self.open_jobs.store(jobs.len(), Release);
        Ok(Posted::Pending(name))
    }

    /// Has a GPU copy.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn post_gpu(&self, op: Operation) -> Result<Posted, LaneError> {
        if self.bell.ended() {
            return Err(LaneError::Ended);
        }
        // What the peer has just offered may not have been taken in.
        self.bell.listen();
        // SAFETY: the caller's promise.
        Ok(unsafe { self.gpu.post(&self.direct, op, GPU) })
    }
}
