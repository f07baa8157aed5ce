//! Transfers that wait for a CUDA stream before they begin.
//!
//! An event marks how far the stream had come when the transfer was posted; whoever makes progress on the
//! connection looks whether it has happened. Sends begin in the order in which they were posted, and so do
//! receives, for that is how the peers' halves find each other.

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

use super::{
    connection::Connection,
    plan::Pieces,
    transfer::{Hold, Transfer},
};
use crate::{
    endpoint::Op,
    error::{Error, Result},
};

/// A place on a stream.
pub(crate) trait Mark: Send + Sync {
    /// Whether the stream has come so far.
    fn is_reached(&self) -> std::result::Result<bool, GpuError>;
}

impl Mark for Event {
    fn is_reached(&self) -> std::result::Result<bool, GpuError> {
        self.is_done()
    }
}

/// How a transfer begins.
pub(crate) enum Start {
    OneSided(Op, Pieces),
    Recv,
    Send(SmallVec<[Span; 1]>),
}

impl Start {
    /// Which order it keeps, if any.
    fn order(&self) -> Option<usize> {
        match self {
            Self::OneSided(..) => None,
            Self::Recv => Some(0),
            Self::Send(_) => Some(1),
        }
    }
}

/// A transfer that has not begun.
struct Waiting {
    /// What it waits for; nothing if it only keeps its place behind others.
    after: Option<Box<dyn Mark>>,
    transfer: Arc<Transfer>,
    start: Start,
}

/// What may begin.
struct Due {
    first: Waiting,
    /// Nobody but who begins it knows of it: it ends when that is done.
    hold: Hold,
    /// What its stream failed of.
    failed: Option<GpuError>,
}

/// The transfers of a connection that have not begun.
#[derive(Default)]
pub(crate) struct Deferred {
    waiting: Mutex<VecDeque<Waiting>>,
    /// Held while some of them begin, so that they do so in order.
    beginning: Mutex<()>,
    /// How many there are, those that begin just now included; of these, receives and sends.
    open: AtomicUsize,
    ordered: [AtomicUsize; 2],
}

impl Deferred {
    /// Whether any is there.
    pub(crate) fn any(&self) -> bool {
        self.open.load(SeqCst) > 0
    }

    fn holds_back(&self, start: &Start) -> bool {
        start.order().is_some_and(|order| self.ordered[order].load(SeqCst) > 0)
    }

    fn push(&self, waiting: Waiting) {
        self.open.fetch_add(1, SeqCst);
        if let Some(order) = waiting.start.order() {
            self.ordered[order].fetch_add(1, SeqCst);
        }
        self.waiting.lock().push_back(waiting);
    }

    fn ended(&self, order: Option<usize>) {
        if let Some(order) = order {
            self.ordered[order].fetch_sub(1, SeqCst);
        }
        self.open.fetch_sub(1, SeqCst);
    }

    /// Takes out those that may begin.
    fn take_due(&self) -> Vec<Due> {
        let mut held = [false; 2];
        let mut waiting = self.waiting.lock();
        let mut due = Vec::new();
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
                Due { first, hold, failed: reached.err() }
            }));
        }
        due
    }

    /// Takes a transfer out; false if it is not there.
    fn remove(&self, transfer: &Arc<Transfer>) -> bool {
        let mut waiting = self.waiting.lock();
        let at = waiting.iter().position(|other| Arc::ptr_eq(&other.transfer, transfer));
        let removed = at.and_then(|at| waiting.remove(at));
        if let Some(removed) = &removed {
            self.ended(removed.start.order());
        }
        removed.is_some()
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        let cleared = std::mem::take(&mut *self.waiting.lock());
        cleared.iter().for_each(|waiting| self.ended(waiting.start.order()));
    }
}

impl Waiting {
    fn is_reached(&self) -> std::result::Result<bool, GpuError> {
        self.after.as_ref().map_or(Ok(true), |mark| mark.is_reached())
    }
}

impl Connection {
    /// Begins a transfer, now or when the mark is reached.
    pub(crate) fn begin(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        start: Start,
        after: Option<Box<dyn Mark>>,
    ) -> Result<()> {
        if after.is_none() && !self.deferred.holds_back(&start) {
            return self.begin_now(transfer, start);
        }
        transfer.expect_ops(1);
        self.deferred.push(Waiting { after, transfer: Arc::clone(transfer), start });
        self.begin_due();
        Ok(())
    }

    fn begin_now(self: &Arc<Self>, transfer: &Arc<Transfer>, start: Start) -> Result<()> {
        match start {
            Start::OneSided(op, pieces) => {
                self.post_ops(transfer, op, pieces.local, pieces.remote);
                self.call_help();
                Ok(())
            }
            Start::Send(spans) => {
                transfer.expect_ops(1);
                self.post_send(transfer, &spans)
            }
            Start::Recv => {
                transfer.expect_ops(1);
                self.post_recv(transfer)
            }
        }
    }

    /// Begins what waits no longer; says whether there was any.
    pub(crate) fn begin_due(self: &Arc<Self>) -> bool {
        if !self.deferred.any() {
            return false;
        }
        let Some(_beginning) = self.deferred.beginning.try_lock() else { return false };
        let due = self.deferred.take_due();
        let any = !due.is_empty();
        for Due { first: Waiting { transfer, start, .. }, hold, failed } in due {
            let order = start.order();
            let begun = match failed {
                Some(e) => {
                    let reason = format!("the stream that it waited for failed: {e}");
                    Err(Error::Gpu { peer: Arc::clone(&self.peer.name), reason })
                }
                None => self.begin_now(&transfer, start),
            };
            if let Err(e) = begun {
                transfer.note_error(e.clone());
                transfer.publish(Err(e));
            }
            transfer.op_ended();
            drop(hold);
            self.deferred.ended(order);
        }
        any
    }

    /// Ends a transfer that has not begun; false if it has.
    pub(crate) fn withdraw_deferred(&self, transfer: &Arc<Transfer>, error: Error) -> bool {
        let is_there = self.deferred.remove(transfer);
        if is_there {
            transfer.note_error(error);
            transfer.op_ended();
        }
        is_there
    }
}
