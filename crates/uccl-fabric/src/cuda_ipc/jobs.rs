//! Copies by GPUs that are under way on one lane.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::*},
    },
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Context, Direction, Event, Gpus, gather::Piece},
};

use super::opened::Place;
use crate::{
    gpu::{Engine, Route, op_error},
    lane::{Completion, OpError, OpKind, OpName, OpResult, Operation, access_of},
    mem::{Access, RemoteSpan, Span},
    shm::{Direct, OwnedHazard},
};

/// Distinct regions that one flight touches: each takes a hazard word, and there are 64.
const MAX_SLOTS: usize = 32;

/// Copies by GPUs that are under way.
#[derive(Default)]
pub struct GpuJobs {
    /// By the ordinal of their GPU.
    engines: Mutex<Vec<(u32, Arc<Mutex<Engine>>)>>,
    flights: Mutex<Vec<Flight>>,
    /// Flights that have ended and whose posters have not been told.
    landed: Mutex<Vec<(Arc<dyn Completion>, OpResult)>>,
    open: AtomicUsize,
    bytes: AtomicU64,
    next: AtomicU64,
}

/// What was enqueued together.
struct Flight {
    event: Event,
    engine: Arc<Mutex<Engine>>,
    bytes: u64,
    done: Arc<dyn Completion>,
    _held: Held,
}

/// What keeps the peer's memory where it is while it is copied: told to its owner, and to our driver.
struct Held {
    _places: SmallVec<[Place; 1]>,
    _hazards: SmallVec<[OwnedHazard; 1]>,
}

/// An operation in several parts, which ends with the last.
pub struct Parts {
    left: AtomicUsize,
    error: Mutex<Option<OpError>>,
    done: Arc<dyn Completion>,
}

impl Parts {
    /// What each of `count` parts is to tell its end.
    pub fn of(count: usize, done: Arc<dyn Completion>) -> Arc<dyn Completion> {
        Arc::new(Self { left: AtomicUsize::new(count), error: Mutex::default(), done })
    }
}

impl Completion for Parts {
    fn complete(self: Arc<Self>, result: OpResult) {
        if let Err(e) = result {
            self.error.lock().get_or_insert(e);
        }
        if self.left.fetch_sub(1, AcqRel) == 1 {
            let error = self.error.lock().take();
            Arc::clone(&self.done).complete(error.map_or(Ok(()), Err));
        }
    }
}

impl GpuJobs {
    /// Enqueues pieces of an operation of which one side at least is a GPU's, few enough regions at
    /// a time; `done` is told of their end.
    ///
    /// # Errors
    /// Nothing moves then. [`OpError::HostOnly`]: no GPU of this process reaches both sides.
    ///
    /// # Safety
    /// The local pieces must stay valid until `done` has been told.
    pub unsafe fn post(
        &self,
        direct: &Direct,
        op: &Operation,
        range: Range<usize>,
        done: &Arc<dyn Completion>,
    ) -> Result<OpName, OpError> {
        let (local, remote) = (&op.local[range.clone()], &op.remote[range]);
        let hazards = self.claim(direct, remote);
        let access = access_of(op.kind);
        let context = context_of(direct, op.memory, remote)?;
        let engine = self.engine(context)?;
        let mut copying = engine.lock();
        let mut pieces = std::mem::take(&mut copying.pieces);
        pieces.clear();
        let mut here = local.iter();
        let found = direct.gpu_places(access, remote, context, |there| {
            pieces.extend(here.next().map(|span| piece(access, span, there)));
        });
        let copied = found.and_then(|there| {
            let route = route(op.kind, op.memory, there.device);
            // SAFETY: the caller's promise for our side; the hazards and the places hold the peer's.
            let event = unsafe { copying.copy(&pieces, route) }.map_err(|e| {
                // Nothing may move once we have said that it failed.
                copying.settle();
                op_error(e)
            })?;
            Ok((there, event))
        });
        copying.pieces = pieces;
        drop(copying);
        let (there, event) = copied?;
        let bytes = local.iter().map(|span| span.len as u64).sum();
        self.bytes.fetch_add(bytes, Relaxed);
        let held = Held { _places: there.places, _hazards: hazards };
        let done = Arc::clone(done);
        self.flights.lock().push(Flight { event, engine, bytes, done, _held: held });
        self.open.fetch_add(1, Release);
        Ok(OpName(self.next.fetch_add(1, Relaxed)))
    }

    /// Tells the owner which regions are touched. Waits for words that are in use, by flights of ours.
    fn claim(&self, direct: &Direct, remote: &[RemoteSpan]) -> SmallVec<[OwnedHazard; 1]> {
        let mut slots: SmallVec<[u32; MAX_SLOTS]> = SmallVec::new();
        for span in remote {
            // Neighbours mostly lie in one region.
            if slots.last() != Some(&span.slot) {
                slots.push(span.slot);
            }
        }
        slots.sort_unstable();
        slots.dedup();
        loop {
            let claimed: Option<_> = slots.iter().map(|slot| direct.claim_owned(*slot)).collect();
            if let Some(hazards) = claimed {
                return hazards;
            }
            self.harvest();
            std::thread::yield_now();
        }
    }

    fn engine(&self, context: &'static Context) -> Result<Arc<Mutex<Engine>>, OpError> {
        let gpu_index = context.device().ordinal();
        let mut engines = self.engines.lock();
        if let Some((_, engine)) = engines.iter().find(|(other, _)| *other == gpu_index) {
            return Ok(Arc::clone(engine));
        }
        let engine = Arc::new(Mutex::new(Engine::new(context).map_err(op_error)?));
        engines.push((gpu_index, Arc::clone(&engine)));
        Ok(engine)
    }

