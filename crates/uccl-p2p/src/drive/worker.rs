//! Worker threads. They make progress on lanes for which no caller does, sleep when there is
//! nothing to do, and look after deadlines.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering::*},
    time::{Duration, Instant},
};

use rustix::event::{
    PollFd, PollFlags, Timespec,
    epoll::{self, Event},
    poll,
};

use super::{
    acceptor::Acceptor,
    core::{
        Core,
        connection::attached_lane::AttachedLane,
        workers::{ACCEPTOR, BELL, Kick, Shard, Workers},
    },
    places,
};
use crate::error::{Error, Result};

/// How often deadlines are checked while transfers are unfinished.
const HOUSEKEEPING: Duration = Duration::from_millis(20);
/// How often a spinning worker looks for events of other lanes.
const GLANCE: Duration = Duration::from_micros(50);

/// How long a worker sleeps after it found nothing to do on a lane that it could not arm.
const NAP: Duration = Duration::from_micros(20);

/// Starts the first worker, which also accepts connections.
pub(crate) fn start(core: &Arc<Core>, acceptor: Acceptor) -> Result<()> {
    let shard = &core.workers.shards[0];
    acceptor.attach(&shard.epoll)?;
    shard.started.store(true, SeqCst);
    Workers::spawn(core, 0, |core| run_with(core, 0, Some(acceptor)))
}

/// Runs any other worker, on its own thread, until the workers are stopped.
pub(crate) fn run(core: &Arc<Core>, shard: usize) {
    run_with(core, shard, None);
}

fn run_with(core: &Arc<Core>, shard: usize, acceptor: Option<Acceptor>) {
    places::be_prompt();
    let mut worker = Worker {
        shard,
        spin: core.config.spin,
        spin_beside_callers: places::spin_beside_callers(&core.config),
        hot: Vec::new(),
        helping: VecDeque::new(),
        acceptor,
        events: Vec::with_capacity(64),
        looked: Instant::now(),
        idle_looks: 0,
        failed_arms: 0,
    };
    let ran = catch_unwind(AssertUnwindSafe(|| worker.run(core)));
    drop(worker);
    if let Err(panic) = ran {
        give_up(core, message_of(&*panic));
    }
}

/// A worker panicked: fails the endpoint's transfers with its message. The process lives on.
fn give_up(core: &Arc<Core>, message: String) {
    tracing::error!("a worker panicked: {message}");
    let message: Arc<str> = message.into();
    let _ = core.panicked.set(Arc::clone(&message));
    for conn in core.open_conns() {
        conn.fail(Error::Panicked(Arc::clone(&message)));
    }
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown".into())
}

/// A worker thread.
struct Worker {
    shard: usize,
    /// How long it spins for more work before it sleeps.
    spin: Duration,
    /// How long it spins on lanes that callers use as well.
    spin_beside_callers: Duration,
    /// Lanes that are not armed, because they have just had something to do or callers look after
    /// them.
    hot: Vec<Arc<AttachedLane>>,
    /// Lanes that this worker helps with their shared work.
    helping: VecDeque<Arc<AttachedLane>>,
    acceptor: Option<Acceptor>,
    events: Vec<Event>,
    looked: Instant,
    idle_looks: u32,
    /// How many times in a row some lane could not be armed although there was nothing to do.
    failed_arms: u32,
}

impl Worker {
    fn run(&mut self, core: &Arc<Core>) {
        while !core.workers.stopping() {
            if self.spin(core) {
                self.failed_arms = 0;
            }
            let timeout = self.prepare_sleep(core);
            // Spinning may have consumed the bell, which does not ring again.
            if core.workers.stopping() {
                return;
            }
            self.wait(core, timeout);
            self.housekeep(core);
        }
    }

