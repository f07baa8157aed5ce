//! Threads that sleep until a transfer has ended.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::event::{EventfdFlags, eventfd};

use crate::{
    error::{Error, Result},
    process,
};

/// One thread's bell: a descriptor that can be polled beside others.
#[derive(Debug)]
pub(crate) struct Parker(OwnedFd);

impl Parker {
    pub(crate) fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::os("making an eventfd", e))?;
        Ok(Self(fd))
    }

    /// This thread's bell, made at its first use. A thread of a forked child gets another one than
    /// its parent's.
    pub(crate) fn of_thread() -> Result<Arc<Self>> {
        thread_local! {
            static PARKER: std::cell::RefCell<Option<(u32, Arc<Parker>)>> = const { std::cell::RefCell::new(None) };
        }
        PARKER.with_borrow_mut(|slot| match slot {
            Some((forks, parker)) if *forks == process::forks() => Ok(Arc::clone(parker)),
            _ => {
                let parker = Arc::new(Self::new()?);
                *slot = Some((process::forks(), Arc::clone(&parker)));
                Ok(parker)
            }
        })
    }

    pub(crate) fn ring(&self) {
        // If the counter is full, the bell has been rung often enough.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the rings so far.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
