//! The lane over all paths of a connection: operations in, requests out.

use std::{
    collections::VecDeque,
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use slab::Slab;
use uccl_wire::{
    frame::Status,
    rails::{Note, RegionId},
};

use super::{
    bell::Bell,
    flight::{Flight, Part},
    keys::{Granted, Keys, Lookup},
    notes::Lent,
    path::{Looked, Path},
    rail::RequestError,
    rails::{Pinned, Rails},
};
use crate::{
    clock,
    lane::{
        Caps, Completion, Interest, Lane, LaneError, MessageSink, OpError, OpName, OpResult,
        Operation, Posted,
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
    has_notes: AtomicBool,
    fd: std::os::fd::RawFd,
}

/// An operation's generation, whom to tell of its end, and what.
type Ending = (u32, Arc<dyn Completion>, OpResult);

/// What a cancelled operation has on its way may take so long to end by itself.
const PATIENCE: Duration = Duration::from_millis(50);

/// Most pieces of one operation: their requests are made as they are posted.
const MAX_PIECES: usize = 1 << 20;

pub(super) struct State {
    pub(super) bell: Bell,
    pub(super) paths: Vec<Path>,
    pub(super) keys: Keys,
    pub(super) lent: Lent,
    pub(super) notes: VecDeque<Note>,
    /// The peer has told its rails.
    pub(super) offered: bool,
    /// Every path has been tried, and the peer knows.
    pub(super) settled: bool,
    /// Counts the channels that have come up.
    pub(super) epoch: u64,
    flights: Slab<Flight>,
    generation: u32,
    /// Operations of which something is left to be requested, in order.
    queue: VecDeque<usize>,
    /// Those of them that wait for a key.
    parked: Vec<usize>,
    /// Parts to be requested again, before anything else.
    pub(super) again: VecDeque<Part>,
    endings: Vec<Ending>,
    /// Room for what has ended.
    ended: Vec<(Part, Result<(), RequestError>)>,
    memo: Weak<Pinned>,
    /// Somebody may sleep on the bell.
    is_watched: bool,
    /// When the lane was made: a time, where any will do.
    born: Instant,
    pub(super) killed: bool,
}

/// Why a part is not requested right now.
enum Hold {
    /// Every path that could take it is full.
    Full,
    /// Its key is not known yet.
    Key,
    /// It never will be, over this lane.
    Never(OpError),
}

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
        let fd = std::os::fd::AsRawFd::as_raw_fd(&bell.fd());
        let mut notes = VecDeque::new();
        if role == Role::Connector {
            notes.push_back(Note::Offer(rails.offer()));
        }
        let state = State {
            bell,
            paths: Vec::new(),
            keys: Keys::default(),
            lent: Lent::default(),
            notes,
            offered: false,
            settled: false,
            epoch: 1,
            flights: Slab::new(),
            generation: 0,
            queue: VecDeque::new(),
            parked: Vec::new(),
            again: VecDeque::new(),
            endings: Vec::new(),
            ended: Vec::new(),
            memo: Weak::new(),
            is_watched: false,
            born: Instant::now(),
            killed: false,
        };
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
            fd,
        })
    }

    /// How many paths work.
    pub fn paths_up(&self) -> usize {
        self.up.load(Acquire)
    }

    /// Whether every path has been tried once, or the peer says that it has.
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

    /// Whether memory of ours can be named on some path that works.
    pub fn reaches(&self, local: &[Span]) -> bool {
        if self.paths_up() == 0 {
            return false;
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
        let waiting: u64 =
            state.queue.iter().chain(&state.parked).map(|&key| state.left(key)).sum();
        let under_way: u64 = state.paths.iter().map(Path::load).sum();
        self.load.store(waiting + under_way, Relaxed);
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
                Err(Hold::Full) => break,
                Err(Hold::Key) => {
                    state.queue.pop_front();
                    state.parked.push(key);
                }
                Err(Hold::Never(why)) => state.flights[key].fail(why),
            }
        }
        self.flush(state);
    }

    /// Requests again what was on paths that are gone.
    fn pump_again(&self, state: &mut State) {
        while let Some(part) = state.again.pop_front() {
            if state.is_ending(&part) {
                state.drop_part(&part, None);
                continue;
            }
            match state.assign(&self.rails, part) {
                Ok(taken) => {
                    if let (_, Some(rest)) = part.split(taken) {
                        state.flights[part.flight].parts += 1;
                        state.again.push_front(rest);
                    }
                }
                Err(Hold::Full | Hold::Key) => {
                    state.again.push_front(part);
                    return;
                }
                Err(Hold::Never(why)) => state.drop_part(&part, Some(why)),
            }
        }
    }

    fn flush(&self, state: &mut State) {
        for at in 0..state.paths.len() {
            // SAFETY: the memory of every flight stays valid until it has ended or the lane is killed, by
            // the promise of who posted it; neither happens while a part of it is under way.
            if let Err(e) = unsafe { state.paths[at].flush() } {
                self.lose_path(state, at, &e.to_string());
            }
        }
    }

    /// Our end of a path goes, and the peer is told.
    pub(super) fn lose_path(&self, state: &mut State, at: usize, why: &str) {
        let State { paths, bell, notes, .. } = state;
        let path = &mut paths[at];
        if path.is_up() {
            let name = self.rails.all().get(path.ours).map_or("?", |rail| &rail.info().name);
            tracing::warn!("{name} is lost, what was on it goes another way: {why}");
        }
        path.lose(why, bell);
        notes.push_back(Note::Down(path.id));
    }

    /// Looks at every path, and does what time demands.
    fn look(&self, state: &mut State) -> bool {
        let mut moved = false;
        for at in 0..state.paths.len() {
            let mut ended = std::mem::take(&mut state.ended);
            let looked = state.paths[at].look(self.stall, &mut ended);
            ended.drain(..).for_each(|(part, result)| state.part_ended(part, result));
            state.ended = ended;
            match looked {
                Looked::Fine(some) => moved |= some,
                Looked::CameUp => {
                    moved = true;
                    self.path_came_up(state, at);
                    state.notes.push_back(Note::Ready(state.paths[at].id));
                }
                Looked::Lost(why) => {
                    moved = true;
                    self.lose_path(state, at, &why);
                }
            }
        }
        moved |= self.open_due(state);
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
            let ours = self.rails.all().get(state.paths[at].ours);
            tracing::debug!("{} works", ours.map_or("?", |rail| &rail.info().name));
        }
    }
}

