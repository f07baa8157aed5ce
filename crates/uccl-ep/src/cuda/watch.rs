//! A thread that checks whether ranks are still there, because kernels cannot.

use std::{
    fs, io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;
use uccl_device::Process;

use super::status::Reports;
use crate::shared::error::{Error, Result};

/// The time between two checks.
const WATCHING: Duration = Duration::from_millis(2);

/// The thread that watches the peers.
pub(super) struct Watch {
    flags: Arc<Flags>,
    /// By rank, the reason why it is gone.
    losses: Arc<Vec<OnceLock<String>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Whether the thread looks at the peers, and whether it has to end.
#[derive(Default)]
struct Flags {
    has_begun: AtomicBool,
    is_over: AtomicBool,
}

impl Watch {
    /// Makes a thread that tells the kernels of lost ranks, those for which `loss` returns a
    /// reason, from [`begin`](Self::begin) on.
    pub(super) fn new(
        ranks: usize,
        reports: Arc<Reports>,
        loss: impl Fn(usize) -> Option<String> + Send + 'static,
    ) -> Result<Self> {
        let flags = Arc::new(Flags::default());
        let losses: Arc<Vec<_>> = Arc::new((0..ranks).map(|_| OnceLock::new()).collect());
        let (shared, known) = (Arc::clone(&flags), Arc::clone(&losses));
        let watch = move || {
            while !shared.is_over.load(Ordering::Acquire) {
                if shared.has_begun.load(Ordering::Acquire) {
                    report_losses(&known, &reports, &loss);
                }
                thread::park_timeout(WATCHING);
            }
        };
        let thread = thread::Builder::new().name("uccl-ep-watch".into()).spawn(watch);
        let os = |source| Error::Os { what: "starting a thread".to_owned(), source };
        Ok(Self { flags, losses, thread: Mutex::new(Some(thread.map_err(os)?)) })
    }

    /// Looks at the peers from now on.
    pub(super) fn begin(&self) {
        self.flags.has_begun.store(true, Ordering::Release);
    }

    /// Ends the thread. It reports nothing any more when this returns.
    pub(super) fn end(&self) {
        self.flags.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.lock().take() {
            thread.thread().unpark();
            // It has no way to fail but a panic, which has been printed.
            let _ = thread.join();
        }
    }

    /// Watches processes, by rank; there is no thread if there are none.
    pub(super) fn of_processes(
        processes: Vec<Option<Process>>,
        reports: &Arc<Reports>,
    ) -> Result<Option<Self>> {
        if processes.iter().all(Option::is_none) {
            return Ok(None);
        }
        let ranks = processes.len();
        let loss = move |rank: usize| {
            let ended = processes[rank].as_ref().is_some_and(Process::has_ended);
            ended.then(|| "has ended".to_owned())
        };
        Self::new(ranks, Arc::clone(reports), loss).map(Some)
    }

    /// The reason why a rank is gone.
    pub(super) fn loss(&self, rank: usize) -> Option<String> {
        self.losses.get(rank)?.get().cloned()
    }
}

/// Tells kernels of the peers that are gone.
fn report_losses(
    losses: &[OnceLock<String>],
    reports: &Reports,
    loss: &impl Fn(usize) -> Option<String>,
) {
    for (rank, known) in losses.iter().enumerate().filter(|(_, known)| known.get().is_none()) {
        if let Some(why) = loss(rank) {
            known.get_or_init(|| why);
            reports.set_lost(rank);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

/// Opens a process that was started at this time, to watch it; `None` if the number means another
/// process here, as in another namespace.
pub(super) fn process(pid: u32, started: u64) -> Option<Process> {
    let process = Process::open(pid.cast_signed()).ok()?;
    // The opened process is the right one, or was another all along.
    (started_at(&pid.to_string()).ok()? == started).then_some(process)
}

/// The start of this process.
pub(super) fn own_start() -> Result<u64> {
    let os = |source| Error::Os { what: "asking when this process was started".to_owned(), source };
    started_at("self").map_err(os)
}

/// The start of a process, in ticks since the host's start.
fn started_at(process: &str) -> io::Result<u64> {
    /// The index of this number behind the name, which is in brackets and may have any text.
    const NTH: usize = 19;
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
    let number = behind.split_ascii_whitespace().nth(NTH).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{stat:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_watched_that_was_started_when_it_says() {
        let (pid, started) = (std::process::id(), own_start().unwrap());
        assert!(started > 0);
        assert!(process(pid, started).is_some_and(|own| !own.has_ended()));
        assert!(process(pid, started + 1).is_none());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let at = started_at(&child.id().to_string()).unwrap();
        let watched = process(child.id(), at).unwrap();
        assert!(!watched.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watched.has_ended());
        assert!(process(child.id(), at).is_none());
    }
}
