//! The jobs of one lane. Each is kept until the last thread has finished with it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::Instant,
};

use parking_lot::Mutex;
use uccl_fabric::lane::{LaneError, OpError, OpName, OpResult, Operation};

use super::{
    job::{Chunk, End, Job},
    sharing::{CopyThreads, CopyTimes},
};

/// Copies that have not ended.
#[derive(Default)]
pub(super) struct Jobs {
    list: Mutex<List>,
    /// How many jobs have chunks that no thread has taken yet.
    open: AtomicUsize,
    /// Whether threads may share the next job.
    helpable: AtomicBool,
    /// Bytes to be copied.
    load: Arc<AtomicU64>,
}

#[derive(Default)]
struct List {
    /// Jobs with chunks that no thread has taken yet, the oldest first.
    open: VecDeque<NamedJob>,
    /// Jobs that are wholly given out: threads are copying the last chunks.
    given_out: Vec<NamedJob>,
    /// How many there have been.
    count: u64,
    /// There will be no more.
    closed: bool,
}

#[derive(Clone)]
struct NamedJob {
    name: OpName,
    job: Arc<Job>,
}

/// A chunk that a thread is copying. Its drop reports the result.
pub(super) struct ChunkCopy<'a> {
    jobs: &'a Jobs,
    of: NamedJob,
    chunk: Chunk,
    result: OpResult,
}

impl ChunkCopy<'_> {
    /// The memory to copy.
    pub(super) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// The chunk has been copied, or could not be.
    pub(super) fn copied(mut self, result: OpResult) {
        self.result = result;
    }
}

impl Drop for ChunkCopy<'_> {
    fn drop(&mut self) {
        // This also runs when the thread panicked in the copy.
        let result = std::mem::replace(&mut self.result, Ok(()));
        self.of.job.copied(self.chunk.len(), result);
        self.jobs.forget_ended(&self.of);
    }
}

impl Jobs {
    /// Queues an operation for the threads that make progress, and for others that have time.
    /// `sharing` learns how long the copy took, without the time that it waited for others. Its
    /// name has the bits of `mark`.
    pub(super) fn post(
        &self,
        op: Operation,
        threads: CopyThreads,
        sharing: Option<Arc<CopyTimes>>,
        mark: u64,
    ) -> Result<OpName, LaneError> {
        let mut list = self.list.lock();
        if list.closed {
            return Err(LaneError::Killed);
        }
        let name = OpName(list.count | mark);
        list.count += 1;
        let job = Arc::new(Job::new(op, threads, sharing, &self.load));
        list.open.push_back(NamedJob { name, job });
        self.announce(&list);
        Ok(name)
    }