impl State {
    /// Prepares for sleep; none if there is something to do right now.
    fn arm(&mut self, stall: Option<Duration>) -> Option<()> {
        let now = Instant::now();
        let mut wake = None;
        for path in &mut self.paths {
            let (armed, due) = path.arm(now, stall);
            if !armed {
                return None;
            }
            wake = [wake, due].into_iter().flatten().min();
        }
        self.bell.set(wake);
        Some(())
    }

    /// Whoever sleeps wakes in time for what he did not know of.
    fn wake_sleepers(&mut self) {
        let wake = match self.notes.is_empty() {
            // Asked without reading a clock, which is not free everywhere.
            true if self.paths.iter().all(|path| path.wake_in(self.born).is_none()) => None,
            true => self.paths.iter().filter_map(|path| path.wake_in(Instant::now())).min(),
            false => Some(Duration::ZERO),
        };
        if let Some(wake) = wake {
            self.bell.set_within(wake);
        }
    }

    fn left(&self, key: usize) -> u64 {
        self.flights.get(key).map_or(0, Flight::left)
    }

    /// What memory of ours is registered as.
    fn pinned(&mut self, rails: &Rails, span: Span) -> Option<Arc<Pinned>> {
        if let Some(pinned) = self.memo.upgrade().filter(|pinned| pinned.covers(span)) {
            return Some(pinned);
        }
        let pinned = rails.over(span)?;
        self.memo = Arc::downgrade(&pinned);
        Some(pinned)
    }

    /// Gives as much of a part as fits to the path with the least on it; says how many bytes.
    fn assign(&mut self, rails: &Rails, part: Part) -> Result<usize, Hold> {
        let Some(pinned) = self.pinned(rails, part.local) else {
            return Err(Hold::Never(OpError::Unreachable));
        };
        let granted = match self.keys.look(part.kind, &part.remote) {
            Lookup::Granted(granted) => granted,
            Lookup::Denied(status) => return Err(Hold::Never(OpError::Remote(status))),
            Lookup::Wait => return Err(Hold::Key),
            Lookup::Ask(region) => {
                self.ask(region);
                return Err(Hold::Key);
            }
        };
        let best = Choice::among(&self.paths, &pinned, granted, &part);
        let Choice { path: Some(at), .. } = best else {
            return Err(self.hold_for(best, &part));
        };
        let path = &mut self.paths[at];
        let reach = granted.over(path.id, &part.remote);
        let (Some((reach, addr)), Some(ours), Some(len)) =
            (reach, pinned.with(path.ours), path.room_for(part.local.len))
        else {
            return Err(Hold::Full);
        };
        let (first, _) = part.split(len);
        path.add(first, ours.local_key(), addr, reach.key);
        if best.unasked {
            self.ask(RegionId { slot: part.remote.slot, key: part.remote.key });
        }
        Ok(len)
    }

