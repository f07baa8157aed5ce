//! Transfers, which callers poll, wait for and cancel.

mod plan;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::cuda::Signal;
use uccl_fabric::{
    lane::{OpError, OpName},
    mem::Span,
    signal::Word,
};

pub(crate) use self::plan::{After, Fence, Kind, Plan};
use super::Connection;
use crate::{
    drive::{
        contexts::Scope,
        park::Parker,
        regions::Lease,
        timers,
        work::{Kinds, Memory},
    },
    error::{Error, Result},
    ids::TransferId,
    types::{Outcome, Status},
};

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// A transfer that waits for another one to end. Each of the two has it in a list.
pub(in crate::drive) struct Follower {
    pub(in crate::drive) transfer: Arc<Transfer>,
    is_told: AtomicBool,
}

impl Follower {
    /// Whether this call is the first: the other transfer has ended, or this one stops waiting for
    /// it.
    pub(in crate::drive) fn begin_telling(&self) -> bool {
        !self.is_told.swap(true, AcqRel)
    }
}

/// The next step of a transfer that has no operation left.
pub(in crate::drive) struct Step {
    pub(in crate::drive) after: After,
    /// How its operations have ended.
    pub(in crate::drive) verdict: Result<()>,
    pub(in crate::drive) fence: Option<Fence>,
}

/// The threads and transfers that are to be told that a transfer has ended.
pub(in crate::drive) struct Listeners {
    pub(in crate::drive) waiters: SmallVec<[Arc<Parker>; 1]>,
    pub(in crate::drive) followers: Vec<Arc<Follower>>,
}

pub(crate) struct Body {
    result: Option<Result<Outcome>>,
    error: Option<Error>,
    pub(crate) leases: SmallVec<[Lease; 1]>,
    pub(crate) ops: SmallVec<[(u16, OpName); 1]>,
    pub(crate) after: After,
    pub(crate) fence: Option<Fence>,
    pub(crate) fenced_at: Option<Instant>,
    /// Its signal has been sent: only the peer knows whether its word has changed.
    pub(in crate::drive) is_signalling: bool,
    /// For a recv: where its data goes, one span per iov.
    pub(crate) targets: SmallVec<[Span; 1]>,
    waiters: SmallVec<[Arc<Parker>; 1]>,
    /// Signals that CUDA streams wait for, given when the transfer has ended.
    signals: Vec<Signal>,
    /// Transfers that wait for this one.
    followers: Vec<Arc<Follower>>,
    /// One entry for each transfer that this one waits for.
    following: Vec<Arc<Follower>>,
}

impl Body {
    /// Its signal, if that depends on nothing but its own bytes: it waits for no other transfer,
    /// has not failed, and is not being ended.
    fn free_signal(&self) -> Option<Word> {
        let is_free = self.following.is_empty() && self.error.is_none() && self.fence.is_none();
        match self.after {
            After::Signal(word, _) if is_free => Some(word),
            _ => None,
        }
    }
}

/// One transfer.
pub(crate) struct Transfer {
    pub(crate) id: TransferId,
    pub(crate) kind: Kind,
    /// The scope of strong signals that it belongs to.
    pub(crate) context: u32,
    pub(crate) conn: Arc<Connection>,
    state: AtomicU8,
    /// Operations that have not ended, and one for the post itself.
    ops_left: AtomicU32,
    /// Number of [`Hold`]s, which keep it from ending with its connection.
    holds: AtomicU32,
    pub(crate) bytes: AtomicU64,
    /// Numbers a send or a notification on its connection.
    pub(crate) seq: AtomicU64,
    pub(crate) posted: Instant,
    pub(crate) timeout: Option<Duration>,
    /// Set after [`Body::fence`]; can be read without the lock.
    pub(crate) fencing: AtomicBool,
    /// Its data has been moved, but its notification has not been answered.
    pub(crate) notifying: AtomicBool,
    checksummed: AtomicBool,
    pub(crate) body: Mutex<Body>,
}

