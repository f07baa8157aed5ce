//! How a worker looks after a lane: whether it does, or leaves it to callers, and what it sleeps on.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::atomic::Ordering::*,
    time::{Duration, Instant},
};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::{claims::AWAY, connection::Attached};

impl Attached {
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
        self.is_lost() || self.conn.deferred.any() || self.link.has_work()
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
        let hears = self.link.caps().messages;
        let (claims, asleep) = (&self.conn.claims, self.conn.has_sleepers());
        let away = self.care.lock().stays_away(claims, asleep, hears, now);
        self.is_left.store(away.is_some(), SeqCst);
        // Whoever leaves after this look sees that it is left.
        away.filter(|away| claims.any() || *away <= AWAY.1 && claims.may_come())
    }

    /// Has its events wake the worker; false when there is something to do right now.
    pub(super) fn arm(&self, epoll: &OwnedFd) -> bool {
        let lane = &self.link;
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
