//! Regions that this module made for transfers that may be in flight.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uccl_p2p::{MrId, TransferId};

#[derive(Default)]
pub(crate) struct ImplicitRegions {
    /// Regions by transfer, of transfers that are not known to have ended.
    transfers: Mutex<HashMap<u64, Vec<MrId>>>,
    /// The number of these transfers, for a check without the lock.
    count: AtomicUsize,
}

impl ImplicitRegions {
    /// Adds the regions of a transfer that has begun.
    pub(crate) fn add(&self, transfer: TransferId, mrs: Vec<MrId>) {
        let mut transfers = self.transfers.lock();
        transfers.insert(transfer.0, mrs);
        self.count.store(transfers.len(), Ordering::Release);
    }

    /// Removes and returns the regions of a transfer that has ended.
    pub(crate) fn take(&self, transfer: TransferId) -> Vec<MrId> {
        if self.count() == 0 {
            return Vec::new();
        }
        let mut transfers = self.transfers.lock();
        let mrs = transfers.remove(&transfer.0);
        self.count.store(transfers.len(), Ordering::Release);
        mrs.unwrap_or_default()
    }

    /// The number of transfers with regions.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The transfers with regions.
    pub(crate) fn transfers(&self) -> Vec<TransferId> {
        self.transfers.lock().keys().copied().map(TransferId).collect()
    }
}
