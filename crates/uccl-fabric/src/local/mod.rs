//! Same-host memory: one copy between two address spaces, on the initiator's side, and a stream over
//! rings in shared memory for messages and for what cannot be reached directly.

mod bell;
mod job;
mod pipe;
mod setup;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::*},
    },
};

use parking_lot::Mutex;
use uccl_wire::frame::Status;

use self::{
    bell::Bell,
    job::{End, Job},
};
pub use self::{
    pipe::{ShmPipe, ShmRx, ShmTx},
    setup::{Ends, Invitation, Setup, accept, invite, token_of},
};
use crate::{
    alloc::Shareable,
    cma::CmaError,
    cuda_ipc::GpuJobs,
    lane::{
        Aftermath, Caps, Interest, Lane, LaneError, MessageSink, OpError, OpKind, OpName, OpResult,
        Operation, Posted,
    },
    mem::{Access, RemoteSpan, Span},
    shm::{Direct, DirectError, Hazards, Reach},
    status_of,
    stream::StreamLane,
};

/// Up to here a copy is made by whoever posts it; beyond, several threads share it.
const INLINE: u64 = 256 << 10;
/// Names of jobs have this bit; names of stream operations do not.
const JOB: u64 = 1 << 63;
/// Names of copies by GPUs.
const GPU: u64 = 1 << 62;

/// A lane to a process of the same host.
pub struct LocalLane {
    stream: StreamLane<ShmPipe>,
    direct: Arc<Direct>,
    bell: Arc<Bell>,
    /// Where the peer says which of our regions it is touching.
    peer_hazards: Hazards,
    cma: bool,
    jobs: Mutex<VecDeque<(OpName, Arc<Job>)>>,
    open_jobs: AtomicUsize,
    next_job: AtomicU64,
    job_bytes: AtomicU64,
    gpu: GpuJobs,
}

impl LocalLane {
    /// Who copies: a GPU, this process, or the peer too.
    fn way(&self, op: &Operation) -> Way {
        if op.memory.device().is_some() {
            return Way::Gpu;
        }
        let mut way = Way::Direct;
        for span in &op.remote {
            match self.direct.reach(span) {
                Reach::Gpu => return Way::Gpu,
                Reach::None => way = Way::Stream,
                Reach::Cma | Reach::Mapped => {}
            }
        }
        way
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

    /// Copies right now.
    ///
    /// # Safety
    /// The local pieces must be valid during the call.
    unsafe fn copy(&self, access: Access, local: &[Span], remote: &[RemoteSpan]) -> OpResult {
        // SAFETY: the caller's promise.
        match unsafe { self.direct.copy(access, local, remote) } {
            Ok(_) => Ok(()),
            Err(e) => Err(op_error(e)),
        }
    }

    /// Copies one chunk of some job, from the end given; false when there is none.
    fn copy_chunk(&self, from: End) -> bool {
        if self.open_jobs.load(Acquire) == 0 {
            return false;
        }
        let (job, chunk) = {
            let mut jobs = self.jobs.lock();
            let Some((_, job)) = jobs.front() else { return false };
            let job = Arc::clone(job);
            let chunk = job.next(from);
            if job.is_closed() {
                jobs.pop_front();
                self.open_jobs.store(jobs.len(), Release);
            }
            (job, chunk)
        };
        let Some(chunk) = chunk else { return true };
        // SAFETY: the memory of an operation stays valid until it has ended, which this chunk is awaited
        // for.
        let result = unsafe { self.copy(chunk.access, &chunk.local, &chunk.remote) };
        let bytes: usize = chunk.local.iter().map(|span| span.len).sum();
        self.job_bytes.fetch_sub(bytes as u64, Relaxed);
        job.copied(result);
        true
    }
}

/// Who copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// This process's CPU.
    Direct,
    /// A GPU of this process.
    Gpu,
    /// Both sides, through the rings.
    Stream,
}

/// What is left of a lane that was killed here.
struct PeerLeft {
    bell: Arc<Bell>,
    hazards: Hazards,
}

impl Aftermath for PeerLeft {
    fn touches(&self, slot: u32) -> bool {
        self.hazards.holds(slot) && !self.is_over()
    }

    fn is_over(&self) -> bool {
        if !self.bell.gone() {
            self.bell.listen();
        }
        self.bell.gone()
    }
}

fn op_error(e: DirectError) -> OpError {
    match e {
        DirectError::Refused(e) => OpError::Remote(status_of(e)),
        DirectError::Length { .. } => OpError::Remote(Status::Protocol),
        DirectError::Cma(CmaError::PeerGone) => OpError::LaneDown,
        _ => OpError::Remote(Status::Fault),
    }
}

fn access_of(kind: OpKind) -> Access {
    match kind {
        OpKind::Read => Access::Read,
        OpKind::Write => Access::Write,
    }
}

