//! How a worker treats a lane: whether it looks after it or leaves it to callers, and how the lane
//! wakes it.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::atomic::Ordering::*,
    time::{Duration, Instant},
};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::{claims::AWAY, core::connection::attached_lane::AttachedLane};

impl AttachedLane {
    pub(super) fn progress(&self, now: Instant) -> bool {
        // Checked before: a caller may begin as soon as something has come.
        let are_callers_there = self.conn.care.claims.any();
        let moved = self.conn.progress_lane(self.lane);
        if moved {
            self.care.lock().has_done(are_callers_there, &self.conn.care.claims, now);
        }
        moved
    }

    /// Whether the lane needs a worker no longer.
    pub(super) fn is_over(&self) -> bool {
        self.conn.is_failed() || self.conn.lanes.lost.ending(self.lane)
    }

    /// Whether the lane has work that its descriptor does not show.
    pub(super) fn has_work(&self) -> bool {
        self.is_lost() || self.conn.deferred.any() || self.link.has_work()
    }

    /// Whether the lane has to be killed.
    fn is_lost(&self) -> bool {
        self.conn.lanes.lost.has(self.lane)
    }

    /// Whether callers look after the lane. They do not if it has to be killed: sleeping callers do
    /// not see that.
    pub(super) fn left_to_callers(&self, now: Instant) -> bool {
        let leaves =
            || self.care.lock().leaves(&self.conn.care.claims, self.conn.care.has_sleepers(), now);
        !self.is_lost() && leaves()
    }

    /// Whether callers have used the lane recently.
    pub(super) fn has_callers(&self, now: Instant) -> bool {
        self.care.lock().has_callers(now)
    }

    /// Called before the worker sleeps: how long it stays away, if callers look after the lane.
    pub(super) fn stays_away(&self, now: Instant) -> Option<Duration> {
        if self.is_lost() {
            return None;
        }
        let hears = self.link.caps().messages;
        let (claims, asleep) = (&self.conn.care.claims, self.conn.care.has_sleepers());
        let away = self.care.lock().stays_away(claims, asleep, hears, now);
        self.is_left.store(away.is_some(), SeqCst);
        // A caller that leaves after this check sees that the lane is left to callers.
        away.filter(|away| claims.any() || *away <= AWAY.1 && claims.may_come())
    }

    /// Makes the lane's events wake the worker; false when there is something to do right now.
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
        // Set before arming: from now on, a thread that consumes the lane's events wakes us.
        self.is_armed.store(true, SeqCst);
        if !lane.arm() {
            self.is_armed.store(false, SeqCst);
            // Arming may have consumed the event for which a caller sleeps.
            self.conn.care.hand_over();
            return false;
        }
        let interest = lane.interest();
        let mut flags = EventFlags::ONESHOT | EventFlags::IN;
        if interest.write {
            flags |= EventFlags::OUT;
        }
        let armed =
            epoll::modify(epoll, interest.fd.as_fd(), EventData::new_u64(self.token), flags);
        // A lane that is not watched has been detached meanwhile.
        armed.is_ok() || self.is_over()
    }
}
