//! The turns of the lanes of this process that make one GPU copy.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock},
    time::Instant,
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::cuda::{Context, GpuError, Priority};
use uccl_fabric::{gpu::Engine, lane::OpName};

use super::{
    ledger::Ledger,
    queue::{Flying, Next, Queue, SLICE, Slice},
    tuning::Tuning,
};

/// By the ordinal of the GPU.
static GPUS: LazyLock<Mutex<HashMap<u32, Arc<Turns>>>> = LazyLock::new(Mutex::default);

/// The other GPU of a copy: how far behind the one that copies it comes in the order of all GPUs, which is the same
/// in every process. So the GPUs of a machine that all begin with the next one each begin with a different one. 0 is
/// the GPU itself, and the host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct Other(u128);

impl Other {
    /// Between a GPU that copies and a GPU, each by its UUID.
    pub(super) fn between(own: [u8; 16], there: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(there).wrapping_sub(u128::from_be_bytes(own)))
    }
}

/// The slices that one GPU copies, and the lanes of this process that have more for it. A thread that makes progress
/// on one lane does so for all, so that no lane waits for another's threads.
#[derive(Default)]
pub(super) struct Turns {
    waiting: Mutex<Waiting>,
    /// No limits: everything may be enqueued.
    unlimited: bool,
    /// Locked by the thread that enqueues.
    flying: Mutex<Vec<Flying>>,
    /// What copies the slices of all lanes, in the order of the turns.
    engines: Mutex<Vec<Arc<Mutex<Engine>>>>,
}

/// There are no hazard words for it.
pub(super) struct NotNow;

/// How many bytes may be enqueued.
#[derive(Clone, Copy)]
struct Limits {
    /// In one slice.
    slice: u64,
    /// For one other GPU.
    other: u64,
    /// In all slices together.
    all: u64,
    /// By the kernel, with so many blocks; 0: by copy engines.
    blocks: u32,
}

/// Lanes that have something to enqueue, the one that has waited longest first.
#[derive(Default)]
struct Waiting {
    lanes: VecDeque<Arc<Queue>>,
    /// For which GPU the last slice was.
    last: Other,
    /// When the GPU got something to do after it had nothing, and how many bytes it got since then while all of them
    /// were for one other GPU.
    since: Option<Instant>,
    alone: u64,
    given: u64,
    /// Whether there was more than one other GPU since then, and before then.
    crowded: bool,
    was_crowded: bool,
}

impl Turns {
    /// The turns of a GPU, by its ordinal.
    pub(super) fn of(gpu: u32) -> Arc<Self> {
        Arc::clone(GPUS.lock().entry(gpu).or_default())
    }

    /// Turns without limits.
    pub(super) fn unlimited() -> Self {
        Self { unlimited: true, ..Self::default() }
    }

    /// The engine that lanes share, if they share some.
    pub(super) fn engine(
        &self,
        context: &'static Context,
        other: Other,
    ) -> Result<Option<Arc<Mutex<Engine>>>, GpuError> {
        let count = Tuning::now().streams;
        if count == 0 {
            return Ok(None);
        }
        let mut engines = self.engines.lock();
        while engines.len() < count {
            engines.push(Arc::new(Mutex::new(Engine::new(context, Priority::Normal)?)));
        }
        Ok(engines.get((other.0 % count as u128) as usize).cloned())
    }

    /// Whether the GPU has slices, as far as is known.
    pub(super) fn is_flying(&self) -> bool {
        // A thread that has it locked enqueues more.
        self.flying.try_lock().is_none_or(|flying| !flying.is_empty())
    }

    /// Adds a lane that has something to enqueue.
    pub(super) fn join(&self, lane: &Arc<Queue>) {
        let mut waiting = self.waiting.lock();
        waiting.begin();
        if !waiting.lanes.iter().any(|other| Arc::ptr_eq(other, lane)) {
            waiting.lanes.push_back(Arc::clone(lane));
        }
    }

    /// Enqueues all that is left of an operation, whoever's turn it is, and returns what has enqueued it. `Ok(None)`: it is
    /// not here, and nothing of it is under way. `Err`: not all can be enqueued now.
    pub(super) fn rush(
        &self,
        lane: &Queue,
        name: OpName,
        ledger: &Arc<Ledger>,
    ) -> Result<Option<Arc<Mutex<Engine>>>, NotNow> {
        let mut flying = self.flying.lock();
        while let Some(next) = lane.next_of(name) {
            match next {
                Next::Slice(slice) => flying.extend(slice.enqueue(0)),
                Next::Later => return Err(NotNow),
                Next::Nothing => break,
            }
        }
        Ok(flying.iter().find_map(|slice| slice.engine_of(name, ledger)))
    }