    fn shard<'a>(&self, core: &'a Core) -> &'a Shard {
        &core.workers.shards[self.shard]
    }

    /// Makes progress on hot lanes and helps with others, until they have been quiet for a while.
    /// If there was nothing to do, returns at once so that the worker sleeps again.
    ///
    /// Returns whether anything was done.
    fn spin(&mut self, core: &Arc<Core>) -> bool {
        let mut now = Instant::now();
        let mut glanced = now;
        let mut moved_at = None;
        loop {
            let mut moved = false;
            let mut free = false;
            for attached in &self.hot {
                if !attached.left_to_callers(now) {
                    free = true;
                    moved |= attached.progress(now);
                }
            }
            self.hot.retain(|attached| !attached.is_over());
            moved |= self.help();
            if !(free || moved) || core.workers.stopping() {
                return moved_at.is_some();
            }
            now = Instant::now();
            if moved {
                moved_at = Some(now);
            } else if moved_at.is_none_or(|moved_at| now - moved_at >= self.spin_at(now)) {
                return moved_at.is_some();
            } else {
                std::hint::spin_loop();
            }
            if now - glanced >= GLANCE {
                glanced = now;
                self.wait(core, Some(Duration::ZERO));
                self.housekeep(core);
            }
        }
    }

    /// How long to spin on the lanes that are hot now.
    fn spin_at(&self, now: Instant) -> Duration {
        let has_callers = self.hot.iter().any(|attached| attached.has_callers(now));
        if has_callers { self.spin_beside_callers } else { self.spin }
    }

    /// Does one part of the work that threads can share. Only one, because there may be other
    /// things to do.
    fn help(&mut self) -> bool {
        while let Some(attached) = self.helping.pop_front() {
            if attached.conn.lanes.help() {
                self.helping.push_back(attached);
                return true;
            }
        }
        false
    }

    /// Arms the hot lanes. Returns how long to sleep; `None` means until something happens.
    fn prepare_sleep(&mut self, core: &Arc<Core>) -> Option<Duration> {
        let shard = self.shard(core);
        let now = Instant::now();
        let mut timeout: Option<Duration> = None;
        // Another thread is at work on a lane that shows nothing and cannot be armed. It may be
        // waiting for this processor.
        let retry = if self.failed_arms > 1 { NAP } else { Duration::ZERO };
        let mut failed = false;
        self.hot.retain(|attached| {
            if let Some(away) = attached.stays_away(now) {
                timeout = Some(timeout.map_or(away, |timeout| away.min(timeout)));
                return true;
            }
            if attached.arm(&shard.epoll) {
                return false;
            }
            let again = if attached.has_work() { Duration::ZERO } else { retry };
            failed |= !attached.has_work();
            timeout = Some(timeout.map_or(again, |timeout| again.min(timeout)));
            true
        });
        self.failed_arms = if failed { self.failed_arms.saturating_add(1) } else { 0 };
        if self.shard > 0 {
            return timeout;
        }
        if self.acceptor.as_ref().is_some_and(Acceptor::is_busy) {
            timeout = Some(timeout.unwrap_or(HOUSEKEEPING).min(HOUSEKEEPING));
        }
        // Set before the checks below: a caller that posts after them sees it.
        shard.unhurried.store(true, SeqCst);
        if core.transfers.pending.load(SeqCst) > 0
            || self.idle_looks < 5
            || core.look_after_aftermaths()
            || core.look_after_untried()
        {
            shard.unhurried.store(false, SeqCst);
            timeout = Some(timeout.unwrap_or(HOUSEKEEPING).min(HOUSEKEEPING));
        }
        timeout
    }

    fn wait(&mut self, core: &Arc<Core>, timeout: Option<Duration>) {
        let shard = self.shard(core);
        self.events.clear();
        let waited = wait_on(&shard.epoll, &mut self.events, timeout);
        if let Err(e) = waited
            && e != rustix::io::Errno::INTR
        {
            tracing::error!("a worker cannot sleep: {e}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut rung = false;
        let events = std::mem::take(&mut self.events);
        for event in &events {
            match event.data.u64() {
                BELL => rung = true,
                token if token & ACCEPTOR != 0 => {
                    if let Some(acceptor) = &mut self.acceptor {
                        acceptor.ready(core, &shard.epoll, token & !ACCEPTOR);
                    }
                }
                token => {
                    let attached = shard.lanes.lock().get(&token).cloned();
                    if let Some(attached) = attached {
                        attached.woken();
                        self.heat(attached);
                    }
                }
            }
        }
        self.events = events;
        if rung {
            self.answer_bell(core);
        }
        if let Some(acceptor) = &mut self.acceptor {
            acceptor.end_turn(core, &shard.epoll);
        }
    }

    fn heat(&mut self, attached: Arc<AttachedLane>) {
        attached.heated();
        if !self.hot.iter().any(|other| Arc::ptr_eq(other, &attached)) {
            self.hot.push(attached);
        }
    }

    fn answer_bell(&mut self, core: &Arc<Core>) {
        let shard = self.shard(core);
        shard.bell.clear();
        for kick in std::mem::take(&mut *shard.kicks.lock()) {
            match kick {
                Kick::Lane(attached) => self.heat(attached),
                Kick::Help(attached) => {
                    let is_known = self.helping.iter().any(|other| Arc::ptr_eq(other, &attached));
                    if !is_known {
                        self.helping.push_back(attached);
                    }
                }
            }
        }
    }

    /// Ends transfers that are past their deadline, and gives up peers that are silent.
    fn housekeep(&mut self, core: &Arc<Core>) {
        if self.shard > 0 || self.looked.elapsed() < HOUSEKEEPING {
            return;
        }
        self.looked = Instant::now();
        core.look_after_aftermaths();
        core.look_after_untried();
        if core.transfers.pending.load(SeqCst) == 0 {
            self.idle_looks = self.idle_looks.saturating_add(1);
            return;
        }
        self.idle_looks = 0;
        core.enforce_deadlines();
        core.open_conns().iter().for_each(|conn| conn.check_liveness());
    }
}

/// Waits for events. The kernel measures an epoll's timeout in milliseconds, so shorter timeouts
/// use `poll`.
fn wait_on(
    epoll: &OwnedFd,
    events: &mut Vec<Event>,
    mut timeout: Option<Duration>,
) -> rustix::io::Result<()> {
    let timespec = |t: Duration| Timespec { tv_sec: 0, tv_nsec: t.as_nanos() as _ };
    if let Some(short) = timeout.filter(|t| !t.is_zero() && *t < Duration::from_millis(1)) {
        let mut fds = [PollFd::new(epoll, PollFlags::IN)];
        if poll(&mut fds, Some(&timespec(short)))? == 0 {
            return Ok(());
        }
        timeout = Some(Duration::ZERO);
    }
    let events = rustix::buffer::spare_capacity(events);
    epoll::wait(epoll, events, timeout.map(timespec).as_ref()).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use uccl_device::{CpuList, affinity::allowed_cpus};

    use crate::{Endpoint, drive::pair::on_loopback};

    fn endpoint(near: Option<CpuList>) -> Endpoint {
        Endpoint::start_on(on_loopback(), near).expect("an endpoint")
    }

    #[test]
    fn workers_keep_to_the_cpus_that_are_named_and_callers_do_not() {
        let before = allowed_cpus().expect("the kernel says");
        let first: CpuList = before.iter().take(1).collect();
        let near = endpoint(Some(first.clone()));
        let begun = Instant::now();
        while near.worker_cpus().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(20), "the worker does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(near.worker_cpus(), Some(first));
        assert_eq!(allowed_cpus(), Some(before));
        assert_eq!(endpoint(None).worker_cpus(), None);
    }
}