    /// Why no path takes a part.
    fn hold_for(&mut self, choice: Choice, part: &Part) -> Hold {
        if choice.full {
            return Hold::Full;
        }
        let region = RegionId { slot: part.remote.slot, key: part.remote.key };
        if choice.unasked {
            self.ask(region);
        }
        if self.keys.is_awaited(&part.remote) {
            return Hold::Key;
        }
        Hold::Never(OpError::Unreachable)
    }

    pub(super) fn ask(&mut self, region: RegionId) {
        if self.keys.ask(region, self.epoch) {
            self.notes.push_back(Note::Ask(region));
        }
    }

    /// A part has ended, well or not.
    pub(super) fn part_ended(&mut self, part: Part, result: Result<(), RequestError>) {
        let why = result.err().map(|e| match e {
            RequestError::Access => {
                // What it is asked again next time tells more.
                self.keys.forget(RegionId { slot: part.remote.slot, key: part.remote.key });
                OpError::Remote(Status::UnknownKey)
            }
            RequestError::Local => OpError::LocalFault,
            RequestError::Failed(why) => OpError::Device(why.into()),
        });
        self.drop_part(&part, why);
    }

    fn drop_part(&mut self, part: &Part, why: Option<OpError>) {
        let Some(flight) = self.flights.get_mut(part.flight) else { return };
        flight.parts = flight.parts.saturating_sub(1);
        if let Some(why) = why {
            flight.fail(why);
        }
        self.end_if_over(part.flight);
        let region = RegionId { slot: part.remote.slot, key: part.remote.key };
        self.release_if_unused(region);
    }

    fn end_if_over(&mut self, key: usize) {
        if self.flights.get(key).is_some_and(Flight::is_over) {
            let flight = self.flights.remove(key);
            self.endings.push(flight.end());
        }
    }

    /// How an operation ended that nobody has been told of.
    fn take_ending(&mut self, generation: u32) -> Option<OpResult> {
        let at = self.endings.iter().position(|(of, ..)| *of == generation)?;
        Some(self.endings.swap_remove(at).2)
    }

    /// Whether nothing more of a part's operation is to be requested.
    fn is_ending(&self, part: &Part) -> bool {
        self.flights.get(part.flight).is_none_or(|flight| flight.verdict.is_some())
    }

    /// Operations that waited for a key try again.
    pub(super) fn unpark(&mut self) {
        let parked = std::mem::take(&mut self.parked);
        self.queue.extend(parked);
    }

    /// Whether a part of a region is under way.
    pub(super) fn uses(&self, region: RegionId) -> bool {
        let RegionId { slot, key } = region;
        self.paths.iter().any(|path| path.uses(slot, key))
            || self.again.iter().any(|p| (p.remote.slot, p.remote.key) == (slot, key))
    }
}

/// Which path takes a part.
#[derive(Default)]
struct Choice {
    path: Option<usize>,
    /// Some could, but for room.
    full: bool,
    /// Some works that the peer has not told us about for this region.
    unasked: bool,
}

impl Choice {
    fn among(paths: &[Path], pinned: &Pinned, granted: &Granted, part: &Part) -> Self {
        let mut choice = Self::default();
        let mut least = u64::MAX;
        for (at, path) in paths.iter().enumerate().filter(|(_, path)| path.is_up()) {
            if pinned.with(path.ours).is_none() {
                continue;
            }
            if granted.over(path.id, &part.remote).is_none() {
                choice.unasked = true;
            } else if path.room_for(part.local.len).is_none() {
                choice.full = true;
            } else if path.load() < least {
                (choice.path, least) = (Some(at), path.load());
            }
        }
        choice
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
            state.generation = state.generation.wrapping_add(1);
            let generation = state.generation;
            let key = state.flights.insert(Flight::new(op, generation));
            state.queue.push_back(key);
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
        self.with(|state| {
            let State { lent, notes, .. } = state;
            lent.revoke(slot, notes)
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
        Interest { fd, write: false }
    }

    fn bye(&self) {}

    fn kill(&self) {
        let _turn = self.turn.lock();
        self.with(|state| {
            state.killed = true;
            let State { paths, bell, .. } = state;
            paths.iter_mut().for_each(|path| path.end(bell));
            state.queue.clear();
            state.parked.clear();
            state.again.clear();
            state.notes.clear();
            state.lent = Lent::default();
            for mut flight in state.flights.drain() {
                flight.fail(OpError::LaneDown);
                state.endings.push(flight.end());
            }
        });
    }
}

impl Drop for RmaLane {
    fn drop(&mut self) {
        self.kill();
    }
}
