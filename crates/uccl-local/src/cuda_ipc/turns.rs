//! The turns of the lanes of this process that make one GPU copy.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;

use super::queue::{Flying, Next, Queue, SLICE, Slice};

/// The most bytes of slices that one GPU has, and the bytes after which another lane has its turn. Four slices keep
/// the links of four GPUs that exchange with each other busy while a CPU finds that the first has ended (see
/// [`SLICE`]).
pub(super) const TURN: u64 = 128 << 20;

/// By the ordinal of the GPU.
static GPUS: LazyLock<Mutex<HashMap<u32, Arc<Turns>>>> = LazyLock::new(Mutex::default);

/// The slices that one GPU copies, and the lanes of this process that have more for it. A thread that makes progress
/// on one lane does so for all, so that no lane waits for another's threads.
pub(super) struct Turns {
    waiting: Mutex<Waiting>,
    limits: Limits,
    /// Locked by the thread that enqueues.
    flying: Mutex<Vec<Flying>>,
}

/// How many bytes may be enqueued.
#[derive(Clone, Copy)]
struct Limits {
    /// In one slice.
    slice: u64,
    /// In all slices together.
    turn: u64,
}

/// Lanes that have something to enqueue. It is the first one's turn.
#[derive(Default)]
struct Waiting {
    lanes: VecDeque<Arc<Queue>>,
    /// Bytes that the first lane has enqueued in its turn.
    used: u64,
}

impl Default for Turns {
    /// Without limits: everything may be enqueued.
    fn default() -> Self {
        let limits = Limits { slice: u64::MAX / 4, turn: u64::MAX / 2 };
        Self { waiting: Mutex::default(), limits, flying: Mutex::default() }
    }
}

impl Turns {
    /// The turns of a GPU, by its ordinal.
    pub(super) fn of(gpu: u32) -> Arc<Self> {
        let limits = Limits { slice: SLICE, turn: TURN };
        let make = || Arc::new(Self { limits, ..Self::default() });
        Arc::clone(GPUS.lock().entry(gpu).or_insert_with(make))
    }

    /// Whether the GPU has slices, as far as is known.
    pub(super) fn is_flying(&self) -> bool {
        // A thread that has it locked enqueues more.
        self.flying.try_lock().is_none_or(|flying| !flying.is_empty())
    }

    /// Adds a lane that has something to enqueue.
    pub(super) fn join(&self, lane: &Arc<Queue>) {
        let mut waiting = self.waiting.lock();
        if !waiting.lanes.iter().any(|other| Arc::ptr_eq(other, lane)) {
            waiting.lanes.push_back(Arc::clone(lane));
        }
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
        let mut enqueued: u64 = flying.iter().map(|slice| slice.bytes).sum();
        while enqueued + self.limits.slice <= self.limits.turn {
            let Some(slice) = self.waiting.lock().next(self.limits) else { return };
            let bytes = slice.bytes();
            if let Some(slice) = slice.enqueue() {
                flying.push(slice);
                enqueued += bytes;
            }
        }
    }
}

impl Waiting {
    /// The next slice of the lane whose turn it is; if that lane is not ready, of the next one that is.
    fn next(&mut self, limits: Limits) -> Option<Slice> {
        let mut asked = 0;
        while asked < self.lanes.len() {
            if self.used >= limits.turn {
                self.pass();
            }
            let first = self.lanes.front()?;
            match first.next(limits.slice) {
                Next::Slice(slice) => {
                    self.used += slice.bytes();
                    return Some(slice);
                }
                Next::Later => {
                    self.pass();
                    asked += 1;
                }
                Next::Nothing => {
                    self.lanes.pop_front();
                    self.used = 0;
                }
            }
        }
        None
    }

    /// Gives the turn to the next lane.
    fn pass(&mut self) {
        self.used = 0;
        if let Some(first) = self.lanes.pop_front() {
            self.lanes.push_back(first);
        }
    }
}