impl Transfer {
    /// A transfer that is being posted.
    pub(super) fn new(id: TransferId, plan: Plan) -> Self {
        Self {
            id,
            kind: plan.kind,
            context: plan.context,
            conn: plan.conn,
            state: AtomicU8::new(PENDING),
            ops_left: AtomicU32::new(1),
            holds: AtomicU32::new(0),
            bytes: AtomicU64::new(plan.bytes),
            seq: AtomicU64::new(0),
            posted: Instant::now(),
            timeout: plan.timeout,
            fencing: AtomicBool::new(false),
            notifying: AtomicBool::new(false),
            checksummed: AtomicBool::new(false),
            body: Mutex::new(Body {
                result: None,
                error: None,
                leases: plan.leases,
                ops: SmallVec::new(),
                after: plan.after,
                fence: None,
                fenced_at: None,
                is_signalling: false,
                targets: plan.targets,
                signals: Vec::new(),
                followers: Vec::new(),
                following: Vec::new(),
                waiters: SmallVec::new(),
            }),
        }
    }

    pub(crate) fn finished(&self) -> bool {
        self.state.load(Acquire) != PENDING
    }

    pub(crate) fn status(&self) -> Status {
        if !self.finished() {
            return Status::Pending;
        }
        match &self.body.lock().result {
            Some(Ok(outcome)) => Status::Done(*outcome),
            Some(Err(e)) => Status::Failed(e.clone()),
            None => Status::Pending,
        }
    }

    /// Where it has a place in the order of writes.
    pub(super) fn scope(&self) -> Option<Scope> {
        (self.kind == Kind::Write).then_some((Arc::as_ptr(&self.conn) as usize, self.context))
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.posted.checked_add(self.timeout?)
    }

    /// When it must begin to end, so that it has ended by its deadline.
    pub(crate) fn fence_at(&self) -> Option<Instant> {
        Some(self.deadline()? - timers::to_fence(&self.conn.core.config, self.timeout?))
    }

    /// When a peer that does not let it end is given up.
    pub(crate) fn give_up_at(&self) -> Option<Instant> {
        let fenced_at = self.body.lock().fenced_at?;
        Some(fenced_at + timers::to_end(&self.conn.core.config))
    }

    /// Rings `parker` when the transfer ends; false if it has ended already.
    pub(crate) fn watch(&self, parker: &Arc<Parker>) -> bool {
        let mut body = self.body.lock();
        if body.result.is_some() {
            return false;
        }
        if !body.waiters.iter().any(|waiter| Arc::ptr_eq(waiter, parker)) {
            body.waiters.push(Arc::clone(parker));
        }
        true
    }

    pub(crate) fn unwatch(&self, parker: &Arc<Parker>) {
        self.body.lock().waiters.retain(|waiter| !Arc::ptr_eq(waiter, parker));
    }

    /// Keeps a signal until the transfer ends; gives it at once if the transfer has ended.
    pub(crate) fn keep(&self, signal: Signal) {
        let mut body = self.body.lock();
        if body.result.is_none() {
            body.signals.push(signal);
        }
    }

    /// Lets the streams go on that wait for it, if it was called off so long ago that something may
    /// wait for them in turn.
    pub(crate) fn let_streams_go(&self, patience: Duration) {
        let mut body = self.body.lock();
        let is_late = body.fenced_at.is_some_and(|at| at.elapsed() >= patience);
        let signals = if is_late { std::mem::take(&mut body.signals) } else { Vec::new() };
        drop(body);
        drop(signals);
    }

    /// How many operations have not ended.
    pub(crate) fn ops_left(&self) -> u32 {
        self.ops_left.load(Acquire)
    }

    /// Its operations, if nothing but their end is left to wait for.
    pub(crate) fn plain_ops(&self) -> Option<SmallVec<[(u16, OpName); 1]>> {
        let body = self.body.lock();
        let is_plain = matches!(body.after, After::Publish) && body.following.is_empty();
        is_plain.then(|| body.ops.clone())
    }

    /// The signal that may be sent along with its only operation, because nothing else decides
    /// whether the word changes.
    pub(in crate::drive) fn free_signal(&self) -> Option<Word> {
        self.body.lock().free_signal()
    }

