//! Regions that tensors share: a tensor that lies in an earlier one gets the same keys and a number
//! of its own, as in UCCL. A region ends when all its numbers have been deregistered.
//!
//! A number has the region's id in its low bits, so that calls find the region without a lookup.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Error, MrId};

use crate::regions::register;

/// Start and length in bytes of a region, and whether it is read-only: peers get no keys for
/// read-only ones.
type Range = (usize, usize, bool);

/// The count of low bits that hold the region's id; those above identify its user. The highest bit
/// is never set in a number of this module.
const ID_BITS: u32 = 40;
const MOST_USERS: u64 = 1 << (u64::BITS - ID_BITS - 1);

/// The region of a number that `reg` or `register_memory` gave.
pub(crate) fn region_of(number: u64) -> MrId {
    match number >> ID_BITS < MOST_USERS {
        true => MrId(number & ((1 << ID_BITS) - 1)),
        // No region has such an id, and errors have the caller's number.
        false => MrId(number),
    }
}

/// The regions that `register_memory` made.
#[derive(Default)]
pub(crate) struct Reuse {
    regions: Mutex<SharedRegions>,
}

#[derive(Default)]
struct SharedRegions {
    by_range: BTreeMap<Range, SharedRegion>,
    by_id: HashMap<MrId, Range>,
}

struct SharedRegion {
    mr: MrId,
    /// The users that have not left.
    users: BTreeSet<u64>,
    next: u64,
}

impl SharedRegion {
    fn new(mr: MrId) -> Self {
        Self { mr, users: BTreeSet::new(), next: 0 }
    }

    /// Adds a user, and returns its number.
    fn join(&mut self) -> u64 {
        while !self.users.insert(self.next) {
            self.next = (self.next + 1) % MOST_USERS;
        }
        let number = self.mr.0 | self.next << ID_BITS;
        self.next = (self.next + 1) % MOST_USERS;
        number
    }
}

/// A region that is not shared any more, because it is about to end.
pub(crate) struct EndingRegion(Range, SharedRegion);

impl SharedRegions {
    /// The shortest region with the same rights that contains a range.
    fn around(&mut self, (addr, len, readonly): Range) -> Option<&mut SharedRegion> {
        let end = addr.checked_add(len).filter(|_| len > 0)?;
        let before = self.by_range.range_mut(..=(addr, usize::MAX, true));
        let around = before.filter(|((at, len, same), _)| *same == readonly && at + len >= end);
        around.min_by_key(|((_, len, _), _)| *len).map(|(_, shared)| shared)
    }

    fn insert(&mut self, range: Range, shared: SharedRegion) {
        self.by_id.insert(shared.mr, range);
        self.by_range.insert(range, shared);
    }

    fn take(&mut self, mr: MrId) -> Option<EndingRegion> {
        let range = self.by_id.remove(&mr)?;
        Some(EndingRegion(range, self.by_range.remove(&range)?))
    }
}

impl Reuse {
    /// Shares a region once more that could not end, unless its memory was registered anew
    /// meanwhile.
    pub(crate) fn put_back(&self, EndingRegion(range, shared): EndingRegion) {
        let mut tensors = self.regions.lock();
        if !tensors.by_range.contains_key(&range) {
            tensors.insert(range, shared);
        }
    }

    /// A number of the region that contains a range, or of a new region.
    pub(crate) fn join(&self, core: &Endpoint, range: Range) -> Result<u64, Error> {
        if let Some(shared) = self.regions.lock().around(range) {
            return Ok(shared.join());
        }
        // No lock is held meanwhile: a thread that ends a region holds the GIL and takes this lock.
        let (addr, len, _) = range;
        let mr = register(core, addr, len)?;
        if len == 0 {
            return Ok(mr.0);
        }
        let mut tensors = self.regions.lock();
        if let Some(shared) = tensors.around(range) {
            let number = shared.join();
            drop(tensors);
            // Another thread has made one meanwhile. No peer has the key of this one.
            core.deregister(mr)?;
            return Ok(number);
        }
        let mut shared = SharedRegion::new(mr);
        let number = shared.join();
        tensors.insert(range, shared);
        Ok(number)
    }

    /// Removes the user of a number; with the last user the region is about to end.
    pub(crate) fn leave(&self, number: u64) -> RemainingUsers {
        let (mr, user) = (region_of(number), number >> ID_BITS);
        let mut tensors = self.regions.lock();
        let tensors = &mut *tensors;
        let shared = tensors.by_id.get(&mr).and_then(|range| tensors.by_range.get_mut(range));
        match shared {
            Some(shared) if !shared.users.contains(&user) => RemainingUsers::Nobody,
            Some(shared) if shared.users.len() > 1 => {
                shared.users.remove(&user);
                RemainingUsers::Others
            }
            // A region that is not shared may have been shared before: its memory was registered
            // anew while it failed to end.
            _ => RemainingUsers::Last(tensors.take(mr)),
        }
    }

    /// Forgets all regions, once all have ended.
    pub(crate) fn clear(&self) {
        *self.regions.lock() = SharedRegions::default();
    }
}

/// The users of a region after one of them has left.
pub(crate) enum RemainingUsers {
    Others,
    /// The number is unknown, or its user has left before.
    Nobody,
    Last(Option<EndingRegion>),
}
