//! The same-host link. The initiator copies directly between the two address spaces. A stream over
//! rings in shared memory carries messages, and the data of memory that cannot be reached directly.

mod bell;
pub mod cma;
pub mod cuda_ipc;
pub mod fdpass;
mod job;
mod jobs;
mod offers;
mod pipe;
mod route;
mod setup;
mod sharing;
pub mod shm;
mod split;
#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Event, Stream},
};
use uccl_fabric::{
    alloc::Shareable,
    lane::{
        Aftermath, Caps, HostLane, Interest, Lane, LaneError, MessageLane, MessageSink, OpError,
        OpKind, OpName, OpResult, Operation, PostOutcome, access_of,
    },
    mem::{Access, RemoteSpan, Span},
    signal::Word,
    status_of,
};
use uccl_stream::StreamLane;
use uccl_wire::{frame::Status, signal::Change};

use self::{
    bell::Bell,
    job::{Chunk, End},
    jobs::Jobs,
    sharing::CopyTimes,
    split::Splits,
};
pub use self::{
    pipe::{ShmPipe, ShmRx, ShmTx},
    setup::{Ends, Invitation, Setup, accept, invite, token_of},
};
use crate::{
    cma::CmaError,
    cuda_ipc::{Bouncers, GpuJobs},
    shm::{Direct, DirectError, Hazards, Reach},
};

/// Bytes. The thread that posts a copy makes it up to this length; several threads may share a
/// longer one.
const INLINE: u64 = 256 << 10;
/// Bytes. Where that is faster, the posting thread makes a copy up to this length; a longer one
/// would hold it up.
const AT_ONCE: u64 = 4 << 20;
/// How long a kill waits for copies under way. They are of a few MiB each at most, and end unless
/// the kernel waits for the peer's pages.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// Names of jobs have this bit; names of stream operations do not.
const JOB: u64 = 1 << 63;
/// Names of copies by GPUs have this bit.
const GPU: u64 = 1 << 62;
/// Names of operations in several parts have both bits.
const SPLIT: u64 = JOB | GPU;

/// A lane to a process of the same host.
pub struct LocalLane {
    stream: StreamLane<ShmPipe>,
    direct: Arc<Direct>,
    bell: Arc<Bell>,
    /// The words in which the peer marks those of our regions that it is accessing.
    peer_hazards: Hazards,
    cma: bool,
    jobs: Arc<Jobs>,
    splits: Arc<Splits>,
    sharing: Arc<CopyTimes>,
    gpu: Arc<GpuJobs>,
    bouncers: Bouncers,
    /// How long a kill waits for copies under way.
    patience: Duration,
}

impl LocalLane {
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

    /// Copies a chunk. Local GPU memory goes through locked host memory.
    ///
    /// # Safety
    /// The local pieces must be valid during the call.
    unsafe fn copy_by_cpu(&self, chunk: &Chunk) -> OpResult {
        let Some(device) = chunk.memory.device() else {
            // SAFETY: the caller's promise.
            return unsafe { self.copy(chunk.access, &chunk.local, &chunk.remote) };
        };
        let there = |host: Span| {
            // SAFETY: the bouncer's buffer.
            unsafe { self.copy(chunk.access, &[host], &chunk.remote) }
        };
        // SAFETY: the caller's promise.
        unsafe { self.bouncers.copy(device, chunk.access, &chunk.local, there) }
    }

    /// Whether all these pieces are memory of GPUs that this process sees.
    fn sees_gpus_of(&self, remote: &[RemoteSpan]) -> bool {
        let mut last: Option<&RemoteSpan> = None;
        remote.iter().all(|span| {
            // The pieces of a vector are mostly in one region.
            let known = last.is_some_and(|last| (last.slot, last.key) == (span.slot, span.key));
            last = Some(span);
            let find = || self.direct.gpu_of(span);
            let opened = || {
                find().or_else(|| {
                    // An offer that the peer has just made may not have been received yet.
                    self.bell.listen();
                    find()
                })
            };
            known || opened().is_some_and(|gpu| gpu.context().is_some_and(|known| known.is_ok()))
        })
    }

    /// Copies one chunk of some job, from the given end; false when there is none. Helpers take
    /// from the back.
    fn copy_chunk(&self, from: End) -> bool {
        let Some(taken) = self.jobs.take(from) else { return false };
        // SAFETY: the memory of an operation stays valid until the operation has ended, and that
        // waits for this chunk.
        let result = unsafe { self.copy_by_cpu(taken.chunk()) };
        taken.copied(result);
        true
    }
}