impl Lane for LocalLane {
    fn caps(&self) -> Caps {
        Caps { link: if self.cma { "cma" } else { "shm" }, ordered: false, ..self.stream.caps() }
    }

    fn path_to(&self, remote: &RemoteSpan) -> &'static str {
        match self.direct.reach(remote) {
            Reach::Mapped => "mapped",
            Reach::Cma => "cma",
            Reach::Gpu => "cuda_ipc",
            Reach::None => self.stream.caps().link,
        }
    }

    unsafe fn post(&self, op: Operation) -> Result<Posted, LaneError> {
        match self.way(&op) {
            // SAFETY: the caller's promise.
            Way::Gpu => return unsafe { self.post_gpu(op) },
            // SAFETY: the caller's promise.
            Way::Stream => return unsafe { self.stream.post(op) },
            Way::Direct => {}
        }
        if self.bell.ended() {
            return Err(LaneError::Ended);
        }
        let access = access_of(op.kind);
        let len = op.len();
        if len <= INLINE {
            // SAFETY: the caller's promise.
            return Ok(Posted::Done(unsafe { self.copy(access, &op.local, &op.remote) }));
        }
        let name = OpName(self.next_job.fetch_add(1, Relaxed) | JOB);
        let job = Arc::new(Job::new(access, op.local, op.remote, op.done));
        self.job_bytes.fetch_add(len, Relaxed);
        let mut jobs = self.jobs.lock();
        jobs.push_back((name, job));
        self.open_jobs.store(jobs.len(), Release);
        Ok(Posted::Pending(name))
    }

    unsafe fn try_now(&self, kind: OpKind, local: Span, remote: &RemoteSpan) -> Option<OpResult> {
        if local.len as u64 > INLINE || self.bell.ended() {
            return None;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.direct.copy(access_of(kind), &[local], std::slice::from_ref(remote)) } {
            Ok(_) => Some(Ok(())),
            Err(DirectError::Device | DirectError::Unreachable) => None,
            Err(e) => Some(Err(op_error(e))),
        }
    }

    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError> {
        self.stream.send(parts)
    }

    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError> {
        let copied = self.copy_chunk(End::Front) | self.gpu.progress();
        Ok(self.stream.progress(sink)? | copied)
    }

    fn help(&self) -> bool {
        self.copy_chunk(End::Back)
    }

    fn wants_help(&self) -> bool {
        self.open_jobs.load(Acquire) > 0
    }

    fn cancel(&self, name: OpName) {
        if name.0 & GPU != 0 {
            // What a GPU has been told to copy it copies; its end comes by itself.
            return;
        }
        if name.0 & JOB == 0 {
            return self.stream.cancel(name);
        }
        let job = {
            let mut jobs = self.jobs.lock();
            let at = jobs.iter().position(|(other, _)| *other == name);
            let job = at.and_then(|at| jobs.remove(at));
            self.open_jobs.store(jobs.len(), Release);
            job
        };
        if let Some((_, job)) = job {
            job.close(OpError::Cancelled);
        }
    }

    fn load(&self) -> u64 {
        self.stream.load() + self.job_bytes.load(Relaxed) + self.gpu.bytes()
    }

    fn queued_bytes(&self) -> usize {
        self.stream.queued_bytes()
    }

    fn last_heard_ms(&self) -> u64 {
        self.stream.last_heard_ms()
    }

    fn ping(&self) -> Result<(), LaneError> {
        self.stream.ping()
    }

    fn has_work(&self) -> bool {
        self.wants_help() || self.gpu.is_busy() || self.stream.has_work()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        !self.bell.gone() && self.peer_hazards.holds(slot)
    }

    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        let (bell, hazards) = (Arc::clone(&self.bell), self.peer_hazards.clone());
        Some(Box::new(PeerLeft { bell, hazards }))
    }

    fn offer(&self, memory: &Shareable) {
        self.bell.offer(memory);
    }

    fn retract(&self, id: u32) {
        self.bell.retract(id);
    }

    fn arm(&self) -> bool {
        // Nothing shows when a GPU has done its work: it is looked at.
        !self.wants_help() && !self.gpu.is_busy() && self.stream.arm()
    }

    fn interest(&self) -> Interest<'_> {
        self.stream.interest()
    }

    fn bye(&self) {
        self.stream.bye();
    }

    fn kill(&self) {
        let jobs: Vec<_> = {
            let mut jobs = self.jobs.lock();
            self.open_jobs.store(0, Release);
            jobs.drain(..).collect()
        };
        for (_, job) in jobs {
            job.close(OpError::LaneDown);
            job.wait_idle();
        }
        self.gpu.finish();
        self.direct.close();
        self.stream.kill();
    }
}
