//! A thread that runs while its owner has work for it.

use std::{
    io,
    thread::{Builder, JoinHandle},
};

/// A thread that runs while its owner has work for it. The owner keeps this and the work under one
/// lock, which the thread takes to look for work.
///
/// ```
/// # use std::sync::{Arc, Mutex};
/// # use uccl_device::DemandThread;
/// #[derive(Default)]
/// struct Jobs {
///     jobs: Vec<u32>,
///     thread: DemandThread,
/// }
///
/// fn add(all: &Arc<Mutex<Jobs>>, job: u32) -> std::io::Result<()> {
///     let mut jobs = all.lock().expect("no panic");
///     jobs.jobs.push(job);
///     let ours = Arc::clone(all);
///     jobs.thread.start("jobs", move || {
///         loop {
///             let mut jobs = ours.lock().expect("no panic");
///             let Some(job) = jobs.jobs.pop() else { return jobs.thread.leave() };
///             drop(jobs);
///             println!("{job}");
///         }
///     })
/// }
/// # let all = Arc::default();
/// # add(&all, 1).and(add(&all, 2)).expect("a thread");
/// # let thread = all.lock().expect("no panic").thread.take();
/// # thread.expect("it has run").join().expect("no panic");
/// ```
#[derive(Debug, Default)]
pub struct DemandThread {
    /// The thread, which runs or has left.
    thread: Option<JoinHandle<()>>,
    /// The thread takes work that is there now.
    is_running: bool,
}

impl DemandThread {
    /// No thread.
    #[must_use]
    pub const fn new() -> Self {
        Self { thread: None, is_running: false }
    }

    /// Starts the thread, unless it runs. A thread that has left is joined before; it takes no lock
    /// any more.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let has_panicked = self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        if self.is_running && !has_panicked {
            return Ok(());
        }
        self.is_running = false;
        if let Some(before) = self.thread.take() {
            // A panic has been reported already.
            let _ = before.join();
        }
        self.thread = Some(Builder::new().name(name.to_owned()).spawn(run)?);
        self.is_running = true;
        Ok(())
    }

    /// Notes that the thread takes no more work. The thread calls it under the owner's lock, as its
    /// last use of that lock, when it finds no work.
    pub fn leave(&mut self) {
        self.is_running = false;
    }

    /// Whether the thread takes work that is there now.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Takes out the thread, to be joined without the owner's lock.
    #[must_use]
    pub fn take(&mut self) -> Option<JoinHandle<()>> {
        self.thread.take()
    }

    /// Joins the thread if that takes no time. One that is held up is left to itself.
    pub fn join_if_over(&mut self) {
        if let Some(thread) = self.take().filter(JoinHandle::is_finished) {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, mpsc};

    use super::*;

    /// Starts a thread that tells of its beginning, and leaves when it is told to.
    fn begin(
        owner: &Arc<Mutex<DemandThread>>,
        began: &mpsc::Sender<u32>,
        number: u32,
    ) -> mpsc::Sender<()> {
        let ((go, stop), began, ours) = (mpsc::channel(), began.clone(), Arc::clone(owner));
        let run = move || {
            began.send(number).expect("awaited");
            // An error: nobody will say when.
            let _ = stop.recv();
            ours.lock().expect("no panic").leave();
        };
        owner.lock().expect("no panic").start("test", run).expect("a thread");
        go
    }

    fn joined(owner: &Mutex<DemandThread>) {
        let thread = owner.lock().expect("no panic").take();
        thread.expect("a thread").join().expect("no panic");
    }

    #[test]
    fn a_thread_that_runs_is_not_started_again() {
        let (owner, (begins, began)) = (Arc::default(), mpsc::channel());
        let go = begin(&owner, &begins, 1);
        let second = begin(&owner, &begins, 2);
        drop(go);
        joined(&owner);
        drop((second, begins));
        assert_eq!(began.iter().collect::<Vec<_>>(), [1]);
        assert!(!owner.lock().expect("no panic").is_running());
    }

    #[test]
    fn a_thread_that_has_left_is_followed_by_another() {
        let (owner, (begins, began)) = (Arc::default(), mpsc::channel());
        for number in 0..3 {
            let go = begin(&owner, &begins, number);
            assert!(owner.lock().expect("no panic").is_running());
            drop(go);
            while owner.lock().expect("no panic").is_running() {
                std::thread::yield_now();
            }
        }
        joined(&owner);
        drop(begins);
        assert_eq!(began.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn a_thread_that_has_panicked_is_followed_by_another() {
        let (owner, (begins, began)) = (Arc::<Mutex<DemandThread>>::default(), mpsc::channel());
        let panics = || std::panic::resume_unwind(Box::new("as a test"));
        owner.lock().expect("no panic").start("test", panics).expect("a thread");
        while !owner.lock().expect("no panic").thread.as_ref().expect("a thread").is_finished() {
            std::thread::yield_now();
        }
        drop(begin(&owner, &begins, 1));
        joined(&owner);
        drop(begins);
        assert_eq!(began.iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_thread_that_is_held_up_is_left_to_itself() {
        let (owner, (begins, began)) = (Arc::default(), mpsc::channel());
        let go = begin(&owner, &begins, 1);
        assert_eq!(began.recv(), Ok(1));
        owner.lock().expect("no panic").join_if_over();
        assert!(owner.lock().expect("no panic").take().is_none());
        drop(go);
    }
}
