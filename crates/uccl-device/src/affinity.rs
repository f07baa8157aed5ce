//! The CPUs that the calling thread may run on.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpu::CpuList;

/// The CPUs that the calling thread may run on. `None` if the kernel does not report them, as on
/// machines with more than 1024 CPUs, for which a set has no room.
pub fn allowed_cpus() -> Option<CpuList> {
    let set = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect())
}

/// Restricts the calling thread to those of `cpus` that it may run on already, and returns these.
/// If there are none, changes nothing. It never lets a thread run where it could not before.
///
/// # Errors
/// The kernel's error, if it refuses.
pub fn keep_on(cpus: &CpuList) -> io::Result<CpuList> {
    let allowed = allowed_cpus().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
    let both: CpuList = cpus.iter().filter(|cpu| allowed.contains(*cpu)).collect();
    if !both.is_empty() && both != allowed {
        set(&both)?;
    }
    Ok(both)
}

/// Sets the CPUs that the calling thread may run on, to undo [`keep_on`].
pub(crate) fn set(cpus: &CpuList) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu as usize));
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_within_the_cpus_that_it_was_allowed() {
        // In a thread of its own, so that the restriction ends with it.
        let thread = std::thread::spawn(|| {
            let allowed = allowed_cpus().expect("the kernel says");
            let first: CpuList = allowed.iter().take(1).collect();
            assert_eq!(keep_on(&first).expect("allowed"), first);
            assert_eq!(allowed_cpus(), Some(first.clone()));
            // The set never grows: not by asking for all, and not by asking for others.
            assert_eq!(keep_on(&allowed).expect("allowed"), first);
            let others: CpuList = allowed.iter().skip(1).collect();
            assert!(keep_on(&others).expect("nothing to do").is_empty());
            assert_eq!(allowed_cpus(), Some(first));
            set(&allowed).expect("what it had");
            assert_eq!(allowed_cpus(), Some(allowed));
        });
        thread.join().expect("no panic");
    }
}
