//! A lane as its worker sees it: armed, left to callers, or looked after.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::lane::Lane;

use super::Connection;
use crate::drive::claims::Care;

/// A lane that a worker looks after.
pub(crate) struct AttachedLane {
    pub(crate) conn: Arc<Connection>,
    pub(in crate::drive) link: Arc<dyn Lane>,
    pub(crate) lane: usize,
    /// The worker that looks after it, and the token of the lane's events there.
    pub(in crate::drive) shard: usize,
    pub(in crate::drive) token: u64,
    /// Whether its worker sleeps until the lane shows something.
    pub(in crate::drive) is_armed: AtomicBool,
    /// Whether its worker sleeps for a certain time and leaves the lane to callers.
    pub(in crate::drive) is_left: AtomicBool,
    pub(in crate::drive) care: Mutex<Care>,
}

impl AttachedLane {
    pub(in crate::drive) fn new(
        conn: &Arc<Connection>,
        (lane, link): (usize, &Arc<dyn Lane>),
        shard: usize,
        token: u64,
    ) -> Self {
        Self {
            conn: Arc::clone(conn),
            link: Arc::clone(link),
            lane,
            shard,
            token,
            is_armed: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            care: Mutex::default(),
        }
    }

    /// Notes that the lane has shown something.
    pub(in crate::drive) fn woken(&self) {
        self.care.lock().woken();
    }

    /// Notes that its worker is awake and looks after the lane.
    pub(in crate::drive) fn heated(&self) {
        self.is_armed.store(false, SeqCst);
        self.is_left.store(false, SeqCst);
    }

    /// Whether its worker sleeps until the lane shows something.
    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(SeqCst)
    }

    /// Whether its worker leaves the lane to callers and looks again within milliseconds, whatever
    /// the lane shows. One that has armed the lane may sleep for longer.
    pub(crate) fn looks_soon(&self) -> bool {
        self.is_left.load(SeqCst) && !self.is_armed.load(SeqCst)
    }

    /// Notes that its worker is about to be woken; false if the worker does not leave the lane to
    /// callers.
    pub(crate) fn take_back(&self) -> bool {
        self.is_left.swap(false, SeqCst)
    }
}
