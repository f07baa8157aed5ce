//! The lane's state, which its lock guards: operations, paths and keys; and how a part is assigned
//! to a path.

mod staging;

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use slab::Slab;
use uccl_device::cuda::GpuError;
use uccl_fabric::rail::RequestError;
use uccl_fabric::{
    gpu::{self, CopyBy},
    lane::{OpError, OpResult, Operation},
    mem::Span,
    region::Rights,
};
use uccl_wire::{
    frame::Status,
    rails::{Note, PathKey, RegionId},
};

use self::staging::Staging;
use super::{
    bell::Bell,
    bounce::{Copies, CopySide, Site},
    flight::{EndedOp, Flight, Part},
    keys::{GrantedRegion, Keys, MissingKey, region_of},
    left::EndingChannels,
    lent::Grants,
    path::{ASIDE_LOOK, Local, Path},
    pinned::PinnedRegion,
    rails::Rails,
};

pub(super) struct State {
    pub(super) bell: Bell,
    pub(super) paths: Vec<Path>,
    pub(super) keys: Keys,
    pub(super) lent: Grants,
    pub(super) staging: Staging,
    /// The landing area, which the peer uses in place of memory that no rail takes. Made when a
    /// region first needs it.
    pub(super) landing: Site,
    pub(super) copies: Copies,
    pub(super) notes: VecDeque<Note>,
    /// Our own offer of rails is due, as soon as they are open.
    pub(super) is_to_offer: bool,
    /// Operations in `parked` wait until regions of ours are registered; and [`Rails::registered`]
    /// when one of them last had to.
    registering: Option<u64>,
    /// The peer has sent its offer of rails.
    pub(super) offered: bool,
    /// Every path has been tried, or has had enough time; and the peer has been told so.
    pub(super) settled: bool,
    /// When the first path came up.
    pub(super) first_up: Option<Instant>,
    /// Incremented when a channel comes up.
    pub(super) epoch: u64,
    pub(super) flights: Slab<Flight>,
    /// Total bytes of the operations in `flights`.
    pub(super) outstanding: u64,
    generation: u32,
    /// Operations with bytes that are not requested yet, in the order in which they were posted.
    pub(super) queue: VecDeque<usize>,
    /// Operations that wait for a key, or for a registration or chunks of ours. They go back to
    /// `queue` when an answer comes.
    pub(super) parked: Vec<usize>,
    /// Parts to be requested again, before anything else.
    pub(super) again: VecDeque<Part>,
    pub(super) endings: Vec<EndedOp>,
    /// A buffer for parts that ended, kept between looks.
    pub(super) ended: Vec<(Part, Result<(), RequestError>)>,
    memo: Weak<PinnedRegion>,
    /// A thread may be asleep on the bell.
    pub(super) is_watched: bool,
    /// When the lane was made. Used where any time will do.
    born: Instant,
    pub(super) killed: bool,
    /// The remains of the lane when it has been killed.
    pub(super) left: Option<Arc<EndingChannels>>,
}

/// How often the peer's device may refuse a part that the peer granted, before its operation fails.
const MOST_REFUSALS: u8 = 3;

/// Why a part is not requested right now.
pub(super) enum Hold {
    /// Every path that could take it is full.
    Full,
    /// Its key is not known yet.
    Key,
    /// This lane can never request it.
    Never(OpError),
}

impl State {
    /// The keys with which a peer that has these rights names the memory at this address: one for
    /// each path with a device that takes it.
    pub(super) fn keys_of(
        &mut self,
        pinned: &PinnedRegion,
        addr: usize,
        rights: Rights,
    ) -> Vec<PathKey> {
        let key_of = |path: &mut Path| {
            let key = path.key_of(pinned, rights)?;
            Some(PathKey { id: path.id, base: pinned.base_of(addr, &key), key: key.key.to_vec() })
        };
        self.paths.iter_mut().filter_map(key_of).collect()
    }

    /// The state of a new lane: no paths and no operations.
    pub(super) fn new(bell: Bell, copy_by: &CopyBy) -> Self {
        Self {
            bell,
            paths: Vec::new(),
            keys: Keys::default(),
            lent: Grants::default(),
            staging: Staging::default(),
            landing: Site::Empty,
            copies: Copies::new(copy_by),
            notes: VecDeque::new(),
            is_to_offer: false,
            registering: None,
            offered: false,
            settled: false,
            first_up: None,
            epoch: 1,
            flights: Slab::new(),
            outstanding: 0,
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
            left: None,
        }
    }

