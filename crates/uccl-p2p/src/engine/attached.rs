//! A lane as its worker sees it: watched, left to callers, or looked after.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{
    claims::{AWAY, Care},
    connection::Connection,
};

/// A lane that a worker looks after.
pub(crate) struct Attached {
    pub(crate) conn: Arc<Connection>,
    pub(crate) lane: usize,
    /// Which worker looks after it, and what its events are called there.
    pub(super) shard: usize,
    pub(super) token: u64,
    /// Its worker sleeps until the lane shows something.
    is_armed: AtomicBool,
    /// Its worker sleeps for some time and leaves it to callers.
    is_left: AtomicBool,
    care: Mutex<Care>,
}

impl Attached {
    pub(super) fn new(conn: &Arc<Connection>, lane: usize, shard: usize, token: u64) -> Self {
        Self {
            conn: Arc::clone(conn),
            lane,
            shard,
            token,
            is_armed: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            care: Mutex::default(),
        }
    }

    /// It has shown something.
    pub(super) fn woken(&self) {
        self.care.lock().woken();
    }

    /// Its worker is awake, and looks after it.
    pub(super) fn heated(&self) {
        self.is_armed.store(false, SeqCst);
        self.is_left.store(false, SeqCst);
    }

    /// Whether its worker sleeps until the lane shows something.
    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(SeqCst)
    }

    /// Notes that its worker is about to be woken; false if that does not leave it to callers.
    pub(crate) fn take_back(&self) -> bool {
        self.is_left.swap(false, SeqCst)
    }

    pub(super) fn progress(&self, now: Instant) -> bool {
        // Not afterwards: a caller may begin at once with what has come.
        let are_callers_there = self.conn.claims.any();
        let moved = self.conn.progress_lane(self.lane);
        if moved {
            self.care.lock().has_done(are_callers_there, &self.conn.claims, now);
        }
        moved
    }

    /// Whether nothing is left to do for it.
    pub(super) fn is_over(&self) -> bool {
        self.conn.is_failed() || self.conn.fates.ending(self.lane)
    }

    /// Whether there is something to do for it that shows nowhere.
    pub(super) fn has_work(&self) -> bool {
        self.is_lost() || self.conn.deferred.any() || self.conn.lanes[self.lane].has_work()
    }

    /// Whether it waits to be killed.
    fn is_lost(&self) -> bool {
        self.conn.fates.lost(self.lane)
    }

    /// Whether callers look after it. Asleep they do not see that a lane is to be killed.
    pub(super) fn left_to_callers(&self, now: Instant) -> bool {
        let leaves = || self.care.lock().leaves(&self.conn.claims, self.conn.has_sleepers(), now);
        !self.is_lost() && leaves()
    }

    /// Whether callers have used it of late.
    pub(super) fn has_callers(&self, now: Instant) -> bool {
        self.care.lock().has_callers(now)
    }

    /// Before its worker sleeps: how long that stays away, if callers look after it.
    pub(super) fn stays_away(&self, now: Instant) -> Option<Duration> {
        if self.is_lost() {
            return None;
        }
        let hears = self.conn.lanes[self.lane].caps().messages;
        let (claims, asleep) = (&self.conn.claims, self.conn.has_sleepers());
        let away = self.care.lock().stays_away(claims, asleep, hears, now);
        self.is_left.store(away.is_some(), SeqCst);
        // Whoever leaves after this look sees that it is left.
        away.filter(|away| claims.any() || *away <= AWAY.1 && claims.may_come())
    }

    /// Has its events wake the worker; false when there is something to do right now.
    pub(super) fn arm(&self, epoll: &OwnedFd) -> bool {
        let lane = &self.conn.lanes[self.lane];
        if self.is_over() {
            return true;
        }
        if self.is_lost() {
            return false;
        }
        if self.lane == 0 && self.conn.deferred.any() {
            return false;
        }
        // Before it is: who takes in what the lane has to show from now on wakes us.
        self.is_armed.store(true, SeqCst);
        if !lane.arm() {
            self.is_armed.store(false, SeqCst);
            // Arming has taken in the wake-up of whoever sleeps there.
            self.conn.hand_over();
            return false;
        }
        let interest = lane.interest();
        let mut flags = EventFlags::ONESHOT | EventFlags::IN;
        if interest.write {
            flags |= EventFlags::OUT;
        }
        let armed =
            epoll::modify(epoll, interest.fd.as_fd(), EventData::new_u64(self.token), flags);
        // What is not watched has been detached meanwhile.
        armed.is_ok() || self.is_over()
    }
}