    /// The next chunk of the oldest open job, from the given end. Helpers take from the back.
    pub(super) fn take(&self, from: End) -> Option<ChunkCopy<'_>> {
        if !self.any_open() {
            return None;
        }
        let mut list = self.list.lock();
        loop {
            let of = list.open.front()?.clone();
            if from == End::Back && of.job.threads == CopyThreads::One {
                return None;
            }
            let chunk = of.job.next(from);
            if of.job.is_closed() {
                list.open.pop_front();
                list.keep_until_ended(of.clone());
                self.announce(&list);
            }
            if let Some(chunk) = chunk {
                return Some(ChunkCopy { jobs: self, of, chunk, result: Err(OpError::LocalFault) });
            }
        }
    }

    /// Gives out no more chunks of a job. The job ends when the chunks that threads have are
    /// copied.
    pub(super) fn cancel(&self, name: OpName) {
        let found = {
            let mut list = self.list.lock();
            let at = list.open.iter().position(|other| other.name == name);
            let found = at.and_then(|at| list.open.remove(at));
            list.given_out.extend(found.clone());
            self.announce(&list);
            found
        };
        if let Some(found) = found {
            found.job.close(OpError::Cancelled);
            self.forget_ended(&found);
        }
    }

    /// Ends all jobs and accepts no more. When this returns, no thread copies a chunk, unless it is
    /// past `until`: see [`is_idle`](Self::is_idle).
    pub(super) fn kill(&self, until: Instant) {
        let left = {
            let mut list = self.list.lock();
            list.closed = true;
            let List { open, given_out, .. } = &mut *list;
            given_out.extend(open.drain(..));
            self.announce(&list);
            list.given_out.clone()
        };
        left.iter().for_each(|left| left.job.close(OpError::LaneDown));
        for left in &left {
            if left.job.wait_idle(until) {
                self.forget_ended(left);
            }
        }
    }

    /// Whether no thread copies a chunk. Once killed, it stays so.
    pub(super) fn is_idle(&self) -> bool {
        let list = self.list.lock();
        list.open.is_empty() && list.given_out.is_empty()
    }

    /// Whether there are chunks that nobody has taken yet.
    pub(super) fn any_open(&self) -> bool {
        self.open.load(Acquire) > 0
    }

    /// Whether other threads could take part, beside the one that makes progress.
    pub(super) fn wants_help(&self) -> bool {
        self.helpable.load(Acquire)
    }

    /// Bytes to be copied.
    pub(super) fn bytes(&self) -> u64 {
        self.load.load(Relaxed)
    }

    /// Publishes how many jobs are open, after a change to the list.
    fn announce(&self, list: &List) {
        let shared = list.open.front().is_some_and(|first| first.job.threads == CopyThreads::Many);
        self.open.store(list.open.len(), Release);
        self.helpable.store(shared, Release);
    }

    fn forget_ended(&self, of: &NamedJob) {
        if of.job.has_ended() {
            let mut list = self.list.lock();
            list.given_out.retain(|other| other.name != of.name);
            // It may have ended by an error before all was given out.
            list.open.retain(|other| other.name != of.name);
            self.announce(&list);
        }
    }
}

