//! Transfers, which callers poll, wait for and cancel.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;
use uccl_device::cuda::Signal;
use uccl_fabric::{
    lane::{OpError, OpName},
    mem::Span,
    signal::Word,
};

use super::Connection;
use crate::{
    drive::{
        contexts::{Contexts, Scope},
        park::Parker,
        payload::Payload,
        regions::Lease,
        timers,
        work::{Kinds, Memory},
    },
    error::{Error, Result},
    ids::TransferId,
    types::{Op, Outcome, Status},
};

/// Most transfers that may be unfinished at a time.
pub(crate) const MAX_PENDING: usize = 65_536;
/// Finished transfers that are kept with their results, for callers that ask again.
pub(crate) const KEPT: usize = 16_384;

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The kind of a transfer. It decides how the transfer ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A copy that the peer asked this process to make.
    PeerCopy,
    /// The fetch of a notification's payload from the peer that sent it; no caller here asked for
    /// it.
    Fetch,
    /// The peer is asked for its published regions, on the way to a caller's read or write.
    LookUp,
    Notif,
    Read,
    Recv,
    Send,
    Write,
}

impl Kind {
    /// Whether a caller of this process started it. The peer caused the other kinds; a look-up is a
    /// part of a caller's transfer.
    pub(crate) fn is_callers(self) -> bool {
        !matches!(self, Self::PeerCopy | Self::Fetch | Self::LookUp)
    }

    /// The operation that the caller asked for; `None` for a notification, and where there is no
    /// caller.
    pub(crate) fn op(self) -> Option<Op> {
        match self {
            Self::PeerCopy | Self::Fetch | Self::LookUp | Self::Notif => None,
            Self::Read => Some(Op::Read),
            Self::Recv => Some(Op::Recv),
            Self::Send => Some(Op::Send),
            Self::Write => Some(Op::Write),
        }
    }
}

impl From<Op> for Kind {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Recv => Self::Recv,
            Op::Send => Self::Send,
            Op::Write => Self::Write,
        }
    }
}

/// Takes the fetched payload of the notification of this number; `None`: it could not be fetched.
/// It fetches the next notification, by a transfer of its own: so it is given from above.
pub(crate) type TakeNotif = fn(&Arc<Connection>, u64, Option<Payload>);

/// The step that follows when all operations have ended.
pub(crate) enum After {
    /// Publish the result.
    Publish,
    /// Send a notification, and wait until it has arrived.
    Notify(Vec<u8>),
    /// Change a word of the peer's memory, then send the notification, if there is one.
    Signal(Word, Option<Vec<u8>>),
    /// Tell the peer how the receive of its send of this number has ended.
    Fin(u64),
    /// Tell the peer how the copy for its ask of this number has ended.
    Answer(u64),
    /// Hand over the payload of this notification, after it was fetched.
    Deliver { id: u64, payload: Payload, to: TakeNotif },
}

impl After {
    /// Changes the word if there is one, then sends the notification if there is one.
    pub(crate) fn of(word: Option<Word>, notif: Option<Vec<u8>>) -> Self {
        match (word, notif) {
            (Some(word), notif) => Self::Signal(word, notif),
            (None, Some(notif)) => Self::Notify(notif),
            (None, None) => Self::Publish,
        }
    }
}

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
pub(in crate::drive) struct NextStep {
    pub(in crate::drive) after: After,
    /// How its operations have ended.
    pub(in crate::drive) verdict: Result<()>,
    pub(in crate::drive) fence: Option<Fence>,
}

/// The threads and transfers that are to be told that a transfer has ended.
pub(in crate::drive) struct ToTell {
    pub(in crate::drive) waiters: SmallVec<[Arc<Parker>; 1]>,
    pub(in crate::drive) followers: Vec<Arc<Follower>>,
}

