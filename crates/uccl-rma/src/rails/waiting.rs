//! Regions that were added before their endpoint's devices were open, and have yet to be
//! registered.

use std::{
    collections::{BTreeSet, HashMap},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::mem::Span;

use crate::pinned::{PinRequest, covers};

/// The regions that wait, and the one that is being registered.
#[derive(Default)]
pub(super) struct RegistrationQueue {
    regions: Mutex<Regions>,
    /// How many there are, readable without the lock.
    count: AtomicUsize,
    /// How many have ended to wait.
    ended: AtomicU64,
}

#[derive(Default)]
struct Regions {
    by_slot: HashMap<u32, PinRequest>,
    /// The shortest comes first, so that little memory does not wait for much.
    by_length: BTreeSet<(usize, u32)>,
    current: Option<Current>,
}

struct Current {
    slot: u32,
    memory: PinRequest,
    /// The region is about to end.
    is_retired: bool,
}

impl RegistrationQueue {
    /// Adds a region, unless `is_over` says that it need not wait. True if it was added.
    pub(super) fn add_unless(
        &self,
        slot: u32,
        memory: PinRequest,
        is_over: impl Fn() -> bool,
    ) -> bool {
        if is_over() {
            return false;
        }
        let mut regions = self.regions.lock();
        // Under the lock the answer stands.
        if is_over() {
            return false;
        }
        if regions.by_slot.insert(slot, memory).is_none() {
            regions.by_length.insert((memory.span.len, slot));
            self.count.fetch_add(1, Release);
        }
        true
    }

    /// Does something while no region is added.
    pub(super) fn while_none_comes<T>(&self, act: impl FnOnce() -> T) -> T {
        let _regions = self.regions.lock();
        act()
    }

    /// The next region to be registered. It counts as waiting until [`Self::end`].
    pub(super) fn begin(&self) -> Option<(u32, PinRequest)> {
        let mut regions = self.regions.lock();
        let (_, slot) = regions.by_length.pop_first()?;
        let memory = regions.by_slot.remove(&slot)?;
        regions.current = Some(Current { slot, memory, is_retired: false });
        Some((slot, memory))
    }

    /// The region that was begun is registered. `note` makes that known; it is told whether the
    /// region is about to end.
    pub(super) fn end(&self, note: impl FnOnce(bool)) {
        let mut regions = self.regions.lock();
        note(regions.current.take().is_some_and(|current| current.is_retired));
        self.have_ended(1);
    }

    /// Whether this region waits or is being registered.
    pub(super) fn has(&self, slot: u32) -> bool {
        if self.count.load(Acquire) == 0 {
            return false;
        }
        let regions = self.regions.lock();
        let is_it = |current: &Current| current.slot == slot;
        regions.by_slot.contains_key(&slot) || regions.current.as_ref().is_some_and(is_it)
    }

    /// Whether a region that contains this memory waits or is being registered, and is not about to
    /// end.
    pub(super) fn reaches(&self, span: Span) -> bool {
        if self.count.load(Acquire) == 0 {
            return false;
        }
        let regions = self.regions.lock();
        let current = regions.current.iter().filter(|current| !current.is_retired);
        let mut all = regions.by_slot.values().chain(current.map(|current| &current.memory));
        all.any(|memory| covers(memory.span, span))
    }

    /// A region is about to end. If it waits, it is not registered any more.
    pub(super) fn retire(&self, slot: u32) {
        if self.count.load(Acquire) == 0 {
            return;
        }
        let mut regions = self.regions.lock();
        if let Some(current) = regions.current.as_mut().filter(|current| current.slot == slot) {
            current.is_retired = true;
        }
        if let Some(memory) = regions.by_slot.remove(&slot) {
            regions.by_length.remove(&(memory.span.len, slot));
            self.have_ended(1);
        }
    }

    /// No region is to be registered any more, apart from the one that is being.
    pub(super) fn clear(&self) {
        let mut regions = self.regions.lock();
        let count = regions.by_slot.len();
        regions.by_slot.clear();
        regions.by_length.clear();
        self.have_ended(count);
    }

    /// Nothing is registered any more: the thread that did it has ended.
    pub(super) fn close(&self) {
        if self.regions.lock().current.take().is_some() {
            self.have_ended(1);
        }
        self.clear();
    }

    /// How many regions have been registered or have ceased to wait.
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Acquire)
    }

    fn have_ended(&self, count: usize) {
        self.count.fetch_sub(count, Release);
        self.ended.fetch_add(count as u64, Release);
    }
}
