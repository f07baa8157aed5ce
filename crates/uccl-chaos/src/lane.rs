//! A lane that wraps another lane and adds faults.

use std::collections::HashMap;
use std::io;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use parking_lot::Mutex;
use uccl_device::MemoryKind;
use uccl_fabric::{
    alloc::Shareable,
    lane::{
        Aftermath, Caps, Completion, HostLane, Interest, Lane, LaneError, MessageLane, MessageSink,
        OpError, OpKind, OpName, OpResult, Operation, PostOutcome,
    },
    mem::{RemoteSpan, Span},
    signal::Word,
};
use uccl_wire::signal::Change;

use super::gate::{Gate, GateHold};

/// Faults of a [`ChaosLane`]. The default has none.
#[derive(Clone, Debug, Default)]
pub struct LaneFaults {
    /// Each completion is held for a random number of [`Lane::progress`] calls, at most this, which
    /// puts them in another order.
    pub hold_completions: u32,
    /// Percentage of writes that are done twice; such a write ends when both copies have ended.
    pub repeat_writes_percent: u8,
    /// Percentage of operations that fail at once, with [`OpError::LocalFault`].
    pub fail_posts_percent: u8,
    /// The lane is lost when this many operations have been posted.
    pub lose_after: Option<u64>,
    /// The lane claims that the ends of its operations are not up to the peer.
    pub is_ours: bool,
}

/// A lane with faults. See [`LaneFaults`].
pub struct ChaosLane<L> {
    inner: L,
    /// The inner lane as a [`HostLane`], if it is between processes of one host.
    as_host: Option<fn(&L) -> &dyn HostLane>,
    faults: LaneFaults,
    state: Mutex<State>,
    held: Arc<Mutex<HeldCompletions>>,
    kills: Arc<Gate>,
    looks: Arc<Gate>,
    copies: Arc<AtomicBool>,
    touched: Mutex<TouchedRegion>,
}

/// The region that the peer is said to touch, regardless of the inner lane's answer.
#[derive(Default)]
struct TouchedRegion {
    slot: Option<u32>,
    asked: u64,
}

/// Keeps a copy of a killed lane from its end until this is dropped. It stands for a copy in the
/// kernel that waits for a page of another process (`process_vm_writev(2)` and `userfaultfd(2)`).
pub struct CopyHold {
    copies: Arc<AtomicBool>,
    held: Arc<Mutex<HeldCompletions>>,
}

impl Drop for CopyHold {
    fn drop(&mut self) {
        self.copies.store(false, SeqCst);
        let due = {
            let mut holding = self.held.lock();
            holding.over = true;
            std::mem::take(&mut holding.held)
        };
        due.into_iter().for_each(|held| held.done.complete(held.result));
    }
}

/// The aftermath of a killed lane: held copies, and the inner lane's aftermath.
struct Copies {
    held: Arc<AtomicBool>,
    inner: Option<Box<dyn Aftermath>>,
}

impl Copies {
    fn is_held(&self) -> bool {
        self.held.load(SeqCst)
    }
}

impl Aftermath for Copies {
    fn copies(&self) -> bool {
        self.is_held() || self.inner.as_ref().is_some_and(|inner| inner.copies())
    }

    fn touches(&self, slot: u32) -> bool {
        self.is_held() || self.inner.as_ref().is_some_and(|inner| inner.touches(slot))
    }

    fn look(&self) {
        self.inner.iter().for_each(|inner| inner.look());
    }

    fn is_over(&self) -> bool {
        !self.is_held() && self.inner.as_ref().is_none_or(|inner| inner.is_over())
    }
}

/// Completions that are held back.
#[derive(Default)]
struct HeldCompletions {
    held: Vec<HeldCompletion>,
    /// The lane was killed or a held copy released: nothing is held back any more.
    over: bool,
}

struct State {
    rng: fastrand::Rng,
    posted: u64,
    lost: bool,
    /// The second half of a repeated write, by the name of the first.
    repeats: HashMap<OpName, OpName>,
}

/// A completion that its owner has not received yet.
struct HeldCompletion {
    done: Arc<dyn Completion>,
    result: OpResult,
    /// Polls before its delivery; `None` until the number is drawn.
    polls: Option<u32>,
}

