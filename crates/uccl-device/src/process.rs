//! Another process of this host, watched for its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

/// Another process, with a pidfd that shows its end: then its number may come to mean another
/// process.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    handle: Option<OwnedFd>,
}

impl Process {
    /// The process `pid`, which must be known to live (for example because a socket to it is open).
    /// On kernels without pidfds nothing protects against reuse of the number.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn open(pid: i32) -> io::Result<Self> {
        // rustix asserts that a number is not negative, and peers send numbers.
        let positive = Some(pid).filter(|pid| *pid > 0);
        let raw = positive.and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let handle = match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => Some(fd),
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Self { pid, handle })
    }

    /// Its process id.
    #[inline]
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The pidfd, which becomes readable when the process ends; `None` where the kernel has none.
    #[must_use]
    pub fn handle(&self) -> Option<BorrowedFd<'_>> {
        self.handle.as_ref().map(AsFd::as_fd)
    }

    /// Whether it has ended. False where the kernel has no pidfd.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let Some(handle) = &self.handle else { return false };
        let mut fds = [PollFd::new(handle, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let process = Process::open(child.id().cast_signed()).expect("a process that lives");
        assert_eq!(process.pid(), child.id().cast_signed());
        assert!(!process.has_ended());
        child.kill().expect("a child");
        child.wait().expect("a child");
        assert!(process.has_ended() || process.handle().is_none());
        assert!(Process::open(child.id().cast_signed()).is_err() || process.handle().is_none());
    }

    #[test]
    fn a_number_that_names_no_process_is_refused() {
        assert!(Process::open(0).is_err() && Process::open(-1).is_err());
    }
}
