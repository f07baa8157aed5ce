//! Waking a thread that waits for sockets.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{
        AtomicBool,
        Ordering::{Relaxed, SeqCst},
    },
};

use rustix::event::{EventfdFlags, eventfd};

/// Ends a thread's wait in epoll, from any thread.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings; a bell that has been rung and not heard is not rung twice.
    pub(crate) fn wake(&self) {
        // A counter that cannot take one more is rung already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Hears the bell.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A [`Waker`] for a thread that also looks whether it was rung: only a thread that sleeps costs a
/// system call.
pub(crate) struct Bell {
    waker: Waker,
    is_rung: AtomicBool,
    /// The thread sleeps, or is about to.
    is_asleep: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let (is_rung, is_asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { waker: Waker::new()?, is_rung, is_asleep })
    }

    /// Has the thread look for work.
    pub(crate) fn ring(&self) {
        // The thread looks at the first after it has set the second: one of the two sees the other.
        if !self.is_rung.swap(true, SeqCst) && self.is_asleep.load(SeqCst) {
            self.waker.wake();
        }
    }

    /// Rings if the thread sleeps.
    pub(crate) fn rouse(&self) {
        if self.is_asleep.load(Relaxed) {
            self.ring();
        }
    }

    /// Whether the thread was rung since it last began to look.
    pub(crate) fn is_rung(&self) -> bool {
        self.is_rung.load(Relaxed)
    }

    /// The thread sleeps from now on; false if it was rung and should not.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.is_asleep.store(true, SeqCst);
        let may_sleep = !self.is_rung.load(SeqCst);
        if !may_sleep {
            self.end_sleep();
        }
        may_sleep
    }

    pub(crate) fn end_sleep(&self) {
        self.is_asleep.store(false, Relaxed);
    }

    /// The thread begins to look.
    pub(crate) fn clear(&self) {
        self.is_rung.store(false, SeqCst);
    }

    /// The bell has ended a sleep.
    pub(crate) fn hear(&self) {
        self.waker.clear();
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.waker.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::AtomicU32,
        time::{Duration, Instant},
    };

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn can_be_heard(bell: &Bell) -> bool {
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).expect("a descriptor") > 0
    }

    #[test]
    fn only_a_thread_that_sleeps_costs_a_system_call() {
        let bell = Bell::new().expect("an eventfd");
        bell.rouse();
        assert!(!bell.is_rung(), "it is awake");
        bell.ring();
        assert!(bell.is_rung() && !can_be_heard(&bell));
        assert!(!bell.begin_sleep(), "there is work");
        bell.clear();
        assert!(bell.begin_sleep());
        bell.rouse();
        assert!(bell.is_rung() && can_be_heard(&bell));
        bell.end_sleep();
        bell.hear();
        assert!(!can_be_heard(&bell));
    }

    #[test]
    fn no_ring_is_lost() {
        // On a busy machine a turn takes milliseconds, else a microsecond.
        const RINGS: u32 = 20_000;
        const TIME: Duration = Duration::from_secs(10);
        let (bell, done) = (Bell::new().expect("an eventfd"), AtomicU32::new(0));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let begun = Instant::now();
                // Each ring follows the end of the work of the one before.
                for ring in (0..RINGS).take_while(|_| begun.elapsed() < TIME) {
                    bell.ring();
                    while done.load(SeqCst) == ring {
                        std::thread::yield_now();
                    }
                }
                is_over.store(true, SeqCst);
                bell.ring();
            });
            while !is_over.load(SeqCst) {
                if bell.begin_sleep() {
                    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
                    let heard = poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&limit));
                    bell.end_sleep();
                    assert!(heard.expect("a descriptor") > 0, "a ring was lost");
                    bell.hear();
                }
                if bell.is_rung() {
                    bell.clear();
                    done.fetch_add(1, SeqCst);
                }
            }
        });
    }
}
