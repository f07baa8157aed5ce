//! The lane over all paths of a connection: operations in, requests out.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::MemoryKind;
use uccl_wire::rails::Note;

use super::{
    bell::Bell,
    flight::Part,
    path::{Looked, Path},
    rails::Rails,
    state::{Hold, State},
};
use crate::{
    clock,
    lane::{
        Caps, Interest, Lane, LaneError, MessageSink, Moves, OpError, OpName, Operation, Posted,
    },
    mem::Span,
    region::RegionTable,
};

/// Which end of the connection this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It connected: it pairs rails and makes channels.
    Connector,
    /// It accepted.
    Acceptor,
}

/// One-sided operations over every pair of rails that two endpoints have between them.
///
/// It carries no messages. What its ends have to say to each other (see [`uccl_wire::rails`]) the owner takes
/// from [`Self::take_note`] after every call, to another lane that does, and brings to [`Self::hear`].
pub struct RmaLane {
    pub(super) regions: Arc<RegionTable>,
    pub(super) rails: Arc<Rails>,
    pub(super) role: Role,
    /// A path on which nothing ends for so long is lost.
    stall: Option<Duration>,
    pub(super) state: Mutex<State>,
    /// Held while completions are called.
    turn: Mutex<()>,
    /// What the state says, for those who only look.
    up: AtomicUsize,
    load: AtomicU64,
    is_under_way: AtomicBool,
    has_notes: AtomicBool,
    fd: RawFd,
}

/// What a cancelled operation has on its way may take so long to end by itself.
const PATIENCE: Duration = Duration::from_millis(50);

/// Most pieces of one operation: their requests are made as they are posted.
const MAX_PIECES: usize = 1 << 20;

