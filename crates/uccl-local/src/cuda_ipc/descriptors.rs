//! Descriptors of peers' memory that wait to be opened.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use rustix::process::{Resource, getrlimit};

/// How many descriptors wait in this process.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The most descriptors that may wait: a quarter of those that this process may have.
fn most() -> usize {
    static MOST: LazyLock<usize> = LazyLock::new(|| {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
        usize::try_from(limit).unwrap_or(usize::MAX)
    });
    *MOST
}

/// Descriptors that came with an offer, kept until they are no longer needed.
#[derive(Debug, Default)]
pub(super) struct PendingDescriptors(Vec<OwnedFd>);

impl PendingDescriptors {
    /// Keeps descriptors.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] when too many wait already; then these are closed.
    pub(super) fn of(fds: Vec<OwnedFd>) -> io::Result<Self> {
        Self::of_at_most(fds, most())
    }

    fn of_at_most(fds: Vec<OwnedFd>, most: usize) -> io::Result<Self> {
        let sum = |waiting: usize| waiting.checked_add(fds.len()).filter(|sum| *sum <= most);
        let counted = WAITING.fetch_update(Relaxed, Relaxed, sum);
        counted.map_err(|_| io::ErrorKind::QuotaExceeded)?;
        Ok(Self(fds))
    }

    pub(super) fn as_slice(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Drop for PendingDescriptors {
    fn drop(&mut self) {
        WAITING.fetch_sub(self.0.len(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_do_not_take_all_descriptors() {
        let fds = |count| {
            let fd = |_| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            (0..count).map(fd).collect::<Vec<_>>()
        };
        let some = PendingDescriptors::of_at_most(fds(3), 5).unwrap();
        let too_many = PendingDescriptors::of_at_most(fds(3), 5).unwrap_err();
        assert_eq!(too_many.kind(), io::ErrorKind::QuotaExceeded);
        drop(some);
        assert_eq!(PendingDescriptors::of_at_most(fds(5), 5).unwrap().as_slice().len(), 5);
        assert!(most() >= 16);
    }
}