    /// Adds an operation. Returns its index in `flights` and its generation, which tells it from
    /// others at that index.
    pub(super) fn begin(&mut self, op: Operation) -> (usize, u32) {
        self.generation = self.generation.wrapping_add(1);
        self.outstanding += op.len();
        let key = self.flights.insert(Flight::new(op, self.generation));
        self.queue.push_back(key);
        (key, self.generation)
    }

    /// Begins to end all paths, each of which may take its device long. False if that was done
    /// before.
    pub(super) fn shut(&mut self) -> bool {
        let Self { paths, bell, .. } = self;
        if !std::mem::replace(&mut self.killed, true) {
            paths.iter_mut().for_each(|path| path.shut(bell));
            return true;
        }
        false
    }

    /// Whether our ends of all paths are gone, and no memory is being locked.
    pub(super) fn is_shut(&self) -> bool {
        self.paths.iter().all(Path::is_gone)
            && self.landing.is_still()
            && self.staging.area.is_still()
    }

    /// Ends every operation, and forgets everything else. Keeps the memory that paths may touch
    /// until they are gone, and the operations with parts there.
    pub(super) fn kill(&mut self, rails: &Arc<Rails>) {
        let still: Vec<_> = self.paths.iter_mut().filter_map(Path::end).collect();
        let copied = self.copies.clear();
        let (areas, makings): (Vec<_>, Vec<_>) =
            [self.staging.end(), self.landing.end()].into_iter().unzip();
        let areas = areas.into_iter().flatten().collect();
        let makings: Vec<_> = makings.into_iter().flatten().collect();
        self.queue.clear();
        self.parked.clear();
        self.again.clear();
        self.notes.clear();
        let lent = std::mem::take(&mut self.lent);
        self.outstanding = 0;
        let parts = || still.iter().flat_map(|(_, parts)| parts);
        let held: HashSet<usize> = parts().map(|part| part.flight).collect();
        let registrations = parts().map(|part| part.registration).collect();
        // An operation must not be tried again over another lane while a GPU may still use its
        // memory.
        let why = copied.map_or_else(OpError::from, |()| OpError::LaneDown);
        let mut operations = Vec::new();
        for (key, mut flight) in std::mem::take(&mut self.flights) {
            flight.fail(why.clone());
            let ended = if held.contains(&key) { &mut operations } else { &mut self.endings };
            ended.push(flight.end());
        }
        if still.is_empty() && makings.is_empty() {
            return;
        }
        self.left = Some(Arc::new(EndingChannels {
            channels: still.into_iter().map(|(channel, _)| channel).collect(),
            registrations,
            lent: lent.by_slot.into_keys().collect(),
            operations: Mutex::new(operations),
            makings,
            areas,
            rails: Arc::clone(rails),
        }));
    }

    /// Prepares for sleep. None if there is something to do right now.
    pub(super) fn arm(&mut self, stall: Option<Duration>) -> Option<()> {
        if self.copies.are_under_way() {
            // No event tells when a copy ends, so copies have to be polled.
            return None;
        }
        let now = Instant::now();
        let mut wake = self.aside_in();
        for path in &mut self.paths {
            let (armed, due) = path.arm(now, stall);
            if !armed {
                return None;
            }
            wake = [wake, due].into_iter().flatten().min();
        }
        self.bell.set(now, wake);
        Some(())
    }

    /// Makes a sleeper wake in time for work that came up after it went to sleep.
    pub(super) fn wake_sleepers(&mut self) {
        let wake = match self.notes.is_empty() && !self.copies.are_under_way() {
            // Here any time will do, so no clock is read: that is not free everywhere.
            true if self.paths.iter().all(|path| path.wake_in(self.born).is_none()) => {
                self.aside_in()
            }
            true => {
                let paths = self.paths.iter().filter_map(|path| path.wake_in(Instant::now()));
                paths.chain(self.aside_in()).min()
            }
            false => Some(Duration::ZERO),
        };
        if let Some(wake) = wake {
            self.bell.set_within(wake);
        }
    }

    /// How soon to look at other threads with work that belongs to no path: they open devices and
    /// register memory.
    fn aside_in(&self) -> Option<Duration> {
        let waits = self.is_to_offer || self.registering.is_some() || self.staging.area.is_making();
        if waits { Some(ASIDE_LOOK) } else { self.lent.wake_in() }
    }