    /// Whether copies are under way, or have ended and their posters do not know.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.open.load(Acquire) > 0
    }

    /// Bytes under way.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Looks which flights have ended; lets go of what they held.
    fn harvest(&self) {
        let mut flights = self.flights.lock();
        let ended = flights.extract_if(.., |flight| !matches!(flight.event.is_done(), Ok(false)));
        let ended: SmallVec<[Flight; 4]> = ended.collect();
        if ended.is_empty() {
            return;
        }
        let mut landed = self.landed.lock();
        for flight in ended {
            let result = flight.event.is_done().map(drop).map_err(op_error);
            self.bytes.fetch_sub(flight.bytes, Relaxed);
            flight.engine.lock().reuse(flight.event);
            landed.push((flight.done, result));
        }
    }

    /// Tells the posters of what has ended; says whether there was any.
    pub fn progress(&self) -> bool {
        if !self.is_busy() {
            return false;
        }
        self.harvest();
        let landed = std::mem::take(&mut *self.landed.lock());
        let count = landed.len();
        self.open.fetch_sub(count, Release);
        landed.into_iter().for_each(|(done, result)| done.complete(result));
        count > 0
    }

    /// Waits for what is under way: enqueued copies cannot be taken back.
    pub fn finish(&self) {
        while self.is_busy() {
            if !self.progress() {
                std::thread::yield_now();
            }
        }
    }
}

/// Cuts pieces so that each part touches few enough regions.
pub(crate) fn batches(remote: &[RemoteSpan]) -> SmallVec<[Range<usize>; 1]> {
    let mut batches = SmallVec::new();
    let (mut start, mut slots) = (0, SmallVec::<[u32; MAX_SLOTS]>::new());
    let mut last = None;
    for (at, span) in remote.iter().enumerate() {
        if last.replace(span.slot) == Some(span.slot) || slots.contains(&span.slot) {
            continue;
        }
        if slots.len() == MAX_SLOTS {
            batches.push(start..at);
            start = at;
            slots.clear();
        }
        slots.push(span.slot);
    }
    batches.push(start..remote.len());
    batches
}

/// The GPU that copies: ours if our memory is a GPU's, else the one that the peer's memory is on.
fn context_of(
    direct: &Direct,
    ours: MemoryKind,
    remote: &[RemoteSpan],
) -> Result<&'static Context, OpError> {
    if let Some(device) = ours.device() {
        return Gpus::get().device(device).and_then(|device| device.context()).map_err(op_error);
    }
    let gpu_there = remote.iter().find_map(|span| direct.gpu_of(span));
    let opened = gpu_there.ok_or(OpError::HostOnly("neither side is known to be a GPU's"))?;
    match opened.context() {
        Some(context) => context.map_err(op_error),
        None => Err(OpError::HostOnly(
            "the peer's GPU is not visible to this process (CUDA_VISIBLE_DEVICES), and our memory is the host's",
        )),
    }
}

/// What of the peer's is not device memory is locked.
fn route(kind: OpKind, ours: MemoryKind, device_there: bool) -> Route {
    let here = ours.device().is_some();
    let (from, to) = match kind {
        OpKind::Read => (device_there, here),
        OpKind::Write => (here, device_there),
    };
    let direction = match (from, to) {
        (true, true) => Direction::DeviceToDevice,
        (true, false) => Direction::DeviceToHost,
        (false, _) => Direction::HostToDevice,
    };
    let is_push = from && to && kind == OpKind::Write;
    Route { direction, by_kernel: ours != MemoryKind::Host, is_push }
}

fn piece(access: Access, here: &Span, there: u64) -> Piece {
    let (local, len_bytes) = (here.addr as u64, here.len as u64);
    match access {
        Access::Read => Piece { destination: local, source: there, len_bytes },
        Access::Write => Piece { destination: there, source: local, len_bytes },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_touch_few_enough_regions_and_cover_all_pieces() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let (count, slots) = (rng.usize(1..400), rng.u32(1..100));
            let remote: Vec<_> = (0..count)
                .map(|_| RemoteSpan { addr: 0, len: 1, key: 0, slot: rng.u32(0..slots) })
                .collect();
            let parts = batches(&remote);
            let mut at = 0;
            for part in &parts {
                assert_eq!(part.start, at);
                at = part.end;
                let mut slots: Vec<_> = remote[part.clone()].iter().map(|span| span.slot).collect();
                slots.sort_unstable();
                slots.dedup();
                assert!(!slots.is_empty() && slots.len() <= MAX_SLOTS);
            }
            assert_eq!(at, count);
        }
    }

    #[test]
    fn a_route_knows_who_reaches_what() {
        use MemoryKind::{Cuda, Host, Pinned};
        let gpu = Cuda { device: 0 };
        let of = |kind, ours, device| {
            let route = route(kind, ours, device);
            (route.direction, route.by_kernel)
        };
        assert_eq!(of(OpKind::Write, gpu, true), (Direction::DeviceToDevice, true));
        assert_eq!(of(OpKind::Write, gpu, false), (Direction::DeviceToHost, true));
        assert_eq!(of(OpKind::Read, gpu, false), (Direction::HostToDevice, true));
        assert_eq!(of(OpKind::Write, Pinned, true), (Direction::HostToDevice, true));
        assert_eq!(of(OpKind::Read, Host, true), (Direction::DeviceToHost, false));
    }
}