impl List {
    /// The thread that ends the job looks for it here afterwards, under the lock that the caller
    /// holds now.
    fn keep_until_ended(&mut self, named: NamedJob) {
        if !named.job.has_ended() {
            self.given_out.push(named);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use uccl_device::MemoryKind;

    use super::*;
    use uccl_fabric::{
        gpu::CHUNK,
        lane::{Completion, OpKind},
        mem::{RemoteSpan, Span},
    };

    /// How long the tests watch that a call that must wait does not return.
    ///
    const WATCH: Duration = Duration::from_millis(100);
    const PATIENCE: Duration = Duration::from_secs(20);

    struct ResultSender(mpsc::Sender<OpResult>);

    impl Completion for ResultSender {
        fn complete(self: Arc<Self>, result: OpResult) {
            self.0.send(result).unwrap();
        }
    }

    /// Posts a job of this many chunks. The tests do not access its addresses.
    fn post(jobs: &Jobs, chunks: usize) -> (OpName, mpsc::Receiver<OpResult>) {
        let (sender, results) = mpsc::channel();
        let len = chunks * CHUNK;
        let op = Operation {
            kind: OpKind::Write,
            local: [Span { addr: 0, len }].into(),
            memory: MemoryKind::Host,
            remote: [RemoteSpan { addr: 0, len: len as u64, key: 0, slot: 0 }].into(),
            done: Arc::new(ResultSender(sender)),
        };
        (jobs.post(op, CopyThreads::Many, None, 0).unwrap(), results)
    }

    #[test]
    fn a_kill_waits_for_chunks_of_jobs_that_are_wholly_given_out() {
        let jobs = Jobs::default();
        let (_, sender) = post(&jobs, 2);
        let held = [End::Front, End::Back].map(|end| jobs.take(end).unwrap());
        assert!(!jobs.any_open() && jobs.take(End::Front).is_none());
        thread::scope(|scope| {
            let killed = scope.spawn(|| jobs.kill(Instant::now() + PATIENCE));
            for chunk in held {
                thread::sleep(WATCH);
                assert!(!killed.is_finished(), "while a thread copies");
                chunk.copied(Ok(()));
            }
        });
        assert_eq!(sender.recv_timeout(PATIENCE), Ok(Ok(())));
        assert!(jobs.list.lock().given_out.is_empty());
        assert_eq!(jobs.bytes(), 0);
    }

    #[test]
    fn a_kill_ends_the_copies_that_are_left_and_takes_no_more() {
        let jobs = Jobs::default();
        let ((_, first), (_, second)) = (post(&jobs, 3), post(&jobs, 1));
        let held = jobs.take(End::Front).unwrap();
        thread::scope(|scope| {
            let killed = scope.spawn(|| jobs.kill(Instant::now() + PATIENCE));
            assert_eq!(second.recv_timeout(PATIENCE), Ok(Err(OpError::LaneDown)));
            thread::sleep(WATCH);
            assert!(!killed.is_finished() && first.try_recv().is_err());
            held.copied(Ok(()));
        });
        assert_eq!(first.recv_timeout(PATIENCE), Ok(Err(OpError::LaneDown)));
        let op = Operation {
            kind: OpKind::Read,
            local: Default::default(),
            memory: MemoryKind::Host,
            remote: Default::default(),
            done: Arc::new(ResultSender(mpsc::channel().0)),
        };
        let refused = jobs.post(op, CopyThreads::Many, None, 0);
        assert!(matches!(refused, Err(LaneError::Killed)));
        assert_eq!(jobs.bytes(), 0);
    }

    #[test]
    fn a_kill_does_not_wait_for_ever_and_tells() {
        let jobs = Jobs::default();
        let (_, sender) = post(&jobs, 2);
        let stuck = jobs.take(End::Front).unwrap();
        jobs.kill(Instant::now() + Duration::from_millis(20));
        assert!(!jobs.is_idle() && sender.try_recv().is_err());
        stuck.copied(Ok(()));
        assert!(jobs.is_idle());
        assert_eq!(sender.try_recv(), Ok(Err(OpError::LaneDown)));
    }

    #[test]
    fn a_cancelled_job_ends_with_its_last_chunk() {
        let jobs = Jobs::default();
        let (name, sender) = post(&jobs, 3);
        let held = jobs.take(End::Back).unwrap();
        jobs.cancel(name);
        assert!(sender.try_recv().is_err() && jobs.take(End::Front).is_none());
        held.copied(Ok(()));
        assert_eq!(sender.try_recv(), Ok(Err(OpError::Cancelled)));
        let (wholly_given_out, sender) = post(&jobs, 1);
        let held = jobs.take(End::Back).unwrap();
        jobs.cancel(wholly_given_out);
        held.copied(Ok(()));
        assert_eq!(sender.try_recv(), Ok(Ok(())), "all of it was copied");
        assert!(jobs.list.lock().given_out.is_empty());
    }

    #[test]
    fn the_time_that_a_copy_waits_for_others_is_not_learned() {
        let jobs = Jobs::default();
        let (_, first) = post(&jobs, 1);
        let _second = post(&jobs, 1);
        let begun = |jobs: &Jobs| {
            let list = jobs.list.lock();
            list.open.iter().map(|open| open.job.has_begun()).collect::<Vec<_>>()
        };
        assert_eq!(begun(&jobs), [false, false], "both wait");
        jobs.take(End::Front).unwrap().copied(Ok(()));
        assert_eq!(first.try_recv(), Ok(Ok(())));
        assert_eq!(begun(&jobs), [false], "the second still waits");
        let taken = jobs.take(End::Front).unwrap();
        assert!(taken.of.job.has_begun());
        taken.copied(Ok(()));
    }

    #[test]
    fn a_copy_that_ends_early_leaves_no_load_behind() {
        let jobs = Jobs::default();
        let (cancelled, sender) = post(&jobs, 3);
        jobs.take(End::Back).unwrap().copied(Ok(()));
        assert_eq!(jobs.bytes(), 2 * CHUNK as u64);
        jobs.cancel(cancelled);
        assert_eq!((sender.try_recv(), jobs.bytes()), (Ok(Err(OpError::Cancelled)), 0));
        let (_, sender) = post(&jobs, 3);
        jobs.take(End::Front).unwrap().copied(Err(OpError::Checksum));
        assert_eq!((sender.try_recv(), jobs.bytes()), (Ok(Err(OpError::Checksum)), 0));
        let (_, sender) = post(&jobs, 1);
        // The thread that copies panics.
        drop(jobs.take(End::Front).unwrap());
        assert_eq!((sender.try_recv(), jobs.bytes()), (Ok(Err(OpError::LocalFault)), 0));
        assert!(jobs.list.lock().open.is_empty() && jobs.list.lock().given_out.is_empty());
    }
}
