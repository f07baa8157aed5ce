//! Regions that tensors share: one that lies in a tensor registered before gets the keys of that one, as UCCL has it, and
//! a region ends with as many `deregister_memory` as there were `register_memory`.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Error, MrId};

use crate::regions::register;

/// Start and length in bytes of a region, and whether it is read-only: peers get keys for the others alone.
type Range = (usize, usize, bool);

/// The regions that `register_memory` made.
#[derive(Default)]
pub(crate) struct Reuse {
    /// Held while a region is made, so that two threads do not make two of the same tensor.
    regions: Mutex<Tensors>,
}

#[derive(Default)]
struct Tensors {
    by_range: BTreeMap<Range, Shared>,
    by_id: HashMap<MrId, Range>,
}

struct Shared {
    mr: MrId,
    users: usize,
}

/// A region that is not to be shared any more, because it is about to end.
pub(crate) struct Ending(Range, Shared);

impl Tensors {
    /// The shortest region of the same rights that a range lies in.
    fn around(&mut self, (addr, len, readonly): Range) -> Option<&mut Shared> {
        let end = addr.checked_add(len).filter(|_| len > 0)?;
        let before = self.by_range.range_mut(..=(addr, usize::MAX, true));
        let around = before.filter(|((at, len, same), _)| *same == readonly && at + len >= end);
        around.min_by_key(|((_, len, _), _)| *len).map(|(_, shared)| shared)
    }

    fn insert(&mut self, range: Range, shared: Shared) {
        self.by_id.insert(shared.mr, range);
        self.by_range.insert(range, shared);
    }

    fn take(&mut self, mr: MrId) -> Option<Ending> {
        let range = self.by_id.remove(&mr)?;
        Some(Ending(range, self.by_range.remove(&range)?))
    }
}

impl Reuse {
    /// A region is about to end, whoever uses it.
    pub(crate) fn take(&self, mr: MrId) -> Option<Ending> {
        self.regions.lock().take(mr)
    }

    /// It has not ended: it is shared again, unless its memory was registered anew meanwhile.
    pub(crate) fn put_back(&self, Ending(range, shared): Ending) {
        let mut tensors = self.regions.lock();
        if !tensors.by_range.contains_key(&range) {
            tensors.insert(range, shared);
        }
    }

    /// The region that a range lies in, or a new one of its own, with one user more.
    pub(crate) fn join(&self, core: &Endpoint, range: Range) -> Result<MrId, Error> {
        let mut tensors = self.regions.lock();
        if let Some(shared) = tensors.around(range) {
            shared.users += 1;
            return Ok(shared.mr);
        }
        let (addr, len, _) = range;
        let mr = register(core, addr, len)?;
        if len > 0 {
            tensors.insert(range, Shared { mr, users: 1 });
        }
        Ok(mr)
    }

    /// Counts a user less; with the last one the region is about to end.
    pub(crate) fn leave(&self, mr: MrId) -> Leaving {
        let mut tensors = self.regions.lock();
        let tensors = &mut *tensors;
        let shared = tensors.by_id.get(&mr).and_then(|range| tensors.by_range.get_mut(range));
        match shared.filter(|shared| shared.users > 1) {
            Some(shared) => {
                shared.users -= 1;
                Leaving::Others
            }
            None => Leaving::Last(tensors.take(mr)),
        }
    }

    /// Forgets everything, when no region is left.
    pub(crate) fn clear(&self) {
        *self.regions.lock() = Tensors::default();
    }
}

/// Who uses a region beside the one who leaves.
pub(crate) enum Leaving {
    Others,
    Last(Option<Ending>),
}