/// The completion of the inner lane's operation: it holds the result back.
struct HoldingCompletion {
    held: Arc<Mutex<HeldCompletions>>,
    done: Arc<dyn Completion>,
    /// The number of copies that have not ended, and the combined result of the others.
    left: Mutex<(u32, Option<OpResult>)>,
}

impl Completion for HoldingCompletion {
    fn complete(self: Arc<Self>, result: OpResult) {
        let mut left = self.left.lock();
        left.0 -= 1;
        let ended = match (left.1.take(), result) {
            // A lost lane's copy may land yet, so the whole write counts as lost.
            (Some(Err(OpError::LaneDown)), _) | (_, Err(OpError::LaneDown)) => {
                Err(OpError::LaneDown)
            }
            // A write has landed if one of its copies has.
            (Some(Ok(())), _) => Ok(()),
            (_, result) => result,
        };
        if left.0 > 0 {
            left.1 = Some(ended);
        } else {
            let (done, result) = (Arc::clone(&self.done), ended);
            drop(left);
            let mut holding = self.held.lock();
            if holding.over {
                drop(holding);
                return done.complete(result);
            }
            holding.held.push(HeldCompletion { done, result, polls: None });
        }
    }
}

impl<L: MessageLane> ChaosLane<L> {
    pub fn new(inner: L, seed: u64, faults: LaneFaults) -> Self {
        let rng = fastrand::Rng::with_seed(seed);
        let state = State { rng, posted: 0, lost: false, repeats: HashMap::new() };
        let (state, held, kills) = (Mutex::new(state), Arc::default(), Arc::default());
        let (copies, touched, looks) = (Arc::default(), Mutex::default(), Arc::default());
        Self { inner, as_host: None, faults, state, held, kills, looks, copies, touched }
    }

    /// A chaos lane around a lane between processes of one host, with all the abilities of such.
    pub fn of_host(inner: L, seed: u64, faults: LaneFaults) -> Self
    where
        L: HostLane,
    {
        Self { as_host: Some(|inner| inner), ..Self::new(inner, seed, faults) }
    }

    pub fn inner(&self) -> &L {
        &self.inner
    }

    /// Loses the lane, as if its link had gone.
    pub fn lose(&self) {
        self.state.lock().lost = true;
    }

    /// Makes every [`Lane::kill`] wait.
    pub fn hold_kill(&self) -> GateHold {
        self.kills.hold()
    }

    /// Makes every [`Lane::progress`] wait, as in the kernel for a page that never comes.
    pub fn hold_progress(&self) -> GateHold {
        self.looks.hold()
    }

    /// Sets the slot of the region that the peer is said to touch, or none.
    pub fn touch(&self, slot: Option<u32>) {
        *self.touched.lock() = TouchedRegion { slot, asked: 0 };
    }

    /// Number of questions about that region.
    pub fn asked_about_touched(&self) -> u64 {
        self.touched.lock().asked
    }

    /// Pretends that copies are under way, even after the lane is killed: no operation ends.
    pub fn hold_copy(&self) -> CopyHold {
        self.copies.store(true, SeqCst);
        CopyHold { copies: Arc::clone(&self.copies), held: Arc::clone(&self.held) }
    }

    /// Number of posted operations.
    pub fn posted(&self) -> u64 {
        self.state.lock().posted
    }

    /// Counts a posted operation. `false`: the operation is to fail.
    fn admits(&self) -> Result<bool, LaneError> {
        self.check()?;
        let mut state = self.state.lock();
        state.posted += 1;
        state.lost |= self.faults.lose_after == Some(state.posted);
        Ok(state.rng.u8(0..100) >= self.faults.fail_posts_percent)
    }

    /// The completion of `copies` copies of an operation, which ends with the last of them.
    fn catch(&self, done: Arc<dyn Completion>, copies: u32) -> Arc<HoldingCompletion> {
        Arc::new(HoldingCompletion {
            held: Arc::clone(&self.held),
            done,
            left: Mutex::new((copies, None)),
        })
    }

