//! A descriptor that becomes readable on demand, at once or later.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A timer that rings at once, at an instant, or not at all.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Makes the descriptor readable now.
    pub(super) fn ring(&self) {
        self.set(Duration::from_nanos(1));
    }

    /// Makes the descriptor readable at `at`, in place of an earlier setting.
    pub(super) fn ring_at(&self, at: Instant) {
        let wait = at.saturating_duration_since(Instant::now());
        self.set(wait.max(Duration::from_nanos(1)));
    }

    /// Makes the descriptor not readable.
    pub(super) fn silence(&self) {
        self.set(Duration::ZERO);
    }

    fn set(&self, wait: Duration) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value =
            Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let timer = Itimerspec { it_interval: never, it_value: value };
        if let Err(e) = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &timer) {
            tracing::error!("a timer cannot be set: {e}");
        }
    }
}
