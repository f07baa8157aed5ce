//! A lane's account of its operations that GPUs copy.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::lane::{Completion, OpResult};

/// Counts a lane's operations and their bytes, and keeps the ones that have ended.
#[derive(Default)]
pub(super) struct Ledger {
    /// Operations with completions that have not been called.
    open: AtomicUsize,
    /// Operations that were queued and have not ended.
    queued: AtomicUsize,
    /// Bytes to be copied.
    bytes: AtomicU64,
    /// Operations that have ended. Their completions must be called.
    landed: Mutex<Vec<(Arc<dyn Completion>, OpResult)>>,
}

/// An operation that is being posted. It is counted before other threads can see it.
pub(super) struct OperationGuard<'a> {
    ledger: &'a Ledger,
    bytes: u64,
    kept: bool,
}

impl Ledger {
    /// Counts an operation and its bytes. The drop of the result takes that back, unless it was
    /// [kept](OperationGuard::keep).
    pub(super) fn open(&self, bytes: u64) -> OperationGuard<'_> {
        self.open.fetch_add(1, SeqCst);
        self.bytes.fetch_add(bytes, Relaxed);
        OperationGuard { ledger: self, bytes, kept: false }
    }

    /// Whether some completion has not been called yet.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(SeqCst) > 0
    }

    /// Counts an operation that is queued.
    pub(super) fn queue(&self) {
        self.queued.fetch_add(1, SeqCst);
    }

    /// A queued operation has ended.
    pub(super) fn count_dequeued(&self) {
        self.queued.fetch_sub(1, SeqCst);
    }

    /// How many operations are queued, or were queued and are under way.
    pub(super) fn queued(&self) -> usize {
        self.queued.load(SeqCst)
    }

    /// Bytes to be copied.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Counts bytes that have been copied, or will not be.
    pub(super) fn moved(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Relaxed);
    }

    /// Records an operation that has ended. [`tell`](Self::tell) calls its completion.
    pub(super) fn landed(&self, done: Arc<dyn Completion>, result: OpResult) {
        self.landed.lock().push((done, result));
    }

    /// Calls the completions of the operations that have ended. True if there were any.
    pub(super) fn tell(&self) -> bool {
        let landed = std::mem::take(&mut *self.landed.lock());
        let any = !landed.is_empty();
        for (done, result) in landed {
            done.complete(result);
            // Only now: a caller that sees no open operation relies on all completions having been
            // called.
            self.open.fetch_sub(1, SeqCst);
        }
        any
    }
}

impl OperationGuard<'_> {
    /// Keeps the count: the operation is under way, or queued.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.ledger.moved(self.bytes);
            self.ledger.open.fetch_sub(1, SeqCst);
        }
    }
}
