//! The threads of this process.

use std::fs;

use anyhow::{Context as _, Result};

const FOLDER: &str = "/proc/self/task";
/// The exit of the thread has begun: it runs no code of a library any more
/// (`include/linux/sched.h`).
const PF_EXITING: u64 = 0x4;

/// The number of threads that may still run code. A thread that was joined may be in the kernel's
/// list for a moment longer.
pub(crate) fn count() -> Result<usize> {
    let threads = fs::read_dir(FOLDER).context(FOLDER)?;
    let ids = threads.map(|thread| Ok(thread.context(FOLDER)?.file_name()));
    let ids: Vec<_> = ids.collect::<Result<_>>()?;
    Ok(ids.iter().filter(|id| is_running(&id.to_string_lossy())).count())
}

fn is_running(id: &str) -> bool {
    // One without the file has ended meanwhile.
    fs::read_to_string(format!("{FOLDER}/{id}/stat")).is_ok_and(|stat| !is_exiting(&stat))
}

/// Whether the exit of a thread with this line (`proc_pid_stat(5)`) has begun.
fn is_exiting(stat: &str) -> bool {
    // The name may have any character; the flags are the seventh field behind it.
    let flags = stat.rsplit(')').next().and_then(|fields| fields.split_whitespace().nth(6));
    flags.and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|flags| flags & PF_EXITING != 0)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_was_joined_does_not_run() {
        for _ in 0..2000 {
            let thread = thread::spawn(|| {
                // SAFETY: it has no arguments.
                let id = unsafe { libc::gettid() }.to_string();
                assert!(is_running(&id));
                id
            });
            let id = thread.join().expect("a thread");
            assert!(!is_running(&id));
        }
        assert!(count().expect("the list") >= 1);
    }

    #[test]
    fn the_flags_are_behind_the_name() {
        let line = |flags: u64| format!("7 (a) b) R 1 2 3 0 -1 {flags} 0 0");
        assert!(is_exiting(&line(0x40_0044)) && !is_exiting(&line(0x40_0040)));
    }
}