    /// Takes the signal out, to be sent along with its only operation. `None`: the signal has to
    /// follow.
    pub(in crate::drive) fn take_signal(&self) -> Option<Word> {
        let mut body = self.body.lock();
        let word = body.free_signal()?;
        if let After::Signal(_, notif) = std::mem::replace(&mut body.after, After::Publish) {
            body.after = After::of(None, notif);
        }
        body.is_signalling = true;
        Some(word)
    }

    /// Takes a signal back that was not sent along: it has to follow.
    pub(in crate::drive) fn return_signal(&self, word: Word) {
        let mut body = self.body.lock();
        let notif = match std::mem::replace(&mut body.after, After::Publish) {
            After::Notify(notif) => Some(notif),
            _ => None,
        };
        body.after = After::of(Some(word), notif);
        body.is_signalling = false;
    }

    /// The kinds of its local memory.
    pub(crate) fn memory(&self) -> Memory {
        let body = self.body.lock();
        let mut kinds = body.leases.iter().map(|lease| lease.mr().kind);
        let first = kinds.next().unwrap_or_default();
        if kinds.all(|kind| kind == first) {
            return Memory::One(first);
        }
        let kinds = body.leases.iter().map(|lease| (lease.mr().span, lease.mr().kind));
        Memory::Several(Kinds(kinds.collect()))
    }

    /// Whether the CPU reaches all of its local memory.
    pub(crate) fn is_host_accessible(&self) -> bool {
        let body = self.body.lock();
        body.leases.iter().all(|lease| lease.mr().kind.is_host_accessible())
    }

    /// The GPUs, each once, that alone reach some of its local memory.
    pub(crate) fn gpus(&self) -> SmallVec<[u32; 1]> {
        let body = self.body.lock();
        let mut gpus = SmallVec::new();
        for gpu in body.leases.iter().filter_map(|lease| lease.mr().kind.device_only()) {
            if !gpus.contains(&gpu) {
                gpus.push(gpu);
            }
        }
        gpus
    }

