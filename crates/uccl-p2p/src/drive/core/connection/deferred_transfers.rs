//! Transfers that wait for a CUDA stream before they begin.
//!
//! An event marks how far the stream had come when the transfer was posted. Each thread that makes
//! progress on the connection checks whether the event has happened. Sends begin in the order in
//! which they were posted, and so do receives: that order decides which send meets which receive.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::cuda::{Event, GpuError};
use uccl_fabric::mem::Span;

use super::transfer::{Hold, Transfer};
use crate::{drive::work::Pieces, types::Op};

/// A point on a stream.
pub(crate) trait Mark: Send + Sync {
    /// Whether the stream has reached it.
    fn is_reached(&self) -> std::result::Result<bool, GpuError>;

    /// The event, which a GPU can wait for as well.
    fn event(&self) -> Option<&Event> {
        None
    }
}

impl Mark for Event {
    fn is_reached(&self) -> std::result::Result<bool, GpuError> {
        self.is_done()
    }

    fn event(&self) -> Option<&Event> {
        Some(self)
    }
}

/// How a transfer begins.
pub(crate) enum Start {
    OneSided(Op, Pieces),
    Recv,
    Send(SmallVec<[Span; 1]>),
}

impl Start {
    /// The group in which it keeps its order: 0 for receives, 1 for sends, `None` if it keeps none.
    pub(in crate::drive) fn order(&self) -> Option<usize> {
        match self {
            Self::OneSided(..) => None,
            Self::Recv => Some(0),
            Self::Send(_) => Some(1),
        }
    }
}

/// A transfer that has not begun.
pub(in crate::drive) struct DeferredTransfer {
    /// The mark that it waits for; `None` if it only waits for its turn behind others.
    pub(in crate::drive) after: Option<Box<dyn Mark>>,
    pub(in crate::drive) transfer: Arc<Transfer>,
    pub(in crate::drive) start: Start,
}

/// A transfer that may begin.
pub(in crate::drive) struct DueTransfer {
    pub(in crate::drive) first: DeferredTransfer,
    /// Held while it begins. If the connection ends meanwhile, the transfer ends when this is
    /// dropped.
    pub(in crate::drive) hold: Hold,
    /// The error, if the stream that it waited for failed.
    pub(in crate::drive) failed: Option<GpuError>,
}

/// The transfers of a connection that have not begun.
pub(crate) struct DeferredTransfers {
    /// In the order in which they were posted; `None` once the connection has ended.
    waiting: Mutex<Option<VecDeque<DeferredTransfer>>>,
    /// Locked while some of them begin, so that they begin in order.
    pub(in crate::drive) beginning: Mutex<()>,
    /// How many there are, including those that are just beginning; below, how many of them are
    /// receives and sends.
    open: AtomicUsize,
    ordered: [AtomicUsize; 2],
}

impl Default for DeferredTransfers {
    fn default() -> Self {
        Self {
            waiting: Mutex::new(Some(VecDeque::new())),
            beginning: Mutex::default(),
            open: AtomicUsize::default(),
            ordered: <[AtomicUsize; 2]>::default(),
        }
    }
}

impl DeferredTransfers {
    /// Whether any transfer has not begun.
    pub(crate) fn any(&self) -> bool {
        self.open.load(SeqCst) > 0
    }

    pub(in crate::drive) fn holds_back(&self, start: &Start) -> bool {
        start.order().is_some_and(|order| self.ordered[order].load(SeqCst) > 0)
    }

    /// Adds a transfer; false if the connection has ended. A transfer that was added after that
    /// would keep the connection's memory, and the connection the transfer's.
    pub(in crate::drive) fn push(&self, transfer: DeferredTransfer) -> bool {
        let mut waiting = self.waiting.lock();
        let Some(waiting) = &mut *waiting else { return false };
        self.open.fetch_add(1, SeqCst);
        if let Some(order) = transfer.start.order() {
            self.ordered[order].fetch_add(1, SeqCst);
        }
        waiting.push_back(transfer);
        true
    }

    pub(in crate::drive) fn ended(&self, order: Option<usize>) {
        if let Some(order) = order {
            self.ordered[order].fetch_sub(1, SeqCst);
        }
        self.open.fetch_sub(1, SeqCst);
    }

    /// Takes out the transfers that may begin now.
    pub(in crate::drive) fn take_due(&self) -> Vec<DueTransfer> {
        let mut held = [false; 2];
        let mut waiting = self.waiting.lock();
        let mut due = Vec::new();
        let Some(waiting) = &mut *waiting else { return due };
        let mut at = 0;
        while let Some(first) = waiting.get(at) {
            let order = first.start.order();
            let is_held = order.is_some_and(|order| held[order]);
            let reached = if is_held { Ok(false) } else { first.is_reached() };
            if let Ok(false) = reached {
                if let Some(order) = order {
                    held[order] = true;
                }
                at += 1;
                continue;
            }
            due.extend(waiting.remove(at).map(|first| {
                let hold = first.transfer.hold();
                DueTransfer { first, hold, failed: reached.err() }
            }));
        }
        due
    }

    /// Takes a transfer out to begin it, whether or not it may; [`ended`](Self::ended) has to
    /// follow.
    pub(in crate::drive) fn take(&self, transfer: &Arc<Transfer>) -> Option<DeferredTransfer> {
        let mut waiting = self.waiting.lock();
        let waiting = waiting.as_mut()?;
        let at = waiting.iter().position(|other| Arc::ptr_eq(&other.transfer, transfer))?;
        waiting.remove(at)
    }

    /// Takes a transfer out; false if it is not waiting here.
    pub(in crate::drive) fn remove(&self, transfer: &Arc<Transfer>) -> bool {
        let mut waiting = self.waiting.lock();
        let removed = waiting.as_mut().and_then(|waiting| {
            let at = waiting.iter().position(|other| Arc::ptr_eq(&other.transfer, transfer))?;
            waiting.remove(at)
        });
        if let Some(removed) = &removed {
            self.ended(removed.start.order());
        }
        removed.is_some()
    }

    /// Forgets all transfers, and takes no more.
    pub(crate) fn close(&self) {
        let closed = self.waiting.lock().take();
        closed.iter().flatten().for_each(|waiting| self.ended(waiting.start.order()));
    }
}

impl DeferredTransfer {
    fn is_reached(&self) -> std::result::Result<bool, GpuError> {
        self.after.as_ref().map_or(Ok(true), |mark| mark.is_reached())
    }
}