impl RmaLane {
    /// A lane that has no path yet: the ends agree on them by notes.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new(
        role: Role,
        rails: Arc<Rails>,
        regions: Arc<RegionTable>,
        stall: Option<Duration>,
    ) -> io::Result<Self> {
        let bell = Bell::new()?;
        let fd = bell.fd().as_raw_fd();
        let mut state = State::new(bell, rails.copy_by());
        if role == Role::Connector {
            state.notes.push_back(Note::Offer(rails.offer()));
        }
        Ok(Self {
            regions,
            rails,
            role,
            stall: stall.filter(|stall| !stall.is_zero()),
            has_notes: AtomicBool::new(role == Role::Connector),
            state: Mutex::new(state),
            turn: Mutex::new(()),
            up: AtomicUsize::new(0),
            load: AtomicU64::new(0),
            is_under_way: AtomicBool::new(false),
            fd,
        })
    }

    /// How many paths work.
    pub fn paths_up(&self) -> usize {
        self.up.load(Acquire)
    }

    /// Whether a device has something of ours: its end shows without a word from the peer.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way.load(Relaxed)
    }

    /// Whether every path has been tried once, or half a second has passed since the first worked; or the peer says
    /// so.
    pub fn is_settled(&self) -> bool {
        self.state.lock().settled
    }

    /// The paths, for people: our rail, and whether it works or why not.
    pub fn describe(&self) -> Vec<(String, Result<(), String>)> {
        let state = self.state.lock();
        let describe = |path: &Path| {
            let name = self.rails.all().get(path.ours).map_or("?", |rail| &rail.info().name);
            let why = || path.why.clone().unwrap_or_else(|| "not tried yet".into());
            (name.to_owned(), if path.is_up() { Ok(()) } else { Err(why()) })
        };
        state.paths.iter().map(describe).collect()
    }

    /// The name of the link that its paths are over.
    pub fn link(&self) -> &'static str {
        let link = self.rails.all().first().map(|rail| rail.info().link.as_str());
        match link.unwrap_or_default() {
            link if link.starts_with("verbs") => "verbs",
            link if link.starts_with("libfabric") => "libfabric",
            _ => "rma",
        }
    }

    /// How data moves over it: where regions of ours, or those of the peer's that it was asked about, move in several ways,
    /// the slowest of them.
    pub fn moves(&self) -> Moves {
        let state = self.state.lock();
        state.keys.slowest().max(self.rails.slowest())
    }

    /// Whether some path that works takes memory of ours, which is of this kind, or a copy of it.
    pub fn reaches(&self, local: &[Span], kind: MemoryKind) -> bool {
        if self.paths_up() == 0 {
            return false;
        }
        if self.rails.copier_of(kind).is_some() {
            return true;
        }
        let mut state = self.state.lock();
        local.iter().filter(|span| span.len > 0).all(|span| {
            state.pinned(&self.rails, *span).is_some_and(|pinned| {
                state.paths.iter().any(|path| path.is_up() && pinned.with(path.ours).is_some())
            })
        })
    }

    /// What is to be brought to the peer's lane, in this order.
    pub fn take_note(&self) -> Option<Note> {
        if !self.has_notes.load(Acquire) {
            return None;
        }
        let mut state = self.state.lock();
        let note = state.notes.pop_front();
        self.has_notes.store(!state.notes.is_empty(), Release);
        note
    }

    /// Whether something is to be brought to the peer's lane.
    pub fn has_notes(&self) -> bool {
        self.has_notes.load(Acquire)
    }

    /// Does what there is to do with the state, and then tells who is to be told.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        self.act(|state| (change(state), true))
    }

    /// The same, where it may turn out that there was nothing to do.
    fn act<T>(&self, change: impl FnOnce(&mut State) -> (T, bool)) -> T {
        let mut state = self.state.lock();
        let (out, changed) = change(&mut state);
        if state.is_watched && (changed || !state.notes.is_empty()) {
            state.wake_sleepers();
        }
        let endings = std::mem::take(&mut state.endings);
        self.publish(&state);
        drop(state);
        for (_, done, result) in endings {
            done.complete(result);
        }
        out
    }

    fn publish(&self, state: &State) {
        self.up.store(state.paths.iter().filter(|path| path.is_up()).count(), Release);
        self.load.store(state.outstanding, Relaxed);
        let is_busy = state.copies.are_under_way() || state.paths.iter().any(Path::is_busy);
        self.is_under_way.store(is_busy && !state.staging.awaits_peer(), Relaxed);
        self.has_notes.store(!state.notes.is_empty(), Release);
    }

    /// Gives parts to paths as long as there is room.
    pub(super) fn pump(&self, state: &mut State) {
        self.pump_again(state);
        while let Some(&key) = state.queue.front() {
            let Some(flight) = state.flights.get_mut(key) else {
                state.queue.pop_front();
                continue;
            };
            let Some(part) = flight.next(key) else {
                state.queue.pop_front();
                state.end_if_over(key);
                continue;
            };
            match state.assign(&self.rails, part) {
                Ok(taken) => {
                    let flight = &mut state.flights[key];
                    flight.take(taken);
                    flight.parts += 1;
                }
                Err(hold) => {
                    if self.is_held_up(state, key, part, hold) {
                        break;
                    }
                }
            }
        }
        // What passes through chunks may have got there.
        self.pump_again(state);
        self.flush(state);
    }

    /// No path takes what comes next of an operation; whether what is queued behind it has to wait.
    fn is_held_up(&self, state: &mut State, key: usize, part: Part, hold: Hold) -> bool {
        let hold = match hold {
            Hold::Never(OpError::Unreachable) => match state.stage(&self.rails, key, part) {
                Ok(()) => return false,
                Err(hold) => hold,
            },
            hold => hold,
        };
        match hold {
            Hold::Full => return true,
            Hold::Key => {
                state.queue.pop_front();
                state.parked.push(key);
            }
            Hold::Never(why) => state.flights[key].fail(why),
        }
        false
    }

    /// Requests again what was on paths that are gone. What waits for its turn holds up nothing that could go.
    fn pump_again(&self, state: &mut State) {
        let mut held = VecDeque::new();
        while let Some(part) = state.again.pop_front() {
            if state.is_ending(&part) {
                state.drop_part(&self.rails, &part, None);
                continue;
            }
            match state.assign(&self.rails, part) {
                Ok(taken) => {
                    if let (_, Some(rest)) = part.split(taken) {
                        state.count_part(part.flight, part.batch);
                        state.again.push_front(rest);
                    }
                }
                Err(hold @ (Hold::Full | Hold::Key)) => {
                    held.push_back(part);
                    if matches!(hold, Hold::Full) && state.is_full() {
                        break;
                    }
                }
                Err(Hold::Never(why)) => state.drop_part(&self.rails, &part, Some(why)),
            }
        }
        // In their old order. What a full device keeps from being looked at may have been cancelled.
        held.append(&mut state.again);
        state.again = held;
    }

    /// Ends what is to be requested again of an operation that was cancelled.
    fn drop_again(&self, state: &mut State, flight: usize) {
        let (dropped, kept) =
            state.again.drain(..).partition::<VecDeque<_>, _>(|p| p.flight == flight);
        state.again = kept;
        dropped.iter().for_each(|part| state.drop_part(&self.rails, part, None));
    }

    fn flush(&self, state: &mut State) {
        for at in 0..state.paths.len() {
            // SAFETY: the memory of every flight stays valid until it has ended or the lane is killed, by
            // the promise of who posted it; neither happens while a part of it is under way. Chunks stay until
            // the lane is killed, which ends the paths first.
            if let Err(e) = unsafe { state.paths[at].flush() } {
                self.lose_path(state, at, &e.to_string());
            }
        }
    }

    /// Our end of a path goes; when it has, the peer is told.
    pub(super) fn lose_path(&self, state: &mut State, at: usize, why: &str) {
        let State { paths, bell, .. } = state;
        let path = &mut paths[at];
        if path.is_up() {
            let name = self.rails.all().get(path.ours).map_or("?", |rail| &rail.info().name);
            tracing::warn!("{name} is lost, what was on it goes another way: {why}");
        }
        path.lose(why, bell);
    }

    /// Looks at every path, and does what time demands.
    fn look(&self, state: &mut State) -> bool {
        let mut moved = state.look_at_copies();
        for at in 0..state.paths.len() {
            let mut ended = std::mem::take(&mut state.ended);
            let looked = state.paths[at].look(self.stall, &mut ended);
            for (part, result) in ended.drain(..) {
                state.part_ended(&self.rails, part, result);
            }
            state.ended = ended;
            match looked {
                Looked::Fine(some) => moved |= some,
                Looked::Joined => {
                    moved = true;
                    self.on_joined(state, at);
                }
                Looked::NotJoined(why) => {
                    moved = true;
                    self.on_not_joined(state, at, why);
                }
                Looked::CameUp => {
                    moved = true;
                    self.path_came_up(state, at);
                    state.notes.push_back(Note::Ready(state.paths[at].id));
                }
                Looked::Silent => {
                    let rail = self.rails.all().get(state.paths[at].ours);
                    if rail.is_some_and(|rail| !rail.is_up()) {
                        moved = true;
                        self.lose_path(state, at, "its port is down");
                    }
                }
                Looked::Lost(why) => {
                    moved = true;
                    self.lose_path(state, at, &why);
                }
                Looked::Gone => {
                    moved = true;
                    self.on_gone(state, at);
                }
            }
        }
        moved |= self.open_due(state);
        moved |= self.answer_due(state);
        self.settle(state);
        moved
    }

    /// A device does not give back what it was given: its channel goes, and with it what is on it.
    fn lose_paths_of(&self, state: &mut State, flight: usize) {
        for at in 0..state.paths.len() {
            if state.paths[at].carries(flight) {
                self.lose_path(state, at, "a cancelled operation does not end");
            }
        }
    }

    pub(super) fn path_came_up(&self, state: &mut State, at: usize) {
        if state.paths[at].come_up() {
            state.epoch += 1;
            state.first_up.get_or_insert_with(Instant::now);
            let ours = self.rails.all().get(state.paths[at].ours);
            tracing::debug!("{} works", ours.map_or("?", |rail| &rail.info().name));
        }
    }
}

