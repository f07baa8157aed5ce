//! The bell, on which a lane sleeps: it watches the descriptors of the lane's channels and a timer.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};

/// One descriptor, which is readable when any of the watched descriptors is or when a set time has
/// come.
pub(super) struct Bell {
    epoll: OwnedFd,
    alarm: OwnedFd,
    /// When the timer rings, or when it last rang if it was not set again since.
    due: Option<Instant>,
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let alarm = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &alarm, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { epoll, alarm, due: None })
    }

    /// Watches a channel's descriptor until it is closed.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(1), EventFlags::IN)?)
    }

    /// Stops watching a descriptor.
    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) {
        // This fails only if the descriptor is not watched, and then nothing is left to do.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Rings after this time, or earlier if it is already set to.
    pub(super) fn set_within(&mut self, after: Duration) {
        let now = Instant::now();
        if self.due.is_none_or(|due| now + after < due) {
            self.set(now, Some(after));
        }
    }

    /// Rings after this time, and stops a ring that has already started. An earlier time that is
    /// set and has not come yet stays: a needless ring costs little, while changing the timer costs
    /// every time.
    pub(super) fn set(&mut self, now: Instant, after: Option<Duration>) {
        let (wanted, due) = (after.map(|after| now + after), self.due);
        match (due, wanted) {
            (None, None) => return,
            (Some(due), None) if due > now => return,
            (Some(due), Some(wanted)) if due > now && due <= wanted => return,
            _ => self.due = wanted,
        }
        // Zero would switch the timer off.
        let after = after.map_or(Duration::ZERO, |after| after.max(Duration::from_nanos(1)));
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: after.as_secs() as _, tv_nsec: after.subsec_nanos() as _ };
        let time = Itimerspec { it_interval: zero, it_value: value };
        // Setting the timer also clears a ring that nobody has read. It fails only for bad
        // arguments.
        let _ = timerfd_settime(&self.alarm, TimerfdTimerFlags::empty(), &time);
    }

    /// The descriptor to sleep on. It lives as long as the bell.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn rings(bell: &Bell, within_ms: i64) -> bool {
        let timeout = Timespec { tv_sec: 0, tv_nsec: within_ms * 1_000_000 };
        poll(&mut [PollFd::new(&bell.epoll, PollFlags::IN)], Some(&timeout)).expect("polled") > 0
    }

    #[test]
    fn it_rings_when_a_time_has_come() {
        let mut bell = Bell::new().expect("a bell");
        assert!(!rings(&bell, 1));
        bell.set(Instant::now(), Some(Duration::ZERO));
        assert!(rings(&bell, 900));
        bell.set(Instant::now(), None);
        assert!(!rings(&bell, 1));
        bell.set(Instant::now(), Some(Duration::from_secs(1000)));
        assert!(!rings(&bell, 1));
        bell.set_within(Duration::from_secs(2000));
        assert!(!rings(&bell, 1));
        bell.set_within(Duration::ZERO);
        assert!(rings(&bell, 900));
    }

    #[test]
    fn an_earlier_ring_stays() {
        let mut bell = Bell::new().expect("a bell");
        let soon = Duration::from_millis(30);
        bell.set(Instant::now(), Some(soon));
        bell.set(Instant::now(), Some(soon * 100));
        bell.set(Instant::now(), None);
        assert!(rings(&bell, 900));
        // The first time has passed, so the new one counts.
        bell.set(Instant::now(), Some(soon * 100));
        assert!(!rings(&bell, 1));
    }

    #[test]
    fn it_rings_for_a_watched_descriptor() {
        let bell = Bell::new().expect("a bell");
        let (reader, mut writer) = io::pipe().expect("a pipe");
        bell.watch(reader.as_fd()).expect("watched");
        assert!(!rings(&bell, 1));
        io::Write::write_all(&mut writer, &[1]).expect("written");
        assert!(rings(&bell, 900));
        bell.unwatch(reader.as_fd());
        assert!(!rings(&bell, 1));
    }
}
