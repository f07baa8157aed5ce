//! The lane over all paths of a connection: operations in, requests out.

mod landing;
mod notes;

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
use uccl_fabric::{
    lane::{
        Aftermath, Caps, Interest, Lane, LaneError, MessageSink, Moves, OpError, OpName, Operation,
        PostOutcome, RailLane,
    },
    mem::Span,
    rail::Rail,
    region::RegionTable,
};
use uccl_wire::rails::Note;

use super::{
    bell::Bell,
    flight::Part,
    left::ChannelAftermath,
    path::{LookResult, Path},
    rails::{Rails, link_of},
    state::{Hold, State},
};

/// Which end of the connection this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It connected: it pairs rails and makes channels.
    Connector,
    /// It accepted.
    Acceptor,
}

/// How long a path may be silent before it is lost. None: no such limit.
#[derive(Clone, Copy, Default, Debug)]
pub struct Silence {
    /// With requests under way of which none ends.
    pub stall: Option<Duration>,
    /// With a probe under way, which tells whether the path works.
    pub probe: Option<Duration>,
}

/// A lane for one-sided operations, which uses every pair of rails that two endpoints have between
/// them.
///
/// [`uccl_wire::rails`] defines the notes that its two ends exchange.
pub struct RmaLane {
    pub(super) regions: Arc<RegionTable>,
    pub(super) rails: Arc<Rails>,
    pub(super) role: Role,
    pub(super) silence: Silence,
    pub(super) state: Mutex<State>,
    /// Held by the caller of `progress`, and while the lane is killed, so that only one thread does
    /// either.
    turn: Mutex<()>,
    /// Copies of parts of the state, readable without its lock.
    up: AtomicUsize,
    load: AtomicU64,
    is_under_way: AtomicBool,
    has_notes: AtomicBool,
    fd: RawFd,
}

/// How long a killed lane waits for its devices to end its channels. Later ones are kept
/// (`left.rs`).
const TO_END: Duration = Duration::from_secs(1);
const FIRST_NAP: Duration = Duration::from_micros(20);
const LAST_NAP: Duration = Duration::from_millis(1);

/// How long the requests of a cancelled operation may take to end by themselves. After that their
/// paths are dropped.
const PATIENCE: Duration = Duration::from_millis(50);

/// Most notes that may wait to be sent to the peer. Only a peer that asks without reading the
/// answers causes more.
const MAX_NOTES: usize = 1 << 16;

/// Most pieces of one operation. There need be no smaller limit: requests are made only as they are
/// posted.
const MAX_PIECES: usize = 1 << 20;

impl RmaLane {
    /// Makes a lane without paths. The two ends agree on paths by notes.
    ///
    /// # Errors
    /// When the system has no file descriptors left.
    pub fn new(
        role: Role,
        rails: Arc<Rails>,
        regions: Arc<RegionTable>,
        silence: Silence,
    ) -> io::Result<Self> {
        let bell = Bell::new()?;
        let fd = bell.fd().as_raw_fd();
        let mut state = State::new(bell, rails.copy_by());
        state.is_to_offer = role == Role::Connector;
        let this = Self {
            regions,
            rails,
            role,
            silence,
            has_notes: AtomicBool::new(false),
            state: Mutex::new(state),
            turn: Mutex::new(()),
            up: AtomicUsize::new(0),
            load: AtomicU64::new(0),
            is_under_way: AtomicBool::new(false),
            fd,
        };
        this.with(|state| this.offer_due(state));
        Ok(this)
    }

