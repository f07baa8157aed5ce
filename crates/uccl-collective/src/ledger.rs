//! The calls of a group by their numbers. Calls that are under way are kept until they have ended.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use crate::{
    error::{Error, Result},
    work::Work,
};

/// The most calls that are kept after their end.
const KEPT: usize = 16_384;

#[derive(Default)]
pub(crate) struct Ledger {
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    next: u64,
    works: BTreeMap<u64, Arc<Work>>,
    /// Those that are not known to have ended.
    open: Vec<Arc<Work>>,
}

impl Ledger {
    /// The number of the next call.
    pub(crate) fn next(&self) -> u64 {
        let mut entries = self.entries.lock();
        entries.next += 1;
        entries.next
    }

    /// Adds a call, and settles the earlier ones that have no message left.
    pub(crate) fn add(&self, work: &Arc<Work>) {
        let mut ended = Vec::new();
        {
            let mut entries = self.entries.lock();
            let entries = &mut *entries;
            entries.open.retain(|open| !open.settle());
            entries.open.push(Arc::clone(work));
            entries.works.insert(work.id, Arc::clone(work));
            while entries.works.len() > KEPT {
                // The oldest are first. One that is under way stays in the list of those.
                ended.extend(entries.works.pop_first());
            }
        }
    }

    /// The call of a number.
    pub(crate) fn find(&self, id: u64) -> Result<Arc<Work>> {
        self.entries.lock().works.get(&id).cloned().ok_or(Error::UnknownWork(id))
    }

    /// Ends all calls.
    pub(crate) fn clear(&self) {
        let open = std::mem::take(&mut self.entries.lock().open);
        open.iter().for_each(|work| work.cancel());
        self.entries.lock().works.clear();
    }
}