    fn host(&self) -> Option<&dyn HostLane> {
        self.as_host.map(|host| host(&self.inner))
    }

    /// The inner host lane, half of the times and only while the lane is not lost: immediate
    /// operations take the longer way as well.
    fn host_at_random(&self) -> Option<&dyn HostLane> {
        let host = self.host()?;
        let is_tried = self.check().is_ok() && self.state.lock().rng.bool();
        is_tried.then_some(host)
    }

    fn check(&self) -> Result<(), LaneError> {
        if self.state.lock().lost {
            return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
        }
        Ok(())
    }

    /// Delivers the completions that have been held for long enough. If the lane is `over`,
    /// delivers all of them, and later ones come at once.
    fn release(&self, over: bool) -> bool {
        if self.copies.load(SeqCst) {
            return false;
        }
        let due = {
            let mut state = self.state.lock();
            let mut holding = self.held.lock();
            holding.over |= over;
            let mut due = Vec::new();
            for mut one in std::mem::take(&mut holding.held) {
                let polls =
                    one.polls.unwrap_or_else(|| state.rng.u32(0..=self.faults.hold_completions));
                if over || polls == 0 {
                    due.push(one);
                } else {
                    one.polls = Some(polls - 1);
                    holding.held.push(one);
                }
            }
            if self.faults.hold_completions > 0 {
                state.rng.shuffle(&mut due);
            }
            due
        };
        let any = !due.is_empty();
        due.into_iter().for_each(|held| held.done.complete(held.result));
        any
    }
}

impl<L: MessageLane> Lane for ChaosLane<L> {
    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        Caps { ordered: caps.ordered && self.faults.hold_completions == 0, ..caps }
    }

    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        if !self.admits()? {
            return Ok(PostOutcome::Done(Err(OpError::LocalFault)));
        }
        let repeat = op.kind == OpKind::Write
            && self.state.lock().rng.u8(0..100) < self.faults.repeat_writes_percent;
        let catch = self.catch(op.done, 1 + u32::from(repeat));
        let copy = || Operation {
            kind: op.kind,
            local: op.local.clone(),
            memory: op.memory,
            remote: op.remote.clone(),
            done: Arc::clone(&catch) as Arc<dyn Completion>,
        };
        // SAFETY: the caller's completion, until which its memory is valid, is called after those
        // of all copies.
        let first = unsafe { self.inner.post(copy())? };
        let PostOutcome::Pending(name) = first else {
            // Nothing is under way, so nothing is held and nothing repeated.
            return Ok(first);
        };
        if repeat {
            // SAFETY: as above.
            match unsafe { self.inner.post(copy()) } {
                Ok(PostOutcome::Pending(second)) => {
                    self.state.lock().repeats.insert(name, second);
                }
                Ok(PostOutcome::Done(result)) => catch.complete(result),
                // The first copy gets the error too.
                Err(_) => catch.complete(Err(OpError::LaneDown)),
            }
        }
        Ok(PostOutcome::Pending(name))
    }

    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError> {
        self.looks.pass();
        self.check()?;
        let moved = self.inner.progress(sink);
        Ok(self.release(false) | moved?)
    }

    fn cancel(&self, op: OpName) {
        self.inner.cancel(op);
        let second = self.state.lock().repeats.remove(&op);
        second.into_iter().for_each(|second| self.inner.cancel(second));
    }

    fn load(&self) -> u64 {
        self.inner.load()
    }

    fn has_work(&self) -> bool {
        self.inner.has_work() || !self.held.lock().held.is_empty()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        let mut touched = self.touched.lock();
        let is_touched = touched.slot == Some(slot);
        touched.asked += u64::from(is_touched);
        is_touched || self.inner.touched_by_peer(slot)
    }

    fn arm(&self) -> bool {
        self.held.lock().held.is_empty() && self.check().is_ok() && self.inner.arm()
    }

    fn interest(&self) -> Interest<'_> {
        self.inner.interest()
    }

    fn kill(&self) {
        self.kills.pass();
        self.inner.kill();
        self.release(true);
    }
}

impl<L: MessageLane> MessageLane for ChaosLane<L> {
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError> {
        self.check()?;
        self.inner.send(parts)
    }