    /// Changes the state under its lock; then, without the lock, calls the completions of
    /// operations that ended.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        self.act(|state| (change(state), true))
    }

    /// Like [`Self::with`], but `change` also says whether it changed anything. If not, no sleeper
    /// is woken.
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

    /// Assigns parts to paths as long as the paths have room.
    pub(super) fn pump(&self, state: &mut State) {
        if state.killed {
            return;
        }
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
        // Staging may have added parts to `again`.
        self.pump_again(state);
        self.flush(state);
    }

    /// Handles an operation when no path takes its next part. True if the operations queued behind
    /// it have to wait.
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

    /// Assigns the parts of lost paths to other paths. A part that has to wait does not hold up
    /// those behind it.
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
        // Keeps the old order. Parts that were not looked at, because every path is full, may
        // belong to cancelled operations.
        held.append(&mut state.again);
        state.again = held;
    }

    /// Drops the parts of a cancelled operation that wait to be requested again.
    fn drop_again(&self, state: &mut State, flight: usize) {
        let (dropped, kept) =
            state.again.drain(..).partition::<VecDeque<_>, _>(|p| p.flight == flight);
        state.again = kept;
        dropped.iter().for_each(|part| state.drop_part(&self.rails, part, None));
    }

    fn flush(&self, state: &mut State) {
        for at in 0..state.paths.len() {
            // SAFETY: the caller that posted an operation promised that its memory stays valid
            // until the operation ends or the lane is killed; neither happens while a part of it is
            // under way. Chunks stay until the lane is killed, which ends the paths first.
            if let Err(e) = unsafe { state.paths[at].flush() } {
                self.lose_path(state, at, &e.to_string());
            }
        }
    }

    /// Drops our end of a path. Once it is gone, the peer is told.
    pub(super) fn lose_path(&self, state: &mut State, at: usize, why: &str) {
        let State { paths, bell, .. } = state;
        let path = &mut paths[at];
        if path.is_up() {
            let name = self.rails.all().get(path.ours).map_or("?", |rail| &rail.info().name);
            tracing::warn!("{name} is lost, what was on it goes another way: {why}");
        }
        path.lose(why, bell);
    }

    /// Polls every path and handles each change. True if there was one.
    fn look(&self, state: &mut State) -> bool {
        let mut moved = state.look_at_copies();
        for at in 0..state.paths.len() {
            let mut ended = std::mem::take(&mut state.ended);
            let looked = state.paths[at].look(self.silence.stall, &mut ended);
            for (part, result) in ended.drain(..) {
                state.part_ended(&self.rails, part, result);
            }
            state.ended = ended;
            match looked {
                LookResult::Fine(some) => moved |= some,
                LookResult::Made => {
                    moved = true;
                    self.on_made(state, at);
                }
                LookResult::NotMade(why) => {
                    moved = true;
                    self.on_not_made(state, at, &why);
                }
                LookResult::Down => {
                    moved = true;
                    state.paths[at].port_is_down();
                    self.say_if_useless(state, at);
                }
                LookResult::Joined => {
                    moved = true;
                    self.on_joined(state, at);
                }
                LookResult::NotJoined(why) => {
                    moved = true;
                    self.on_not_joined(state, at, why);
                }
                LookResult::CameUp => {
                    moved = true;
                    self.path_came_up(state, at);
                    state.notes.push_back(Note::Ready(state.paths[at].id));
                }
                LookResult::Silent => {
                    let path = &mut state.paths[at];
                    if let Some(rail) = self.rails.all().get(path.ours) {
                        path.look_at_port(rail);
                    }
                }
                LookResult::Lost(why) => {
                    moved = true;
                    self.lose_path(state, at, &why);
                }
                LookResult::Gone => {
                    moved = true;
                    self.on_gone(state, at);
                }
            }
        }
        moved |= self.offer_due(state);
        moved |= state.look_at_registrations(&self.rails);
        moved |= state.look_at_areas();
        moved |= self.open_due(state);
        moved |= self.answer_due(state);
        self.settle(state);
        moved
    }

    /// Drops every path that carries a part of this operation, as the device does not complete it.
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

    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        if op.is_empty() {
            return Ok(PostOutcome::Done(Ok(())));
        }
        let mut own = None;
        let name = self.with(|state| {
            if state.killed {
                return Err(LaneError::Killed);
            }
            let (key, generation) = state.begin(op);
            self.pump(state);
            // An operation that has already ended is reported by the return value, not by its
            // completion.
            if state.flights.get(key).is_none_or(|flight| flight.generation != generation) {
                own = state.take_ending(generation);
            }
            Ok(OpName(u64::from(generation) << 32 | key as u64))
        })?;
        Ok(own.map_or(PostOutcome::Pending(name), PostOutcome::Done))
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

    fn has_work(&self) -> bool {
        self.has_notes()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        // Retire first: requests made from now on use another registration.
        let ours = self.rails.of_slot(slot);
        ours.iter().for_each(|pinned| _ = pinned.retire());
        self.with(|state| {
            let at_work = ours.is_some_and(|pinned| state.is_at_work_with(&pinned));
            let is_left = state.left.as_ref().is_some_and(|left| left.touches(slot));
            let State { lent, notes, copies, .. } = state;
            lent.revoke(slot, notes) | copies.may_touch(slot) | at_work | is_left
        })
    }

    fn arm(&self) -> bool {
        let mut state = self.state.lock();
        let armed = state.notes.is_empty() && state.arm(self.silence.stall).is_some();
        state.is_watched |= armed;
        armed
    }

    fn interest(&self) -> Interest<'_> {
        // SAFETY: the bell is ours and never replaced.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        Interest { fd, write: false, end: None }
    }

    /// Waits for all devices together, and only so long.
    fn kill(&self) {
        let _turn = self.turn.lock();
        if !self.with(State::shut) {
            return;
        }
        let (until, mut nap) = (Instant::now() + TO_END, FIRST_NAP);
        while !self.state.lock().is_shut() && Instant::now() < until {
            std::thread::sleep(nap);
            nap = (nap * 2).min(LAST_NAP);
        }
        self.with(|state| state.kill(&self.rails));
    }
}

