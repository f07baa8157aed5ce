//! The threads that look after a connection's lanes: its workers, the callers that wait on it, and
//! those of them that sleep. Here one thread hands the lanes to another.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::*},
};

use parking_lot::Mutex;

use super::{super::workers::Workers, attached_lane::AttachedLane};
use crate::drive::{
    claims::{ClaimWaiters, Claims},
    lost_lanes::bit,
    park::Parker,
};

/// The threads that look after the lanes of a connection.
#[derive(Default)]
pub(crate) struct LaneCare {
    /// The lanes that workers look after.
    attached: Mutex<Vec<Arc<AttachedLane>>>,
    /// Callers that sleep until a lane shows something.
    sleepers: Mutex<Vec<Arc<Parker>>>,
    pub(in crate::drive) claims: Claims,
    /// Lanes, one bit each, with events that callers may have consumed: a worker that sleeps on
    /// them would not wake.
    borrowed: AtomicU64,
}

impl LaneCare {
    /// Adds a lane that a worker looks after.
    pub(in crate::drive) fn attach(&self, attached: Arc<AttachedLane>) {
        self.attached.lock().push(attached);
    }

    /// Takes out the lanes that workers look after, to be detached.
    pub(in crate::drive) fn take(&self) -> Vec<Arc<AttachedLane>> {
        std::mem::take(&mut *self.attached.lock())
    }

    /// Takes out one lane, to be detached.
    pub(in crate::drive) fn take_lane(&self, lane: usize) -> Vec<Arc<AttachedLane>> {
        self.attached.lock().extract_if(.., |attached| attached.lane == lane).collect()
    }

    /// One of the lanes that workers look after.
    pub(in crate::drive) fn find(
        &self,
        pick: impl FnMut(&&Arc<AttachedLane>) -> bool,
    ) -> Option<Arc<AttachedLane>> {
        self.attached.lock().iter().find(pick).cloned()
    }

    /// Wakes the workers, to look after all lanes.
    pub(super) fn kick(&self, workers: &Workers) {
        workers.kick(&self.attached.lock());
    }

    /// Wakes the workers of the lanes for which `pick` is true.
    pub(super) fn kick_some(&self, workers: &Workers, pick: impl Fn(&AttachedLane) -> bool) {
        let attached = self.attached.lock();
        let picked = attached.iter().filter(|attached| pick(attached));
        picked.for_each(|attached| workers.kick(std::slice::from_ref(attached)));
    }

    /// Keeps workers off while the caller makes progress itself.
    pub(super) fn claim<'a>(&'a self, workers: &'a Workers) -> Claim<'a> {
        self.claims.begin();
        Claim { care: self, workers }
    }

    /// Notes that a caller may have consumed an event that would have woken the lane's worker: by
    /// arming the lane, or by looking at rails.
    pub(in crate::drive) fn borrow_lane(&self, lane: usize) {
        let bit = bit(lane);
        if self.borrowed.load(Relaxed) & bit == 0 {
            self.borrowed.fetch_or(bit, SeqCst);
        }
    }

    /// Called when a caller stops making progress. Wakes workers that sleep on lanes with events
    /// that the caller may have consumed: a woken worker looks for itself, and arms the lane anew
    /// before it sleeps again.
    fn return_lanes(&self, workers: &Workers) {
        if self.borrowed.load(Relaxed) == 0 {
            return;
        }
        let borrowed = self.borrowed.swap(0, SeqCst);
        let sleeps =
            |attached: &AttachedLane| borrowed & bit(attached.lane) != 0 && attached.is_armed();
        self.kick_some(workers, sleeps);
    }

    /// Callers stay away for a while: workers that have left lanes to them look after the lanes
    /// again.
    pub(super) fn leave_to_workers(&self, workers: &Workers) {
        // Before the list is read: a worker that leaves its lane to callers later sees this.
        self.claims.desert();
        self.kick_some(workers, AttachedLane::take_back);
    }

    /// Wakes one of the callers that sleep on the lanes, because the caller that was awake will not
    /// look after new events.
    pub(in crate::drive) fn hand_over(&self) {
        if let Some(sleeper) = self.sleepers.lock().first() {
            sleeper.ring();
        }
    }

    /// Wakes callers that sleep on the lanes.
    pub(super) fn ring_sleepers(&self) {
        self.sleepers.lock().iter().for_each(|sleeper| sleeper.ring());
    }

    /// Whether any caller sleeps on the lanes.
    pub(in crate::drive) fn has_sleepers(&self) -> bool {
        !self.sleepers.lock().is_empty()
    }

    /// Notes that a caller goes to sleep on the lanes.
    pub(in crate::drive) fn sleeper_comes(&self, parker: &Arc<Parker>) {
        self.sleepers.lock().push(Arc::clone(parker));
    }

    /// Notes that the caller is awake again.
    pub(in crate::drive) fn sleeper_goes(&self, parker: &Arc<Parker>) {
        self.sleepers.lock().retain(|other| !Arc::ptr_eq(other, parker));
    }
}

/// While this exists, a caller makes progress itself and workers keep off.
pub(crate) struct Claim<'a> {
    care: &'a LaneCare,
    workers: &'a Workers,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let left = self.care.claims.end();
        if left == ClaimWaiters::Others {
            // Another caller may sleep and wait for an event that this caller has consumed.
            self.care.hand_over();
        }
        self.care.return_lanes(self.workers);
        if left == ClaimWaiters::Workers {
            self.care.leave_to_workers(self.workers);
        }
    }
}

impl Claim<'_> {
    /// Notes that the caller has looked at the lanes.
    pub(crate) fn beat(&self) {
        self.care.claims.beat();
    }

    /// Runs something that may take long and does not involve the lanes. Workers look after the
    /// lanes meanwhile.
    pub(crate) fn aside<T>(self, act: impl FnOnce() -> T) -> (Self, T) {
        let (care, workers) = (self.care, self.workers);
        drop(self);
        let done = act();
        (care.claim(workers), done)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn has_rung(parker: &Parker) -> bool {
        let mut bell = [PollFd::from_borrowed_fd(parker.fd(), PollFlags::IN)];
        let rung = poll(&mut bell, Some(&Timespec::default())).expect("polled");
        parker.clear();
        rung > 0
    }

    #[test]
    fn a_caller_that_leaves_wakes_one_that_sleeps_while_others_are_there() {
        let (workers, care) =
            (Workers::new(1, None, |_, _| {}).expect("no thread"), LaneCare::default());
        let sleepers = [(); 2].map(|()| Arc::new(Parker::new().expect("a bell")));
        let claims = [(); 3].map(|()| care.claim(&workers));
        sleepers.iter().for_each(|sleeper| care.sleeper_comes(sleeper));
        let [leaves, stays, last] = claims;
        drop(leaves);
        assert_eq!(sleepers.each_ref().map(|sleeper| has_rung(sleeper)), [true, false]);
        care.sleeper_goes(&sleepers[0]);
        drop(stays);
        assert_eq!(sleepers.each_ref().map(|sleeper| has_rung(sleeper)), [false, true]);
        care.sleeper_goes(&sleepers[1]);
        assert!(!care.has_sleepers());
        drop(last);
        assert!(!sleepers.iter().any(|sleeper| has_rung(sleeper)), "nobody sleeps");
    }
}
