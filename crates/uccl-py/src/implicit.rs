//! Regions that no caller named, of transfers that may be under way.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uccl_p2p::{MrId, TransferId};

#[derive(Default)]
pub(crate) struct Implicit {
    /// Of transfers not yet known to have ended.
    transfers: Mutex<HashMap<u64, Vec<MrId>>>,
    /// How many transfers that is, for a look without the lock.
    count: AtomicUsize,
}

impl Implicit {
    /// Those of a transfer that has begun.
    pub(crate) fn add(&self, transfer: TransferId, mrs: Vec<MrId>) {
        let mut transfers = self.transfers.lock();
        transfers.insert(transfer.0, mrs);
        self.count.store(transfers.len(), Ordering::Release);
    }

    /// Those of a transfer that has ended; it has none from then on.
    pub(crate) fn take(&self, transfer: TransferId) -> Vec<MrId> {
        if self.count() == 0 {
            return Vec::new();
        }
        let mut transfers = self.transfers.lock();
        let mrs = transfers.remove(&transfer.0);
        self.count.store(transfers.len(), Ordering::Release);
        mrs.unwrap_or_default()
    }

    /// How many transfers have some.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The transfers that have some.
    pub(crate) fn transfers(&self) -> Vec<TransferId> {
        self.transfers.lock().keys().copied().map(TransferId).collect()
    }
}
