//! The list of an endpoint's transfers: the unfinished ones, and the results of those that finished
//! not long ago.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::*},
    },
};

use parking_lot::Mutex;
use slab::Slab;

use super::transfer::{Plan, Transfer};
use crate::{
    drive::contexts::Contexts,
    error::{Error, Result},
    ids::TransferId,
    types::Status,
};

/// Most transfers that may be unfinished at a time.
pub(crate) const MAX_PENDING: usize = 65_536;
/// Finished transfers that are kept with their results, for callers that ask again.
pub(crate) const KEPT: usize = 16_384;

/// Transfers by id.
pub(crate) struct Transfers {
    inner: Mutex<Inner>,
    pub(crate) pending: AtomicUsize,
}

/// The writes that a strong signal follows.
pub(crate) type Earlier = Vec<Arc<Transfer>>;
/// A transfer, and the writes that it follows.
type InOrder = (Arc<Transfer>, Earlier);

/// Room for a transfer in the list. It is given back when this is dropped, unless a transfer has
/// taken it.
pub(crate) struct Room<'a>(&'a AtomicUsize);

impl Room<'_> {
    /// A transfer takes it, and gives it back when it ends.
    fn take(self) {
        std::mem::forget(self);
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

enum Slot {
    Ended(TransferId, Status),
    Live(Arc<Transfer>),
}

/// A transfer that was looked up by its id.
pub(crate) enum Lookup {
    /// It has ended; only its result is kept.
    Ended(Status),
    /// It may not have ended.
    Live(Arc<Transfer>),
}

struct Inner {
    slots: Slab<Slot>,
    contexts: Contexts,
    kept: VecDeque<usize>,
    generation: u32,
}

impl Transfers {
    pub(crate) fn new() -> Self {
        let inner = Inner {
            slots: Slab::new(),
            contexts: Contexts::default(),
            kept: VecDeque::new(),
            generation: 0,
        };
        Self { inner: Mutex::new(inner), pending: AtomicUsize::new(0) }
    }

    /// Room for one transfer, unless too many are unfinished.
    pub(crate) fn room(&self) -> Result<Room<'_>> {
        if self.pending.fetch_add(1, AcqRel) >= MAX_PENDING {
            self.pending.fetch_sub(1, AcqRel);
            return Err(Error::Full {
                what: "the endpoint's list of transfers",
                limit: MAX_PENDING,
            });
        }
        Ok(Room(&self.pending))
    }

    /// Makes a transfer, unless too many are unfinished.
    pub(crate) fn insert(&self, plan: Plan) -> Result<Arc<Transfer>> {
        Ok(self.insert_in(self.room()?, plan))
    }

    /// Makes a transfer for which there is room.
    pub(crate) fn insert_in(&self, room: Room<'_>, plan: Plan) -> Arc<Transfer> {
        let (transfer, _) = self.insert_in_order(room, plan, false);
        transfer
    }

    /// Makes a transfer with a strong signal, as [`insert`](Self::insert) does. It must follow the
    /// writes that are returned.
    pub(crate) fn insert_strong(&self, plan: Plan) -> Result<InOrder> {
        Ok(self.insert_in_order(self.room()?, plan, true))
    }

    fn insert_in_order(&self, room: Room<'_>, plan: Plan, is_strong: bool) -> InOrder {
        room.take();
        let mut inner = self.inner.lock();
        let Inner { slots, contexts, generation, .. } = &mut *inner;
        *generation = generation.wrapping_add(1).max(1);
        let entry = slots.vacant_entry();
        let id = TransferId(u64::from(*generation) << 32 | entry.key() as u64);
        let transfer = Arc::new(Transfer::new(id, plan));
        entry.insert(Slot::Live(Arc::clone(&transfer)));
        let Some(scope) = transfer.scope() else { return (transfer, Vec::new()) };
        contexts.push(scope, index(id) as u32, is_strong);
        if !is_strong {
            return (transfer, Vec::new());
        }
        let earlier =
            contexts.followed_by(index(id) as u32).filter_map(|at| match slots.get(at as usize) {
                Some(Slot::Live(earlier)) => Some(Arc::clone(earlier)),
                _ => None,
            });
        let earlier = earlier.collect();
        (transfer, earlier)
    }

    pub(crate) fn find(&self, id: TransferId) -> Result<Lookup> {
        match self.inner.lock().slots.get(index(id)) {
            Some(Slot::Live(transfer)) if transfer.id == id => {
                Ok(Lookup::Live(Arc::clone(transfer)))
            }
            Some(Slot::Ended(ended, status)) if *ended == id => Ok(Lookup::Ended(status.clone())),
            _ => Err(Error::UnknownTransfer(id)),
        }
    }

    /// Notes that a transfer has ended. Its result is kept until many more have ended.
    pub(crate) fn ended(&self, transfer: &Transfer) {
        self.pending.fetch_sub(1, AcqRel);
        let ended = Slot::Ended(transfer.id, transfer.status());
        let mut inner = self.inner.lock();
        if let Some(scope) = transfer.scope() {
            inner.contexts.remove(scope, index(transfer.id) as u32);
        }
        let live =
            inner.slots.get_mut(index(transfer.id)).map(|slot| std::mem::replace(slot, ended));
        inner.kept.push_back(index(transfer.id));
        if inner.kept.len() > KEPT
            && let Some(oldest) = inner.kept.pop_front()
        {
            inner.slots.try_remove(oldest);
        }
        drop(inner);
        drop(live);
    }

    /// The unfinished transfers for which `pick` is true.
    pub(crate) fn unfinished(&self, pick: impl Fn(&Transfer) -> bool) -> Vec<Arc<Transfer>> {
        let inner = self.inner.lock();
        let live = inner.slots.iter().filter_map(|(_, slot)| match slot {
            Slot::Live(transfer) if !transfer.finished() && pick(transfer) => Some(transfer),
            _ => None,
        });
        live.cloned().collect()
    }
}

fn index(id: TransferId) -> usize {
    (id.0 & 0xFFFF_FFFF) as usize
}

#[cfg(test)]
mod tests;
