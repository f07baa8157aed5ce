//! Keeps the process's signal handlers, as loading some providers replaces them.

use std::{ffi::c_int, mem::MaybeUninit, ptr};

/// The process's signal handlers. Dropping this restores them.
///
/// libinfinipath, which Debian's libfabric loads, sets handlers that end the process at Ctrl-C and
/// print a backtrace when it dies of a fault. Its signals are the program's to decide about.
pub(super) struct Signals(Vec<(c_int, libc::sigaction)>);

impl Signals {
    /// Keeps the present handlers.
    pub(super) fn keep() -> Self {
        let all = 1..=libc::SIGRTMAX();
        Self(all.filter_map(|signal| Some((signal, action(signal)?))).collect())
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, kept) in &self.0 {
            let is_kept = |now: libc::sigaction| now.sa_sigaction == kept.sa_sigaction;
            if action(*signal).is_none_or(is_kept) {
                continue;
            }
            tracing::debug!(signal, "a provider of libfabric took a signal, and gives it back");
            // SAFETY: the action is one that this signal had before, and the old one is not asked
            // for.
            unsafe { libc::sigaction(*signal, kept, ptr::null_mut()) };
        }
    }
}

/// The handler of a signal. `None` for signals that the C library keeps for itself.
fn action(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: nothing is changed, and the action is written to a live variable.
    let failed = unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) } != 0;
    // SAFETY: the call has written it.
    (!failed).then(|| unsafe { action.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn ignore(_: c_int) {}

    fn handler(signal: c_int) -> usize {
        action(signal).expect("it can be asked for").sa_sigaction
    }

    #[test]
    fn a_signal_that_was_taken_is_given_back() {
        // Signals that no other test of this process handles.
        let (taken, left) = (libc::SIGRTMAX() - 1, libc::SIGRTMAX() - 2);
        let before = (handler(taken), handler(left));
        let kept = Signals::keep();
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(taken, ignore as extern "C" fn(c_int) as usize) };
        assert_ne!(handler(taken), before.0);
        drop(kept);
        assert_eq!((handler(taken), handler(left)), before);
    }
}