/// The parts of a killed lane that can still be in use.
struct KilledLane {
    bell: Arc<Bell>,
    hazards: Hazards,
    direct: Arc<Direct>,
    jobs: Arc<Jobs>,
    gpu: Arc<GpuJobs>,
}

impl KilledLane {
    /// Whether the peer has ended its side, or died.
    fn is_peer_gone(&self) -> bool {
        if !self.bell.gone() {
            self.bell.look();
        }
        self.bell.gone()
    }
}

impl Aftermath for KilledLane {
    fn copies(&self) -> bool {
        // A copy by a GPU counts as under way until someone has seen that it has ended.
        self.gpu.drive();
        let copies = !(self.direct.is_idle() && self.jobs.is_idle());
        if !copies {
            // A kill that did not see them end could not.
            self.bell.hang_up();
        }
        copies
    }

    fn touches(&self, slot: u32) -> bool {
        self.copies() || self.hazards.holds(slot) && !self.is_peer_gone()
    }

    fn look(&self) {
        self.gpu.progress();
    }

    fn is_over(&self) -> bool {
        self.is_peer_gone() && !self.copies() && !self.gpu.is_busy()
    }
}

fn op_error(e: DirectError) -> OpError {
    match e {
        DirectError::Refused(e) => OpError::Remote(status_of(e)),
        DirectError::Length { .. } => OpError::Remote(Status::Protocol),
        DirectError::Closed | DirectError::Cma(CmaError::PeerGone) => OpError::LaneDown,
        DirectError::Unmapped => OpError::LocalFault,
        DirectError::Stuck => OpError::Device(e.to_string().into()),
        _ => OpError::Remote(Status::Fault),
    }
}

impl Lane for LocalLane {
    fn caps(&self) -> Caps {
        let link = if self.cma { "cma" } else { "shm" };
        // Rings have a limit, and an operation that goes through them is cut for them.
        let any = usize::MAX;
        Caps { link, ordered: false, max_pieces: any, max_gpu_pieces: any, ..self.stream.caps() }
    }

    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        unsafe { self.route(op) }
    }

    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError> {
        let copied = self.copy_chunk(End::Front) | self.gpu.progress();
        Ok(self.stream.progress(sink)? | copied)
    }

    fn cancel(&self, name: OpName) {
        match name.0 & SPLIT {
            SPLIT => self.splits.parts_of(name).into_iter().for_each(|part| self.cancel(part)),
            JOB => self.jobs.cancel(name),
            // A GPU finishes the copies that it has; their end comes by itself.
            GPU => self.gpu.cancel(OpName(name.0 & !GPU)),
            _ => self.stream.cancel(name),
        }
    }

    fn load(&self) -> u64 {
        self.stream.load() + self.jobs.bytes() + self.gpu.bytes()
    }

    fn has_work(&self) -> bool {
        self.jobs.any_open() || self.gpu.is_busy() || self.stream.has_work()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        self.stream.touched_by_peer(slot) || !self.bell.gone() && self.peer_hazards.holds(slot)
    }

    fn arm(&self) -> bool {
        // No descriptor shows when a GPU has finished: someone must look.
        !self.jobs.any_open() && !self.gpu.is_busy() && self.stream.arm()
    }

    fn interest(&self) -> Interest<'_> {
        Interest { end: self.bell.peers_end(), ..self.stream.interest() }
    }

    fn kill(&self) {
        let until = Instant::now() + self.patience;
        self.jobs.kill(until);
        self.gpu.close();
        // A thread that is posting a copy may have claimed its hazards, but not yet given the copy
        // to the GPU.
        let left = self.direct.close(until, || {
            self.gpu.progress();
        });
        let told = self.gpu.finish(until);
        if !(left && told && self.jobs.is_idle()) {
            // A caller that revokes memory learns of the copy from the aftermath.
            tracing::error!("a copy to or from a peer of this host does not end");
        }
        self.stream.kill();
    }
}

impl MessageLane for LocalLane {
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError> {
        self.stream.send(parts)
    }

    /// Only a write that goes through the rings as a whole can carry a signal.
    fn carries_signal(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool {
        self.is_streamed(ours, remote)
    }

    unsafe fn post_signalled(&self, op: Operation, word: Word) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.post_signalled(op, word) }
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

    fn bye(&self) {
        self.stream.bye();
    }
}

