//! The turns of the lanes of this process that make one GPU copy.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_fabric::{gpu::Engine, lane::OpName};

use super::{
    copy_end::CopyEnd,
    ledger::Ledger,
    queue::{Next, Queue, Slice, SliceFlight},
};

/// The turns of each GPU, by its ordinal.
static GPUS: LazyLock<Mutex<HashMap<u32, Arc<Turns>>>> = LazyLock::new(Mutex::default);

/// The slices that one GPU copies, and the lanes of this process that have more for it. A thread
/// that makes progress on one lane does so for all, so that no lane waits for another's threads.
#[derive(Default)]
pub(super) struct Turns {
    waiting: Mutex<WaitingLanes>,
    /// No limits: everything may be enqueued.
    unlimited: bool,
    /// Locked by the thread that enqueues.
    flights: Mutex<Vec<SliceFlight>>,
}

/// No hazard words are free for the rest of an operation.
pub(super) struct NoHazardWords;

/// The most bytes that may be enqueued, and the blocks of the kernel that copy them.
#[derive(Clone, Copy)]
struct Limits {
    /// Bytes of a slice.
    slice: u64,
    /// The most bytes enqueued for one other GPU.
    other: u64,
    /// The blocks of the kernel that copy a slice; 0: copy engines copy large pieces.
    blocks: u32,
}

impl Limits {
    const NONE: Self = Self { slice: u64::MAX / 4, other: u64::MAX / 2, blocks: 0 };
    /// Limits while all slices are for one other GPU: two slices keep its link busy with copy
    /// engines.
    const ALONE: Self = Self { slice: 32 << 20, other: 64 << 20, blocks: 0 };
    /// Limits while several GPUs are to be written to or read from. Copy engines serve one of them
    /// after the other, in an order of the driver's, so that the links of the others stand still:
    /// four H200s that exchanged 128 MiB with each other reached 0.6 of a pair's rate, with slices
    /// of any length. The kernel copies for all at a time, and reaches 0.9.
    const CROWDED: Self = Self { slice: 128 << 20, other: 256 << 20, blocks: MOST_BLOCKS };
}

/// The most blocks of the kernel that copy for one other GPU, and for all together. More are hardly
/// faster.
const MOST_BLOCKS: u32 = 24;
const ALL_BLOCKS: u32 = 72;

/// Lanes that have something to enqueue, the one that has waited longest first.
#[derive(Default)]
struct WaitingLanes {
    lanes: VecDeque<Arc<Queue>>,
    /// Whether the GPU has something to do.
    is_busy: bool,
    /// Bytes that it has got for a single other GPU, since it has something to do.
    alone: u64,
    /// Whether there has been more than one other GPU since then, and in the busy time before,
    /// after which more are to be expected.
    is_crowded: bool,
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

    /// Whether the GPU has slices, as far as is known.
    pub(super) fn has_slices(&self) -> bool {
        // A thread that has it locked enqueues more.
        self.flights.try_lock().is_none_or(|flights| !flights.is_empty())
    }

    /// Adds a lane that has something to enqueue.
    pub(super) fn join(&self, lane: &Arc<Queue>) {
        let mut waiting = self.waiting.lock();
        waiting.begin();
        if !waiting.lanes.iter().any(|other| Arc::ptr_eq(other, lane)) {
            waiting.lanes.push_back(Arc::clone(lane));
        }
    }

    /// Enqueues all that is left of an operation, out of turn, and returns the engine that has
    /// enqueued it. `Ok(None)`: the operation is not here, and no slice of it is under way. `Err`:
    /// not all can be enqueued now.
    pub(super) fn enqueue_rest(
        &self,
        lane: &Queue,
        name: OpName,
        ledger: &Arc<Ledger>,
    ) -> Result<Option<Arc<Mutex<Engine>>>, NoHazardWords> {
        let mut flights = self.flights.lock();
        while let Some(next) = lane.next_of(name) {
            match next {
                Next::Slice(slice) => flights.extend(slice.enqueue(0)),
                Next::Later => return Err(NoHazardWords),
                Next::Nothing => break,
            }
        }
        Ok(flights.iter().find_map(|slice| slice.engine_of(name, ledger)))
    }

    /// Ends the slices that the GPU has copied, and enqueues more within the limits. Does nothing
    /// while another thread does this: that thread may be in the driver for long.
    pub(super) fn drive(&self) {
        let Some(mut flights) = self.flights.try_lock() else { return };
        let mut at = 0;
        while at < flights.len() {
            match flights[at].result() {
                // The order does not matter: each search goes through the whole list.
                Some(result) => flights.swap_remove(at).land(result),
                None => at += 1,
            }
        }
        loop {
            let Some((slice, blocks)) = self.waiting.lock().next(&flights, self.unlimited) else {
                return;
            };
            if let Some(slice) = slice.enqueue(blocks) {
                flights.push(slice);
            }
        }
    }
}

impl WaitingLanes {
    /// The next slice within the limits, of the lane that has waited longest, and how many blocks
    /// of the kernel copy it.
    fn next(&mut self, flights: &[SliceFlight], unlimited: bool) -> Option<(Slice, u32)> {
        let mut late: SmallVec<[*const Queue; 4]> = SmallVec::new();
        loop {
            let fronts: SmallVec<[Option<CopyEnd>; 8]> =
                self.lanes.iter().map(|lane| lane.front()).collect();
            if let Some(gone) = fronts.iter().position(Option::is_none) {
                self.lanes.remove(gone);
                continue;
            }
            if fronts.is_empty() {
                self.is_busy &= !flights.is_empty();
                return None;
            }
            let limits = if unlimited { Limits::NONE } else { self.limits(flights, &fronts) };
            let enqueued = |other| -> u64 {
                let of = flights.iter().filter(|slice| slice.other() == other);
                of.map(|slice| slice.bytes).sum()
            };
            let may = |(at, front): (usize, &Option<CopyEnd>)| {
                let lane = Arc::as_ptr(&self.lanes[at]);
                let other = front.filter(|_| !late.contains(&lane))?;
                let fits = enqueued(other).saturating_add(limits.slice) <= limits.other;
                fits.then_some((at, other))
            };
            let (at, other) = fronts.iter().enumerate().find_map(may)?;
            let lane = self.lanes.remove(at)?;
            match lane.next(limits.slice) {
                Next::Slice(slice) => {
                    self.alone += slice.bytes();
                    self.lanes.push_back(lane);
                    let blocks = if other == CopyEnd::Near { 0 } else { limits.blocks };
                    return Some((slice, blocks));
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
        if !self.is_busy {
            (self.is_busy, self.alone) = (true, 0);
            self.was_crowded = std::mem::take(&mut self.is_crowded);
        }
    }

    fn limits(&mut self, flights: &[SliceFlight], fronts: &[Option<CopyEnd>]) -> Limits {
        let waiting = fronts.iter().copied().flatten();
        let mut others: SmallVec<[CopyEnd; 16]> =
            waiting.chain(flights.iter().map(SliceFlight::other)).collect();
        others.retain(|other| *other != CopyEnd::Near);
        others.sort_unstable();
        others.dedup();
        if others.len() > 1 {
            (self.is_crowded, self.alone) = (true, 0);
        } else if !self.was_crowded || self.alone >= 2 * Limits::CROWDED.other {
            return Limits::ALONE;
        }
        let blocks = (ALL_BLOCKS / others.len().max(1) as u32).clamp(1, MOST_BLOCKS);
        Limits { blocks, ..Limits::CROWDED }
    }
}