    /// Puts the operations that wait for registrations of ours back into the queue, if one has been
    /// made. True if there were any.
    pub(super) fn look_at_registrations(&mut self, rails: &Rails) -> bool {
        let made = self.registering.is_some_and(|before| rails.registered() != before);
        if made {
            self.registering = None;
            self.unpark();
        }
        made
    }

    /// Puts the operations that wait for chunks of ours back into the queue, if these have been
    /// made or cannot be. True if there were any.
    pub(super) fn look_at_areas(&mut self) -> bool {
        let landed = self.landing.look();
        if let Some(why) = self.landing.refusal() {
            tracing::warn!("no host memory through which the peer reaches GPUs: {why}");
        }
        let made = self.staging.area.look();
        if made {
            self.staging.have_chunks();
            self.unpark();
        }
        made || landed
    }

    /// The registration that covers this memory of ours, if there is one.
    pub(super) fn pinned(&mut self, rails: &Rails, span: Span) -> Option<Arc<PinnedRegion>> {
        let serves = |pinned: &Arc<PinnedRegion>| pinned.covers(span) && !pinned.is_retired();
        if let Some(pinned) = self.memo.upgrade().filter(serves) {
            return Some(pinned);
        }
        let pinned = rails.over(span)?;
        self.memo = Arc::downgrade(&pinned);
        Some(pinned)
    }

