//! What a lane knows of its operations that GPUs copy.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::*},
};

use parking_lot::Mutex;

use crate::lane::{Completion, OpResult};

/// How many there are, and which have ended.
#[derive(Default)]
pub(super) struct Ledger {
    /// Operations whose posters have not been told.
    open: AtomicUsize,
    /// Those of them that waited, and have not ended.
    queued: AtomicUsize,
    /// Bytes to be copied.
    bytes: AtomicU64,
    /// Operations that have ended and whose posters are to be told.
    landed: Mutex<Vec<(Arc<dyn Completion>, OpResult)>>,
}

/// An operation that is being posted: it counts from before others can see it.
pub(super) struct Opening<'a> {
    ledger: &'a Ledger,
    bytes: u64,
    kept: bool,
}

impl Ledger {
    /// Counts an operation of so many bytes, unless it is not [kept](Opening::keep).
    pub(super) fn open(&self, bytes: u64) -> Opening<'_> {
        self.open.fetch_add(1, SeqCst);
        self.bytes.fetch_add(bytes, Relaxed);
        Opening { ledger: self, bytes, kept: false }
    }

    /// Whether posters have not been told of all that was posted.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(SeqCst) > 0
    }

    /// An operation is to wait.
    pub(super) fn queue(&self) {
        self.queued.fetch_add(1, SeqCst);
    }

    /// An operation that waited has ended.
    pub(super) fn unqueue(&self) {
        self.queued.fetch_sub(1, SeqCst);
    }

    /// How many operations wait, or have and are under way.
    pub(super) fn queued(&self) -> usize {
        self.queued.load(SeqCst)
    }

    /// Bytes to be copied.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// So many bytes have been copied, or will not be.
    pub(super) fn moved(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Relaxed);
    }

    /// An operation has ended.
    pub(super) fn landed(&self, done: Arc<dyn Completion>, result: OpResult) {
        self.landed.lock().push((done, result));
    }

    /// Tells the posters of what has ended; says whether there was any.
    pub(super) fn tell(&self) -> bool {
        let landed = std::mem::take(&mut *self.landed.lock());
        let any = !landed.is_empty();
        for (done, result) in landed {
            done.complete(result);
            // Only now: whoever sees that nothing is open relies on all having been told.
            self.open.fetch_sub(1, SeqCst);
        }
        any
    }
}

impl Opening<'_> {
    /// It is under way, or waits.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.ledger.moved(self.bytes);
            self.ledger.open.fetch_sub(1, SeqCst);
        }
    }
}
