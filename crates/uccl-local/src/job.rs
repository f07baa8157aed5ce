//! Large copies between address spaces, made in chunks by any threads that have time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use uccl_device::MemoryKind;
use uccl_fabric::{
    gpu,
    lane::{Completion, OpError, OpResult, Operation, RemoteSpans, Spans, access_of},
    mem::Access,
    pieces::Stretch,
};

use super::sharing::{CopyThreads, CopyTimes, cost_of};

/// The bytes that one thread copies at a time: enough to be worth taking a chunk, few enough that
/// the threads end together.
const CHUNK: usize = gpu::CHUNK;
/// The most pieces of a chunk, as each costs the kernel something.
pub(super) const CHUNK_PIECES: usize = 64;

/// A copy in progress.
pub(super) struct Job {
    pub(super) threads: CopyThreads,
    access: Access,
    memory: MemoryKind,
    local: Spans,
    remote: RemoteSpans,
    /// See [`cost_of`].
    cost: u64,
    /// Learns how long it took.
    sharing: Option<Arc<CopyTimes>>,
    /// Bytes that all jobs of the lane have yet to copy.
    load: Arc<AtomicU64>,
    state: Mutex<State>,
    idle: Condvar,
}

/// The end of a job from which a chunk is taken. Threads that copy far from each other do not
/// contend for the locks of the same page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    Back,
    Front,
}

struct State {
    /// The rest that has not been given out.
    rest: Stretch,
    /// When the first chunk was given out: until then it waits for earlier jobs.
    begun: Option<Instant>,
    /// Chunks being copied right now.
    active: usize,
    /// Bytes that the load still counts.
    left: u64,
    error: Option<OpError>,
    /// No chunk is given out any more.
    closed: bool,
    done: Option<Arc<dyn Completion>>,
}

/// The part of a job that one thread copies at a time. Its local and remote pieces pair up.
pub(super) struct Chunk {
    pub(super) access: Access,
    /// The kind of the local memory.
    pub(super) memory: MemoryKind,
    pub(super) local: Spans,
    pub(super) remote: RemoteSpans,
}

impl Job {
    /// Local and remote pieces must pair up. `load` counts the bytes that are not copied yet.
    pub(super) fn new(
        op: Operation,
        threads: CopyThreads,
        sharing: Option<Arc<CopyTimes>>,
        load: &Arc<AtomicU64>,
    ) -> Self {
        let len = op.len();
        load.fetch_add(len, Relaxed);
        let cost = cost_of(len, op.remote.len());
        let Operation { kind, local, memory, remote, done } = op;
        let access = access_of(kind);
        let state = State {
            rest: Stretch::all((&local[..], &remote[..])),
            begun: None,
            active: 0,
            left: len,
            error: None,
            closed: false,
            done: Some(done),
        };
        Self {
            threads,
            access,
            memory,
            local,
            remote,
            cost,
            sharing,
            load: Arc::clone(load),
            state: Mutex::new(state),
            idle: Condvar::new(),
        }
    }

    /// The next chunk from one end, for the caller to copy and then to report with
    /// [`Self::copied`].
    pub(super) fn next(&self, from: End) -> Option<Chunk> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        let pieces = (&self.local[..], &self.remote[..]);
        let cut = match from {
            End::Front => state.rest.cut_few(pieces, CHUNK, CHUNK_PIECES),
            End::Back => state.rest.cut_back(pieces, CHUNK, CHUNK_PIECES),
        };
        state.closed = state.rest.is_empty();
        state.active += 1;
        state.begun.get_or_insert_with(Instant::now);
        drop(state);
        let (local, remote) = cut.to_lists(pieces);
        Some(Chunk { access: self.access, memory: self.memory, local, remote })
    }

    /// Whether all of it has been given out.
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Whether it has ended: nobody copies a chunk of it, and nobody will.
    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().done.is_none()
    }

    /// Whether a chunk of it has been given out.
    #[cfg(test)]
    pub(super) fn has_begun(&self) -> bool {
        self.state.lock().begun.is_some()
    }

    /// Reports the end of a chunk of `bytes` bytes.
    pub(super) fn copied(&self, bytes: u64, result: OpResult) {
        let mut state = self.state.lock();
        state.active -= 1;
        state.left -= bytes;
        self.load.fetch_sub(bytes, Relaxed);
        if let Err(e) = result {
            state.error.get_or_insert(e);
            state.closed = true;
        }
        self.settle(state);
    }

    /// Gives out no more chunks; the job ends when those given out are done.
    pub(super) fn close(&self, why: OpError) {
        let mut state = self.state.lock();
        if !state.closed {
            state.error.get_or_insert(why);
            state.closed = true;
        }
        self.settle(state);
    }

    /// Waits until no thread copies a chunk of a closed job. False if one still does at `until`.
    pub(super) fn wait_idle(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        self.idle.wait_while_until(&mut state, |state| state.active > 0, until);
        state.active == 0
    }

    fn settle(&self, mut state: MutexGuard<'_, State>) {
        if !state.closed || state.active > 0 {
            return;
        }
        let Some(done) = state.done.take() else { return };
        // After an error: the bytes that were never given out.
        self.load.fetch_sub(std::mem::take(&mut state.left), Relaxed);
        let result = state.error.take().map_or(Ok(()), Err);
        let begun = state.begun;
        self.idle.notify_all();
        drop(state);
        if let (Ok(()), Some(sharing), Some(begun)) = (&result, &self.sharing, begun) {
            sharing.learn(self.threads, self.cost, begun.elapsed());
        }
        done.complete(result);
    }
}

impl Chunk {
    /// Its length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.local.len_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uccl_fabric::{
        lane::OpKind,
        mem::{RemoteSpan, Span},
    };

    struct IgnoredResult;

    impl Completion for IgnoredResult {
        fn complete(self: Arc<Self>, _: OpResult) {}
    }

    #[test]
    fn chunks_from_both_ends_are_short_enough_and_are_all_of_it() {
        for (count, len) in [(1, 3 * CHUNK + 5), (3 * CHUNK_PIECES + 1, 4096), (5, CHUNK / 2 + 1)] {
            let (addr, key, slot) = (4096, 1, 0);
            let remote = RemoteSpan { addr, len: len as u64, key, slot };
            let op = Operation {
                kind: OpKind::Read,
                local: std::iter::repeat_n(Span { addr: addr as usize, len }, count).collect(),
                memory: MemoryKind::Host,
                remote: std::iter::repeat_n(remote, count).collect(),
                done: Arc::new(IgnoredResult),
            };
            let load = Arc::default();
            let job = Job::new(op, CopyThreads::Many, None, &load);
            let mut ends = [End::Front, End::Back].into_iter().cycle();
            while let Some(chunk) = ends.next().and_then(|end| job.next(end)) {
                assert!(chunk.len() <= CHUNK as u64 && chunk.local.len() <= CHUNK_PIECES);
                assert!(chunk.len() > 0 && !job.has_ended());
                job.copied(chunk.len(), Ok(()));
            }
            assert!(job.has_ended() && load.load(Relaxed) == 0, "{count} pieces");
        }
    }
}