    /// Gives the start of a part, as much as fits, to the path with the fewest bytes under way.
    /// Returns how many bytes it took.
    pub(super) fn assign(&mut self, rails: &Rails, part: Part) -> Result<usize, Hold> {
        let Some(pinned) = self.pinned(rails, part.local) else {
            return Err(self.unregistered(rails, part.local));
        };
        let granted = match self.keys.look(part.kind, &part.remote) {
            Ok(granted) => granted,
            Err(why) => return Err(self.missing(why)),
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
        let local = Local { key: ours.local_key(), registration: pinned.number };
        path.add(first, local, addr, reach.key);
        if best.unasked {
            self.ask(region_of(&part.remote));
        }
        Ok(len)
    }

    /// Why no registration covers this memory of ours: it is yet to be made, or there is none.
    fn unregistered(&mut self, rails: &Rails, span: Span) -> Hold {
        // Read before the look: a registration that ends after it makes this number grow.
        let registered = rails.registered();
        if rails.is_to_reach(span) {
            self.registering.get_or_insert(registered);
            return Hold::Key;
        }
        if rails.over(span).is_some() {
            // It has just been made: the next look finds that the number has grown.
            self.registering = Some(registered.wrapping_sub(1));
            return Hold::Key;
        }
        Hold::Never(OpError::Unreachable)
    }

    /// Asks for an unknown key if nobody has yet. Says why the part is held: it waits for the key,
    /// or the peer denied it.
    pub(super) fn missing(&mut self, why: MissingKey) -> Hold {
        match why {
            MissingKey::Denied(status) => return Hold::Never(OpError::Remote(status)),
            MissingKey::Wait => {}
            MissingKey::Ask(region) => self.ask(region),
        }
        Hold::Key
    }

    /// The reason why no path takes a part, given the result of [`Choice::among`].
    fn hold_for(&mut self, choice: Choice, part: &Part) -> Hold {
        if choice.full {
            return Hold::Full;
        }
        let region = region_of(&part.remote);
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

    /// Handles the end of a part. A part that the peer's device refused is tried again, up to
    /// [`MOST_REFUSALS`] times.
    pub(super) fn part_ended(
        &mut self,
        rails: &Rails,
        part: Part,
        result: Result<(), RequestError>,
    ) {
        if result == Err(RequestError::Access) && part.refusals < MOST_REFUSALS {
            return self.ask_again(part);
        }
        let why = result.err().map(|e| match e {
            RequestError::Access => OpError::Remote(Status::UnknownKey),
            RequestError::Local => OpError::LocalFault,
            RequestError::Failed(why) => OpError::Device(why.into()),
        });
        self.drop_part(rails, &part, why);
    }

    /// Asks the peer for the key again, after its device refused a request that the peer had
    /// granted. A device that is being removed, or that belongs to a dying process, may lose its
    /// regions before its queue pairs.
    fn ask_again(&mut self, part: Part) {
        self.keys.forget(region_of(&part.remote));
        self.again.push_back(Part { refusals: part.refusals + 1, ..part });
    }

    pub(super) fn drop_part(&mut self, rails: &Rails, part: &Part, why: Option<OpError>) {
        let Some(flight) = self.flights.get_mut(part.flight) else { return };
        flight.parts = flight.parts.saturating_sub(1);
        if let Some(why) = why {
            flight.fail(why);
        }
        if let Some(batch) = part.batch {
            self.batch_part_ended(rails, batch);
        }
        self.end_if_over(part.flight);
        self.release_if_unused(region_of(&part.remote));
    }

    /// Handles the copies that have ended. True if there were any.
    pub(super) fn look_at_copies(&mut self) -> bool {
        let mut moved = false;
        while let Some(gpu::StepEnd { what, result }) = self.copies.ended() {
            moved = true;
            match what {
                CopySide::Batch(at) => self.batch_copied(at, result.map(drop)),
                CopySide::Peer(chunk) => self.peer_copied(chunk, result.map(drop)),
            }
        }
        moved
    }

    pub(super) fn end_if_over(&mut self, key: usize) {
        if self.flights.get(key).is_some_and(Flight::is_over) {
            let flight = self.flights.remove(key);
            self.outstanding -= flight.len_bytes();
            self.endings.push(flight.end());
        }
    }

    /// Removes and returns the result of an operation before its completion is called.
    pub(super) fn take_ending(&mut self, generation: u32) -> Option<OpResult> {
        let at = self.endings.iter().position(|(of, ..)| *of == generation)?;
        Some(self.endings.swap_remove(at).2)
    }

    /// Whether the part's operation has failed or was cancelled, so that nothing more of it is to
    /// be requested.
    pub(super) fn is_ending(&self, part: &Part) -> bool {
        self.flights.get(part.flight).is_none_or(|flight| flight.verdict.is_some())
    }

    /// Puts the operations that waited for a key back into the queue.
    pub(super) fn unpark(&mut self) {
        let parked = std::mem::take(&mut self.parked);
        self.queue.extend(parked);
    }

    /// Whether no path that is up has room for even one byte.
    pub(super) fn is_full(&self) -> bool {
        !self.paths.iter().any(|path| path.is_up() && path.room_for(1).is_some())
    }

    /// Whether one of our devices has a request under way that names our memory by this
    /// registration.
    pub(super) fn is_at_work_with(&self, pinned: &PinnedRegion) -> bool {
        self.paths.iter().any(|path| path.is_at_work_with(pinned.number))
    }

    /// A copy that the peer asked for has ended.
    fn peer_copied(&mut self, chunk: u16, result: Result<(), GpuError>) {
        let status = match result {
            Ok(()) => Status::Ok,
            Err(e) => {
                tracing::warn!("data of a peer's could not be copied to or from a GPU: {e}");
                Status::Fault
            }
        };
        self.notes.push_back(Note::Staged { chunk, status });
    }

    /// Sends `Released` for a region that the peer has revoked, once none of our requests for it is
    /// under way.
    pub(super) fn release_if_unused(&mut self, region: RegionId) {
        let Some(at) = self.lent.releasing.iter().position(|other| *other == region) else {
            return;
        };
        if !self.uses(region) {
            self.lent.releasing.swap_remove(at);
            self.notes.push_back(Note::Released(region));
        }
    }

    pub(super) fn pass_on_releases(&mut self) {
        for region in self.lent.releasing.clone() {
            self.release_if_unused(region);
        }
    }

    /// Whether a part for this region is under way, staged, or to be requested again.
    pub(super) fn uses(&self, region: RegionId) -> bool {
        let RegionId { slot, key } = region;
        self.paths.iter().any(|path| path.uses(slot, key))
            || self.staging.uses(region)
            || self.again.iter().any(|part| region_of(&part.remote) == region)
    }
}

/// Which path takes a part, and if none, why.
#[derive(Default)]
struct Choice {
    path: Option<usize>,
    /// Some path reaches both sides but has no room.
    full: bool,
    /// Some path is up for which the peer has not told us this region's key.
    unasked: bool,
}

impl Choice {
    fn among(paths: &[Path], pinned: &PinnedRegion, granted: &GrantedRegion, part: &Part) -> Self {
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