impl Lane for RmaLane {
    fn caps(&self) -> Caps {
        Caps {
            link: self.link(),
            ordered: false,
            delivery_complete: true,
            remote_atomics: false,
            messages: false,
            checksum: false,
            by_device: self.rails.all().iter().all(|rail| !rail.info().is_software),
            max_pieces: MAX_PIECES,
            max_gpu_pieces: MAX_PIECES,
            max_message: 0,
        }
    }

    unsafe fn post(&self, op: Operation) -> Result<Posted, LaneError> {
        if op.is_empty() {
            return Ok(Posted::Done(Ok(())));
        }
        let mut own = None;
        let name = self.with(|state| {
            if state.killed {
                return Err(LaneError::Killed);
            }
            let (key, generation) = state.begin(op);
            self.pump(state);
            // What ended at once is said by what this returns.
            if state.flights.get(key).is_none_or(|flight| flight.generation != generation) {
                own = state.take_ending(generation);
            }
            Ok(OpName(u64::from(generation) << 32 | key as u64))
        })?;
        Ok(own.map_or(Posted::Pending(name), Posted::Done))
    }

    fn send(&self, _: &[&[u8]]) -> Result<(), LaneError> {
        Err(LaneError::Protocol("it carries no messages".into()))
    }

    fn progress(&self, _: &dyn MessageSink) -> Result<bool, LaneError> {
        let Some(_turn) = self.turn.try_lock() else { return Ok(false) };
        self.act(|state| {
            if state.killed {
                return (Err(LaneError::Killed), false);
            }
            let moved = self.look(state);
            self.pump(state);
            (Ok(moved), moved)
        })
    }