impl HostLane for LocalLane {
    fn path_to(&self, remote: &RemoteSpan) -> &'static str {
        match self.direct.reach(remote) {
            Reach::Mapped => "mapped",
            Reach::Cma => "cma",
            Reach::Gpu => "cuda_ipc",
            Reach::None => self.stream.caps().link,
        }
    }

    fn owner_copies(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> Vec<bool> {
        if ours.device_only().is_none() {
            return Vec::new();
        }
        let mut copies = Vec::new();
        // The pieces of a vector are mostly in one region. The owner checks that each lies inside
        // it.
        let mut last: Option<(&RemoteSpan, bool)> = None;
        for (at, span) in remote.iter().enumerate() {
            let known = last.filter(|(last, _)| (last.slot, last.key) == (span.slot, span.key));
            let locked = match known {
                Some((_, locked)) => locked,
                None => self.direct.is_locked_privately(span),
            };
            last = Some((span, locked));
            if locked {
                copies.resize(remote.len(), false);
                copies[at] = true;
            }
        }
        copies
    }

    fn copies_as_owner(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool {
        ours == MemoryKind::Pinned && self.sees_gpus_of(remote)
    }

    fn lead(&self, ops: &[OpName], stream: &Stream) -> Option<usize> {
        let names: SmallVec<[OpName; 4]> =
            ops.iter().filter(|op| op.0 & GPU != 0).map(|op| OpName(op.0 & !GPU)).collect();
        if names.len() < ops.len() {
            return None;
        }
        self.gpu.lead(&names, stream)
    }

    unsafe fn post_behind(&self, op: Operation, event: &Event) -> Result<OpName, Operation> {
        // SAFETY: the caller's promise.
        unsafe { self.post_gpu_behind(op, event) }
    }

    unsafe fn try_now(&self, kind: OpKind, local: Span, remote: &RemoteSpan) -> Option<OpResult> {
        if local.len as u64 > INLINE || self.bell.ended() {
            return None;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.direct.copy(access_of(kind), &[local], std::slice::from_ref(remote)) } {
            Ok(_) => Some(Ok(())),
            Err(DirectError::Unreachable | DirectError::Closed) => None,
            Err(e) => Some(Err(op_error(e))),
        }
    }

    unsafe fn try_signalled(
        &self,
        local: Span,
        remote: &RemoteSpan,
        word: &RemoteSpan,
        change: Change,
    ) -> Option<OpResult> {
        if local.len as u64 > INLINE || self.bell.ended() {
            return None;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.direct.write_and_signal(&local, remote, word, change) } {
            Ok(done) => done.map(Ok),
            Err(DirectError::Unreachable | DirectError::Closed) => None,
            Err(e) => Some(Err(op_error(e))),
        }
    }

    fn try_signal(&self, word: &RemoteSpan, change: Change) -> Option<OpResult> {
        if self.bell.ended() {
            return None;
        }
        match self.direct.signal(word, change) {
            Ok(changed) => changed.map(Ok),
            Err(DirectError::Unreachable | DirectError::Closed) => None,
            Err(e) => Some(Err(op_error(e))),
        }
    }

    fn is_copied_by_gpu(&self, ours: MemoryKind, remote: &RemoteSpan) -> bool {
        self.is_gpu_way(ours, remote)
    }

    fn signals_by_gpu(&self, ours: MemoryKind, remote: &[RemoteSpan], word: &Word) -> bool {
        self.gpu_signals(ours, remote, word)
    }

    unsafe fn post_signalled_by_gpu(
        &self,
        write: Operation,
        word: Word,
    ) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        unsafe { self.post_gpu(write, Some(word)) }
    }

    fn progress_copies(&self) {
        self.gpu.progress();
    }

    fn is_ours(&self, name: OpName) -> bool {
        match name.0 & SPLIT {
            SPLIT => self.splits.parts_of(name).into_iter().all(|part| self.is_ours(part)),
            JOB | GPU => true,
            // A part that has ended does not wait for the peer.
            _ => !self.stream.has(name),
        }
    }

    fn wants_help(&self) -> bool {
        self.jobs.wants_help()
    }

    fn help(&self) -> bool {
        self.copy_chunk(End::Back)
    }

    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        let (bell, hazards) = (Arc::clone(&self.bell), self.peer_hazards.clone());
        let (direct, jobs) = (Arc::clone(&self.direct), Arc::clone(&self.jobs));
        let gpu = Arc::clone(&self.gpu);
        Some(Box::new(KilledLane { bell, hazards, direct, jobs, gpu }))
    }

    fn offer(&self, memory: &Shareable) {
        self.bell.offer(memory);
    }

    fn retract(&self, id: u32) {
        self.bell.retract(id);
    }
}
