//! Waking a thread that waits for sockets.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
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

/// A [`Waker`] that writes only if nobody else has since the thread last looked.
pub(crate) struct Bell {
    waker: Waker,
    is_rung: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { waker: Waker::new()?, is_rung: AtomicBool::new(false) })
    }

    /// Has the thread look for work.
    pub(crate) fn ring(&self) {
        if !self.is_rung.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// The thread begins to look.
    pub(crate) fn clear(&self) {
        self.waker.clear();
        self.is_rung.store(false, Ordering::Release);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.waker.as_fd()
    }
}