    /// Keeps it from ending with its connection, because its memory may still be touched.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.holds.fetch_add(1, SeqCst);
        Hold(Arc::clone(self))
    }

    /// The error of a transfer that ends because the peer cannot answer any more. If a fence was
    /// ending it early, the error is the fence's, unless a signal may have changed its word
    /// meanwhile.
    pub(in crate::drive) fn unanswered_error(&self) -> Error {
        let (fence, is_signalling) = {
            let body = self.body.lock();
            (body.fence, body.is_signalling)
        };
        match fence {
            Some(fence) if !is_signalling => self.fence_error(fence),
            _ => self.conn.lost_error(),
        }
    }

    /// Whether it must not end with its connection.
    pub(in crate::drive) fn is_held(&self) -> bool {
        self.holds.load(SeqCst) > 0
    }

    /// Makes it wait for another transfer; `None` if it has ended. Then it would keep itself alive:
    /// nothing takes the follower out again.
    pub(in crate::drive) fn begin_following(self: &Arc<Self>) -> Option<Arc<Follower>> {
        let mut body = self.body.lock();
        if body.result.is_some() {
            return None;
        }
        self.expect_ops(1);
        let follower = Follower { transfer: Arc::clone(self), is_told: AtomicBool::new(false) };
        let follower = Arc::new(follower);
        body.following.push(Arc::clone(&follower));
        Some(follower)
    }

    /// Adds a follower, to be told when this transfer ends. If it has ended, returns whether it has
    /// failed.
    pub(in crate::drive) fn add_follower(&self, follower: &Arc<Follower>) -> Option<bool> {
        let mut body = self.body.lock();
        if let Some(result) = &body.result {
            return Some(result.is_err());
        }
        body.followers.push(Arc::clone(follower));
        None
    }

    /// Takes out the followers by which it waits for other transfers.
    pub(in crate::drive) fn take_following(&self) -> Vec<Arc<Follower>> {
        std::mem::take(&mut self.body.lock().following)
    }

    /// Counts operations that are about to be posted.
    pub(crate) fn expect_ops(&self, n: u32) {
        self.ops_left.fetch_add(n, Relaxed);
    }

    /// Notes a reason to fail; the first one is kept.
    pub(crate) fn note_error(&self, e: Error) {
        self.body.lock().error.get_or_insert(e);
    }

    pub(crate) fn note_checksum(&self, checked: bool) {
        self.checksummed.store(checked, Relaxed);
    }

    /// Counts an operation that has ended (or the post itself). Returns whether none is left.
    pub(in crate::drive) fn count_ended_op(&self) -> bool {
        self.ops_left.fetch_sub(1, AcqRel) == 1
    }

    /// Takes out the next step, once no operation is left.
    pub(in crate::drive) fn take_step(&self) -> Step {
        let mut body = self.body.lock();
        body.ops.clear();
        let after = std::mem::replace(&mut body.after, After::Publish);
        Step { after, verdict: body.error.clone().map_or(Ok(()), Err), fence: body.fence }
    }

    /// The error that the caller sees when an operation failed.
    pub(in crate::drive) fn op_error(&self, e: OpError) -> Error {
        let peer = Arc::clone(&self.conn.peer.name);
        let fence = self.body.lock().fence;
        match (&e, fence) {
            (OpError::Remote(_), _) => Error::RemoteAccess { peer, reason: e.to_string() },
            (OpError::Checksum, _) => Error::Checksum { peer },
            (OpError::Gpu(_) | OpError::HostOnly(_), _) => {
                Error::Gpu { peer, reason: e.to_string() }
            }
            (OpError::LocalFault, _) => Error::LocalMemory(e.to_string()),
            (OpError::Cancelled, Some(fence)) => self.fence_error(fence),
            (OpError::LaneDown, _) => self.unanswered_error(),
            (OpError::Unreachable | OpError::Device(_), _) => {
                Error::Device { peer, reason: e.to_string() }
            }
            (OpError::Cancelled, None) => self.fence_error(Fence::Cancel),
        }
    }

    /// The error that the caller sees when `fence` ended the transfer early.
    pub(crate) fn fence_error(&self, fence: Fence) -> Error {
        match fence {
            Fence::Cancel => Error::Cancelled { by: "the caller".into() },
            Fence::PeerCancel => Error::Cancelled { by: Arc::clone(&self.conn.peer.name) },
            Fence::Deadline => Error::DeadlineExceeded {
                after: self.timeout.unwrap_or_default(),
                peer: Some(Arc::clone(&self.conn.peer.name)),
            },
            Fence::OwnDeadline => {
                Error::DeadlineExceeded { after: self.timeout.unwrap_or_default(), peer: None }
            }
        }
    }

    /// Takes its result, and shows that it has ended; `None` if it has a result already.
    pub(in crate::drive) fn set_result(&self, verdict: Result<()>) -> Option<Listeners> {
        let outcome = Outcome {
            bytes: self.bytes.load(Relaxed),
            checksummed: self.checksummed.load(Relaxed),
        };
        let ok = verdict.is_ok();
        let (listeners, leases, signals) = {
            let mut body = self.body.lock();
            if body.result.is_some() {
                return None;
            }
            body.result = Some(verdict.map(|()| outcome));
            body.targets = SmallVec::new();
            let waiters = std::mem::take(&mut body.waiters);
            let followers = std::mem::take(&mut body.followers);
            (
                Listeners { waiters, followers },
                std::mem::take(&mut body.leases),
                std::mem::take(&mut body.signals),
            )
        };
        // Before anybody can see that it has ended. The caller may then deregister its memory, and
        // a strong signal that follows must not announce bytes that are not there.
        drop(leases);
        drop(signals);
        if !ok && self.kind == Kind::Write {
            self.conn.failed_contexts.note(self.context);
        }
        self.state.store(if ok { DONE } else { FAILED }, Release);
        Some(listeners)
    }
}

/// While this exists, the transfer does not end with its connection.
///
/// Dropping the last hold ends the transfer of a connection that has ended (`drive/steps.rs`).
pub(crate) struct Hold(Arc<Transfer>);

impl Hold {
    pub(crate) fn transfer(&self) -> &Arc<Transfer> {
        &self.0
    }

    /// Counts it out. Returns whether no other holds the transfer.
    pub(in crate::drive) fn count_out(&self) -> bool {
        self.0.holds.fetch_sub(1, SeqCst) == 1
    }
}

#[cfg(test)]
pub(super) mod tests;