    fn carries_signal(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool {
        self.inner.carries_signal(ours, remote)
    }

    /// A signalled write is never repeated: the word would change twice.
    unsafe fn post_signalled(&self, op: Operation, word: Word) -> Result<PostOutcome, LaneError> {
        if !self.admits()? {
            return Ok(PostOutcome::Done(Err(OpError::LocalFault)));
        }
        let done = self.catch(op.done, 1);
        // SAFETY: the caller's completion is called after this one.
        unsafe { self.inner.post_signalled(Operation { done, ..op }, word) }
    }

    fn queued_bytes(&self) -> usize {
        self.inner.queued_bytes()
    }

    fn last_heard_ms(&self) -> u64 {
        self.inner.last_heard_ms()
    }

    fn ping(&self) -> Result<(), LaneError> {
        self.check()?;
        self.inner.ping()
    }

    fn bye(&self) {
        self.inner.bye();
    }
}

/// The inner lane's abilities between processes of one host, with the faults. An inner lane that is
/// not between such processes has none.
impl<L: MessageLane> HostLane for ChaosLane<L> {
    fn path_to(&self, remote: &RemoteSpan) -> &'static str {
        self.host().map_or(self.caps().link, |host| host.path_to(remote))
    }

    fn owner_copies(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> Vec<bool> {
        self.host().map_or_else(Vec::new, |host| host.owner_copies(ours, remote))
    }

    fn copies_as_owner(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool {
        self.host().is_some_and(|host| host.copies_as_owner(ours, remote))
    }

    unsafe fn try_now(&self, kind: OpKind, local: Span, remote: &RemoteSpan) -> Option<OpResult> {
        let host = self.host_at_random()?;
        // SAFETY: the caller keeps the contract of this method, which is the inner lane's.
        unsafe { host.try_now(kind, local, remote) }
    }

    unsafe fn try_signalled(
        &self,
        local: Span,
        remote: &RemoteSpan,
        word: &RemoteSpan,
        change: Change,
    ) -> Option<OpResult> {
        let host = self.host_at_random()?;
        // SAFETY: the caller keeps the contract of this method, which is the inner lane's.
        unsafe { host.try_signalled(local, remote, word, change) }
    }

    fn try_signal(&self, word: &RemoteSpan, change: Change) -> Option<OpResult> {
        self.host_at_random()?.try_signal(word, change)
    }

    fn signals_by_gpu(&self, ours: MemoryKind, remote: &[RemoteSpan], word: &Word) -> bool {
        self.host_at_random().is_some_and(|host| host.signals_by_gpu(ours, remote, word))
    }

    unsafe fn post_signalled_by_gpu(
        &self,
        write: Operation,
        word: Word,
    ) -> Result<PostOutcome, LaneError> {
        self.check()?;
        let Some(host) = self.host() else { return Err(LaneError::Killed) };
        // SAFETY: the caller keeps the contract of this method, which is the inner lane's.
        unsafe { host.post_signalled_by_gpu(write, word) }
    }

    fn is_copied_by_gpu(&self, ours: MemoryKind, remote: &RemoteSpan) -> bool {
        self.host().is_some_and(|host| host.is_copied_by_gpu(ours, remote))
    }

    fn progress_copies(&self) {
        if let Some(host) = self.host() {
            host.progress_copies();
        }
    }

    fn is_ours(&self, op: OpName) -> bool {
        self.faults.is_ours || self.host().is_some_and(|host| host.is_ours(op))
    }

    fn wants_help(&self) -> bool {
        self.host().is_some_and(HostLane::wants_help)
    }

    fn help(&self) -> bool {
        self.host().is_some_and(HostLane::help)
    }

    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        let inner = self.host().and_then(HostLane::aftermath);
        let copies = Copies { held: Arc::clone(&self.copies), inner };
        (copies.inner.is_some() || copies.is_held()).then(|| Box::new(copies) as _)
    }

    fn offer(&self, memory: &Shareable) {
        if let Some(host) = self.host() {
            host.offer(memory);
        }
    }

    fn retract(&self, id: u32) {
        if let Some(host) = self.host() {
            host.retract(id);
        }
    }
}