/// Why a transfer is being ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fence {
    Cancel,
    /// Its deadline is near, and the peer still has something to do for it.
    Deadline,
    /// Its deadline is near, and only copies that this process makes are left.
    OwnDeadline,
    PeerCancel,
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
    fn scope(&self) -> Option<Scope> {
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
    pub(in crate::drive) fn take_step(&self) -> NextStep {
        let mut body = self.body.lock();
        body.ops.clear();
        let after = std::mem::replace(&mut body.after, After::Publish);
        NextStep { after, verdict: body.error.clone().map_or(Ok(()), Err), fence: body.fence }
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
    pub(in crate::drive) fn set_result(&self, verdict: Result<()>) -> Option<ToTell> {
        let outcome = Outcome {
            bytes: self.bytes.load(Relaxed),
            checksummed: self.checksummed.load(Relaxed),
        };
        let ok = verdict.is_ok();
        let (to_tell, leases, signals) = {
            let mut body = self.body.lock();
            if body.result.is_some() {
                return None;
            }
            body.result = Some(verdict.map(|()| outcome));
            body.targets = SmallVec::new();
            let waiters = std::mem::take(&mut body.waiters);
            let followers = std::mem::take(&mut body.followers);
            (
                ToTell { waiters, followers },
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
        Some(to_tell)
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

/// The parameters of a new transfer.
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) context: u32,
    pub(crate) conn: Arc<Connection>,
    pub(crate) bytes: u64,
    pub(crate) timeout: Option<Duration>,
    pub(crate) leases: SmallVec<[Lease; 1]>,
    pub(crate) after: After,
    pub(crate) targets: SmallVec<[Span; 1]>,
}

/// Transfers by id: the unfinished ones, and the results of those that finished not long ago.
pub(crate) struct Transfers {
    inner: Mutex<Inner>,
    pub(crate) pending: AtomicUsize,
}

/// The writes that a strong signal follows.
pub(crate) type Earlier = Vec<Arc<Transfer>>;
/// A transfer, and the writes that it follows.
type InOrder = (Arc<Transfer>, Earlier);

/// Room for a transfer in the list. It is given back when this is dropped, unless a transfer has
/// taken it.
pub(crate) struct Room<'a>(&'a AtomicUsize);

impl Room<'_> {
    /// A transfer takes it, and gives it back when it ends.
    fn take(self) {
        std::mem::forget(self);
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

enum Slot {
    Ended(TransferId, Status),
    Live(Arc<Transfer>),
}

/// A transfer that was looked up by its id.
pub(crate) enum Found {
    /// It has ended; only its result is kept.
    Ended(Status),
    /// It may not have ended.
    Live(Arc<Transfer>),
}

struct Inner {
    slots: Slab<Slot>,
    contexts: Contexts,
    kept: VecDeque<usize>,
    generation: u32,
}

impl Transfers {
    pub(crate) fn new() -> Self {
        let inner = Inner {
            slots: Slab::new(),
            contexts: Contexts::default(),
            kept: VecDeque::new(),
            generation: 0,
        };
        Self { inner: Mutex::new(inner), pending: AtomicUsize::new(0) }
    }

    /// Room for one transfer, unless too many are unfinished.
    pub(crate) fn room(&self) -> Result<Room<'_>> {
        if self.pending.fetch_add(1, AcqRel) >= MAX_PENDING {
            self.pending.fetch_sub(1, AcqRel);
            return Err(Error::Full {
                what: "the endpoint's list of transfers",
                limit: MAX_PENDING,
            });
        }
        Ok(Room(&self.pending))
    }

    /// Makes a transfer, unless too many are unfinished.
    pub(crate) fn insert(&self, plan: Plan) -> Result<Arc<Transfer>> {
        Ok(self.insert_in(self.room()?, plan))
    }

    /// Makes a transfer for which there is room.
    pub(crate) fn insert_in(&self, room: Room<'_>, plan: Plan) -> Arc<Transfer> {
        let (transfer, _) = self.insert_in_order(room, plan, false);
        transfer
    }

    /// Makes a transfer with a strong signal, as [`insert`](Self::insert) does. It must follow the
    /// writes that are returned.
    pub(crate) fn insert_strong(&self, plan: Plan) -> Result<InOrder> {
        Ok(self.insert_in_order(self.room()?, plan, true))
    }

    fn insert_in_order(&self, room: Room<'_>, plan: Plan, is_strong: bool) -> InOrder {
        room.take();
        let mut inner = self.inner.lock();
        let Inner { slots, contexts, generation, .. } = &mut *inner;
        *generation = generation.wrapping_add(1).max(1);
        let entry = slots.vacant_entry();
        let id = TransferId(u64::from(*generation) << 32 | entry.key() as u64);
        let transfer = Arc::new(Transfer {
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
        });
        entry.insert(Slot::Live(Arc::clone(&transfer)));
        let Some(scope) = transfer.scope() else { return (transfer, Vec::new()) };
        contexts.push(scope, index(id) as u32, is_strong);
        if !is_strong {
            return (transfer, Vec::new());
        }
        let earlier =
            contexts.followed_by(index(id) as u32).filter_map(|at| match slots.get(at as usize) {
                Some(Slot::Live(earlier)) => Some(Arc::clone(earlier)),
                _ => None,
            });
        let earlier = earlier.collect();
        (transfer, earlier)
    }

    pub(crate) fn find(&self, id: TransferId) -> Result<Found> {
        match self.inner.lock().slots.get(index(id)) {
            Some(Slot::Live(transfer)) if transfer.id == id => {
                Ok(Found::Live(Arc::clone(transfer)))
            }
            Some(Slot::Ended(ended, status)) if *ended == id => Ok(Found::Ended(status.clone())),
            _ => Err(Error::UnknownTransfer(id)),
        }
    }

    /// Notes that a transfer has ended. Its result is kept until many more have ended.
    pub(crate) fn ended(&self, transfer: &Transfer) {
        self.pending.fetch_sub(1, AcqRel);
        let ended = Slot::Ended(transfer.id, transfer.status());
        let mut inner = self.inner.lock();
        if let Some(scope) = transfer.scope() {
            inner.contexts.remove(scope, index(transfer.id) as u32);
        }
        let live =
            inner.slots.get_mut(index(transfer.id)).map(|slot| std::mem::replace(slot, ended));
        inner.kept.push_back(index(transfer.id));
        if inner.kept.len() > KEPT
            && let Some(oldest) = inner.kept.pop_front()
        {
            inner.slots.try_remove(oldest);
        }
        drop(inner);
        drop(live);
    }

    /// The unfinished transfers for which `pick` is true.
    pub(crate) fn unfinished(&self, pick: impl Fn(&Transfer) -> bool) -> Vec<Arc<Transfer>> {
        let inner = self.inner.lock();
        let live = inner.slots.iter().filter_map(|(_, slot)| match slot {
            Slot::Live(transfer) if !transfer.finished() && pick(transfer) => Some(transfer),
            _ => None,
        });
        live.cloned().collect()
    }
}

fn index(id: TransferId) -> usize {
    (id.0 & 0xFFFF_FFFF) as usize
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};

    use super::*;
    use crate::{Transport, drive::joined::Joined};

    /// Longer than any awaited event takes.
    const FAR: Duration = Duration::from_secs(20);

    /// Two endpoints, and the connection of the first of them.
    fn joined(by: Transport) -> (Joined, Arc<Connection>) {
        let pair = Joined::by(by);
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        (pair, conn)
    }

    fn plan(conn: &Arc<Connection>) -> Plan {
        Plan {
            kind: Kind::Write,
            context: 0,
            conn: Arc::clone(conn),
            bytes: 1,
            timeout: None,
            leases: SmallVec::new(),
            after: After::Publish,
            targets: SmallVec::new(),
        }
    }

    /// A write that is being posted.
    fn posting(conn: &Arc<Connection>) -> Arc<Transfer> {
        conn.admit(plan(conn)).expect("there is room")
    }

    /// A write of one operation, which has been posted.
    fn write(conn: &Arc<Connection>) -> Arc<Transfer> {
        let transfer = posting(conn);
        transfer.expect_ops(1);
        transfer.op_ended();
        transfer
    }

    /// A strong signal, which has been posted, and how many it follows.
    fn strong(conn: &Arc<Connection>) -> (Arc<Transfer>, usize) {
        let (transfer, earlier) = conn.admit_strong(plan(conn)).expect("there is room");
        earlier.iter().for_each(|earlier| earlier.lead(&transfer));
        transfer.op_ended();
        (transfer, earlier.len())
    }

    /// Waits for a step of another thread.
    fn wait_until(is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < FAR, "the other thread does not go on");
            sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_transfer_with_no_copies_left_waits_for_nobody() {
        // Only this process copies between two processes of a host.
        let (_pair, conn) = joined(Transport::Local);
        let transfer = posting(&conn);
        assert!(transfer.waits_for_peer(), "nothing is under way here");
        transfer.expect_ops(1);
        transfer.body.lock().ops.push((0, OpName(1)));
        transfer.op_ended();
        assert!(!transfer.waits_for_peer() && !transfer.finished());
        // As they are when the connection learns that the last copy has ended.
        transfer.ops_left.store(0, SeqCst);
        transfer.body.lock().ops.clear();
        assert!(!transfer.waits_for_peer() && !transfer.finished());
        transfer.publish(Ok(()));
        assert!(transfer.finished());
    }

    /// Two threads have put theirs into the list before either looks at the earlier ones.
    #[test]
    fn of_two_strong_signals_only_the_later_follows_the_other() {
        let (_pair, conn) = joined(Transport::Tcp);
        let [first, second] = [(); 2].map(|()| conn.admit_strong(plan(&conn)).expect("room"));
        assert!(first.1.is_empty());
        assert!(second.1.len() == 1 && Arc::ptr_eq(&second.1[0], &first.0));
    }

    #[test]
    fn each_write_is_followed_by_one_strong_signal() {
        let (_pair, conn) = joined(Transport::Tcp);
        let writes: Vec<_> = (0..3).map(|_| write(&conn)).collect();
        let (first, followed) = strong(&conn);
        assert_eq!(followed, 3);
        let later = write(&conn);
        let (second, followed) = strong(&conn);
        assert_eq!(followed, 2, "the first stands for what was before it");
        later.op_ended();
        writes[1..].iter().for_each(Transfer::op_ended);
        assert!(!first.finished() && !second.finished());
        writes[0].op_ended();
        assert!(first.finished() && second.finished());
        assert!(later.finished());
        assert_eq!(strong(&conn).1, 0, "all have ended");
    }

    #[test]
    fn no_follower_is_told_from_within_one_that_was_told() {
        let (_pair, conn) = joined(Transport::Tcp);
        let all = [(); 4].map(|()| posting(&conn));
        let [first, one, other, of_one] = &all;
        first.lead(one);
        first.lead(other);
        one.lead(of_one);
        [of_one, other, one, first].into_iter().for_each(Transfer::op_ended);
        let ended = conn.core.transfers.inner.lock().kept.clone();
        let in_turn = all.each_ref().map(|transfer| index(transfer.id));
        assert_eq!(ended, in_turn, "the follower of a follower after all that follow the first");
    }

    /// More followers than a thread's stack has room for, if each were told by recursion.
    #[test]
    fn strong_signals_end_one_after_the_other_however_many_there_are() {
        for is_good in [true, false] {
            let (_pair, conn) = joined(Transport::Tcp);
            let first = write(&conn);
            let followers: Vec<_> = (1..MAX_PENDING).map(|_| strong(&conn)).collect();
            assert!(followers.iter().all(|(_, followed)| *followed == 1));
            if !is_good {
                first.note_error(Error::Closed);
            }
            first.op_ended();
            let is_as_first = |status| match status {
                Status::Done(_) => is_good,
                Status::Failed(e) => !is_good && matches!(e, Error::ContextFailed { context: 0 }),
                Status::Pending => false,
            };
            assert!(followers.iter().all(|(follower, _)| is_as_first(follower.status())));
        }
    }

    #[test]
    fn a_follower_that_stops_following_is_not_told_again() {
        let (_pair, conn) = joined(Transport::Tcp);
        let leader = write(&conn);
        let (follower, earlier) = conn.admit_strong(plan(&conn)).expect("there is room");
        earlier.iter().for_each(|earlier| earlier.lead(&follower));
        // Its own operation.
        follower.expect_ops(1);
        follower.op_ended();
        follower.stop_following();
        leader.op_ended();
        assert!(leader.finished() && !follower.finished(), "its own operation is under way");
        follower.op_ended();
        assert!(follower.finished());
    }

    #[test]
    fn an_ended_transfer_follows_nobody_and_keeps_nothing() {
        let (_pair, conn) = joined(Transport::Tcp);
        let leader = write(&conn);
        let (follower, earlier) = conn.admit_strong(plan(&conn)).expect("there is room");
        // Its connection ends meanwhile.
        follower.publish(Err(Error::Closed));
        earlier.iter().for_each(|earlier| earlier.lead(&follower));
        assert_eq!(Arc::strong_count(&follower), 1, "it keeps itself");
        drop((leader, earlier));
    }

    #[test]
    fn the_memory_of_a_transfer_may_be_deregistered_once_its_end_shows() {
        let (_pair, conn) = joined(Transport::Tcp);
        let memory = [0_u8; 64];
        let span = Span { addr: memory.as_ptr() as usize, len: memory.len() };
        let lease = conn.core.mrs.insert(span, |_| {}).expect("registered");
        let mr = lease.mr().id;
        let plan = Plan { leases: smallvec::smallvec![lease], ..plan(&conn) };
        let transfer = conn.admit(plan).expect("there is room");
        scope(|threads| {
            // The thread that ends it stops here, when everybody can see the end.
            let _list = conn.core.transfers.inner.lock();
            threads.spawn(|| transfer.op_ended());
            wait_until(|| transfer.finished());
            conn.core.mrs.revoke(mr).expect("nothing uses it");
        });
        conn.core.mrs.forget(mr);
    }

    #[test]
    fn a_failure_is_noted_before_anybody_can_see_it() {
        let (_pair, conn) = joined(Transport::Tcp);
        let transfer = posting(&conn);
        transfer.note_error(Error::Closed);
        transfer.note_error(Error::Interrupted);
        scope(|threads| {
            // The thread that ends it stops here, when it has the result.
            let _contexts = conn.failed_contexts.lock();
            threads.spawn(|| transfer.op_ended());
            wait_until(|| transfer.body.lock().result.is_some());
            for _ in 0..20 {
                assert!(!transfer.finished(), "it is seen before it is noted");
                sleep(Duration::from_millis(1));
            }
        });
        assert!(transfer.finished() && conn.failed_contexts.check(0).is_err());
        assert!(matches!(transfer.status(), Status::Failed(Error::Closed)), "the first stays");
    }

    #[test]
    fn a_held_transfer_ends_with_its_hold_after_its_connection() {
        let (_pair, conn) = joined(Transport::Tcp);
        let transfer = posting(&conn);
        let [first, second] = [transfer.hold(), transfer.hold()];
        conn.fail(Error::Closed);
        assert!(conn.has_ended() && !transfer.finished(), "it is held");
        drop(first);
        assert!(!transfer.finished(), "it is held still");
        drop(second);
        assert!(transfer.finished());
    }

    #[test]
    fn an_ended_transfer_does_not_end_anew() {
        let (_pair, conn) = joined(Transport::Tcp);
        let transfer = posting(&conn);
        transfer.publish(Err(Error::Closed));
        for verdict in [Ok(()), Err(Error::Interrupted)] {
            transfer.publish(verdict);
            assert!(matches!(transfer.status(), Status::Failed(Error::Closed)));
        }
        assert_eq!(conn.pending.load(SeqCst), 0, "its connection is told once");
    }

    #[test]
    fn a_refused_transfer_takes_no_room() {
        let (_pair, conn) = joined(Transport::Tcp);
        let list = &conn.core.transfers;
        let first = write(&conn);
        let mut rooms: Vec<_> = (1..MAX_PENDING).map(|_| list.room().expect("room")).collect();
        for _ in 0..3 {
            let refused = conn.admit(plan(&conn)).map(|transfer| transfer.id);
            assert!(matches!(refused, Err(Error::Full { .. })), "{refused:?}");
        }
        rooms.pop();
        let second = write(&conn);
        assert!(list.room().is_err(), "it has taken the room");
        for transfer in [first, second] {
            transfer.op_ended();
            rooms.push(list.room().expect("it gives its room back"));
        }
        drop(rooms);
        assert_eq!(list.pending.load(Relaxed), 0);
    }

    /// Another transfer may have its place in the list, in another context.
    #[test]
    fn a_write_that_has_ended_leaves_its_context() {
        let (_pair, conn) = joined(Transport::Tcp);
        let ended = write(&conn);
        ended.op_ended();
        // As many as are kept, and its place is used again.
        for _ in 0..KEPT {
            let other = conn.admit(Plan { context: 1, ..plan(&conn) }).expect("there is room");
            other.op_ended();
        }
        let again = conn.admit(Plan { context: 2, ..plan(&conn) }).expect("there is room");
        assert_eq!(index(again.id), index(ended.id));
        assert_eq!(strong(&conn).1, 0, "nothing of this context is under way");
    }

    #[test]
    fn an_id_does_not_name_a_later_transfer_at_the_same_place() {
        let (_pair, conn) = joined(Transport::Tcp);
        let list = &conn.core.transfers;
        let end = |transfer: Arc<Transfer>| {
            transfer.op_ended();
            transfer.id
        };
        let first = end(write(&conn));
        assert!(matches!(list.find(first), Ok(Found::Ended(Status::Done(_)))));
        // As many as are kept, and it is forgotten.
        (0..KEPT).for_each(|_| _ = end(write(&conn)));
        assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
        let again = write(&conn);
        assert_eq!(index(again.id), index(first), "the place is used again");
        assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
        end(again);
        assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
    }
}