    fn cancel(&self, op: OpName) {
        let (key, generation) = ((op.0 & 0xFFFF_FFFF) as usize, (op.0 >> 32) as u32);
        self.with(|state| {
            let flight = state.flights.get_mut(key);
            let Some(flight) = flight.filter(|flight| flight.generation == generation) else {
                return;
            };
            flight.fail(OpError::Cancelled);
            let since = *flight.cancelled_at.get_or_insert_with(Instant::now);
            if since.elapsed() > PATIENCE {
                self.lose_paths_of(state, key);
            }
            self.drop_again(state, key);
            self.pump(state);
            state.end_if_over(key);
        });
    }

    fn load(&self) -> u64 {
        self.load.load(Relaxed)
    }

    /// Paths that fall silent are this lane's own to find.
    fn last_heard_ms(&self) -> u64 {
        clock::coarse_ms()
    }

    fn ping(&self) -> Result<(), LaneError> {
        Ok(())
    }

    fn has_work(&self) -> bool {
        self.has_notes()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        // In this order: what is requested from now on goes by another registration.
        let ours = self.rails.of_slot(slot);
        ours.iter().for_each(|pinned| _ = pinned.retire());
        self.with(|state| {
            let at_work = ours.is_some_and(|pinned| state.is_at_work_with(&pinned));
            let State { lent, notes, copies, .. } = state;
            lent.revoke(slot, notes) | copies.may_touch(slot) | at_work
        })
    }

    fn arm(&self) -> bool {
        let mut state = self.state.lock();
        let armed = state.notes.is_empty() && state.arm(self.stall).is_some();
        state.is_watched |= armed;
        armed
    }

    fn interest(&self) -> Interest<'_> {
        // SAFETY: the bell is ours and never replaced.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        Interest { fd, write: false, end: None }
    }

    fn bye(&self) {}

    fn kill(&self) {
        let _turn = self.turn.lock();
        self.with(State::kill);
    }
}

impl Drop for RmaLane {
    fn drop(&mut self) {
        self.kill();
    }
}