    /// Ends the slices that the GPU has copied, and enqueues more within the limits. Does nothing while another
    /// thread does this: that thread may be in the driver for long.
    pub(super) fn drive(&self) {
        let Some(mut flying) = self.flying.try_lock() else { return };
        let mut at = 0;
        while at < flying.len() {
            match flying[at].result() {
                // The order does not matter: each search goes through the whole list.
                Some(result) => flying.swap_remove(at).land(result),
                None => at += 1,
            }
        }
        loop {
            let Some((slice, blocks)) = self.waiting.lock().next(&flying, self.unlimited) else {
                return;
            };
            if let Some(slice) = slice.enqueue(blocks) {
                flying.push(slice);
            }
        }
    }
}

impl Waiting {
    /// The next slice within the limits: for the GPU behind that of the last one, of those for which something waits,
    /// and of the lane that has waited longest.
    fn next(&mut self, flying: &[Flying], unlimited: bool) -> Option<(Slice, u32)> {
        let mut late: SmallVec<[*const Queue; 4]> = SmallVec::new();
        loop {
            let fronts: SmallVec<[Option<Other>; 8]> =
                self.lanes.iter().map(|lane| lane.front()).collect();
            if let Some(gone) = fronts.iter().position(Option::is_none) {
                self.lanes.remove(gone);
                continue;
            }
            if fronts.is_empty() && flying.is_empty() {
                self.since = None;
            }
            if fronts.is_empty() || self.holds_back(flying) {
                return None;
            }
            let limits = if unlimited { Limits::NONE } else { self.limits(flying, &fronts) };
            let enqueued = |other| -> u64 {
                let of = flying.iter().filter(|slice| slice.other() == other);
                of.map(|slice| slice.bytes).sum()
            };
            let counted: u64 = flying.iter().map(|slice| slice.bytes).sum();
            if counted.saturating_add(limits.slice) > limits.all {
                return None;
            }
            let may = |(at, front): (usize, &Option<Other>)| {
                let lane = Arc::as_ptr(&self.lanes[at]);
                let other = front.filter(|_| !late.contains(&lane))?;
                let fits = enqueued(other).saturating_add(limits.slice) <= limits.other;
                fits.then_some((other <= self.last, other, at))
            };
            let (_, other, at) = fronts.iter().enumerate().filter_map(may).min()?;
            let lane = self.lanes.remove(at)?;
            match lane.next(limits.slice) {
                Next::Slice(slice) => {
                    self.last = other;
                    self.alone += slice.bytes();
                    self.given += slice.bytes();
                    self.lanes.push_back(lane);
                    return Some((slice, limits.blocks));
                }
                Next::Later => {
                    late.push(Arc::as_ptr(&lane));
                    self.lanes.push_back(lane);
                }
                Next::Nothing => {}
            }
        }
    }

    /// The GPU has something to do, perhaps after it had nothing.
    fn begin(&mut self) {
        if self.since.is_none() {
            self.since = Some(Instant::now());
            (self.last, self.alone, self.given) = (Other::default(), 0, 0);
            self.was_crowded = std::mem::take(&mut self.crowded);
        }
    }

    /// Whether to wait a moment for operations that go to other GPUs, as there were some the last time. Else all GPUs
    /// could begin with the same one, as their programs do.
    fn holds_back(&self, flying: &[Flying]) -> bool {
        let begins = self.was_crowded && flying.is_empty() && self.given == 0;
        begins && self.since.is_some_and(|since| since.elapsed() < Tuning::now().hold)
    }

    fn limits(&mut self, flying: &[Flying], fronts: &[Option<Other>]) -> Limits {
        let tuning = Tuning::now();
        let mut others = fronts.iter().copied().flatten().chain(flying.iter().map(Flying::other));
        let first = others.next();
        let crowded = others.any(|other| Some(other) != first);
        if crowded {
            self.alone = 0;
        }
        self.crowded |= crowded;
        if crowded || self.was_crowded && self.alone < 2 * tuning.other {
            let Tuning { slice, other, all, blocks, .. } = tuning;
            Limits { slice, other, all, blocks }
        } else {
            Limits { slice: SLICE, other: tuning.alone, all: tuning.alone, blocks: 0 }
        }
    }
}

impl Limits {
    const NONE: Self =
        Self { slice: u64::MAX / 4, other: u64::MAX / 2, all: u64::MAX / 2, blocks: 0 };
}
