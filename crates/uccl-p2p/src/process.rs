//! Tells a process from its forked children. A child made by `fork` has its parent's memory and
//! descriptors, but none of its threads: all objects from before the fork belong to the parent.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::error::{Error, Result};

/// How many forks lie between this process and the first process that asked.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// A process. Telling it from its children takes no system call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Process {
    forks: u32,
    pid: u32,
}

impl Process {
    /// The calling process.
    ///
    /// # Errors
    /// The system has no memory to register the function that counts forks.
    pub(crate) fn this() -> Result<Self> {
        static COUNTED: OnceLock<i32> = OnceLock::new();
        // SAFETY: a function that may be called in a child at any time: it adds to a number.
        let code =
            *COUNTED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count)) });
        if code != 0 {
            let e = std::io::Error::from_raw_os_error(code);
            return Err(Error::os("asking to be told of forks", e));
        }
        Ok(Self { forks: forks(), pid: std::process::id() })
    }

    /// Whether it is the calling process.
    pub(crate) fn is_this(self) -> bool {
        self.forks == forks()
    }

    /// Fails if the calling process is a child of it.
    pub(crate) fn check(self) -> Result<()> {
        if self.is_this() { Ok(()) } else { Err(Error::Forked { owner: self.pid }) }
    }
}

/// A number that differs between a child and its parent, once an endpoint has been made.
pub(crate) fn forks() -> u32 {
    FORKS.load(Relaxed)
}

/// Runs in each child, before `fork` returns there.
extern "C" fn count() {
    FORKS.fetch_add(1, Relaxed);
}