impl RailLane for RmaLane {
    fn has_notes(&self) -> bool {
        self.has_notes.load(Acquire)
    }

    fn take_note(&self) -> Option<Note> {
        if !self.has_notes.load(Acquire) {
            return None;
        }
        let mut state = self.state.lock();
        let note = state.notes.pop_front();
        self.has_notes.store(!state.notes.is_empty(), Release);
        note
    }

    fn hear(&self, note: &[u8]) -> Result<(), String> {
        let note = Note::decode(note).map_err(|e| e.to_string())?;
        self.with(|state| {
            if state.killed {
                return Ok(());
            }
            self.take(state, note)?;
            self.settle(state);
            self.pump(state);
            if state.notes.len() + state.lent.due.len() > MAX_NOTES {
                return Err("more questions than are answered".into());
            }
            Ok(())
        })
    }

    fn link(&self) -> &'static str {
        link_of(self.rails.all())
    }

    fn paths_up(&self) -> usize {
        self.up.load(Acquire)
    }

    fn is_settled(&self) -> bool {
        self.state.lock().settled
    }

    fn describe(&self) -> Vec<(String, Result<(), String>)> {
        let state = self.state.lock();
        if state.paths.is_empty() && !state.offered {
            let waits = |rail: &Arc<dyn Rail>| {
                (rail.info().name.clone(), Err("the peer has not yet offered its rails".into()))
            };
            return self.rails.all().iter().map(waits).collect();
        }
        let describe = |path: &Path| {
            let name = self.rails.all().get(path.ours).map_or("?", |rail| &rail.info().name);
            (name.to_owned(), if path.is_up() { Ok(()) } else { Err(path.why_not()) })
        };
        state.paths.iter().map(describe).collect()
    }

    fn moves(&self) -> Moves {
        let state = self.state.lock();
        state.keys.slowest().max(self.rails.slowest())
    }

    fn reaches(&self, local: &[Span], kind: MemoryKind) -> bool {
        if self.paths_up() == 0 {
            return false;
        }
        if self.rails.copier_of(kind).is_some() {
            return true;
        }
        let mut state = self.state.lock();
        local.iter().filter(|span| span.len > 0).all(|span| {
            // If no device takes the memory that is yet to be registered, the operation is given
            // back.
            let is_to_be = self.rails.is_to_reach(*span);
            state.pinned(&self.rails, *span).map_or(is_to_be, |pinned| {
                state.paths.iter().any(|path| path.is_up() && pinned.with(path.ours).is_some())
            })
        })
    }

    fn is_under_way(&self) -> bool {
        self.is_under_way.load(Relaxed)
    }

    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        let left = self.state.lock().left.clone()?;
        Some(Box::new(ChannelAftermath(left)))
    }
}

impl Drop for RmaLane {
    fn drop(&mut self) {
        self.kill();
    }
}
