//! CUDA streams that wait for words of this endpoint's memory.
//!
//! A word in host memory is looked at by a thread of ours, and the stream waits for a word of the engine's: so the wait has
//! an end. A word in a GPU's memory is the stream's own to look at: to fetch it takes a copy, which could stand behind the
//! wait. Either way the word's region stays leased for as long, and no memory goes back to the driver meanwhile, which could wait for the
//! stream and hold up what changes the word.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Acquire},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Passing, Signal};

use super::{connection::Core, regions::Lease};
use crate::ids::MrId;

/// How long the thread sleeps between two looks.
const NAP: Duration = Duration::from_micros(50);
/// For so long after the last wait began it yields only.
const BRISK: Duration = Duration::from_millis(1);

/// The waits, and the thread that looks at them.
#[derive(Default)]
pub(crate) struct HeldStreams(Mutex<State>);

#[derive(Default)]
struct State {
    waits: Vec<Wait>,
    began: Option<Instant>,
    thread: Option<JoinHandle<()>>,
    is_running: bool,
}

/// A stream's wait. Once it is dropped, the stream goes on or has gone on.
pub(crate) struct Wait {
    /// Keeps the word's region registered.
    pub(crate) lease: Lease,
    pub(crate) what: What,
}

/// How a stream waits.
pub(crate) enum What {
    /// For the word itself.
    Passes(Passing),
    /// For a signal, which is given when the word is at the value or ahead of it, or time is over.
    Told { address: usize, at_least: u64, until: Option<Instant>, _signal: Signal },
}

impl HeldStreams {
    /// Looks after a wait until it is over. If the system has no thread left, the next wait gets one, or the endpoint's end
    /// looks.
    pub(crate) fn add(&self, core: &Arc<Core>, wait: Wait) {
        let mut state = self.0.lock();
        state.waits.push(wait);
        state.began = Some(Instant::now());
        if state.is_running {
            return;
        }
        if let Some(ended) = state.thread.take() {
            // It has left its loop.
            let _ = ended.join();
        }
        let core = Arc::downgrade(core);
        let thread = std::thread::Builder::new().name("uccl-words".to_owned());
        state.thread = thread.spawn(move || watch(&core)).ok();
        state.is_running = state.thread.is_some();
    }

    /// Ends the waits for words of a region that are over or can be ended, because it is about to be let go of.
    pub(crate) fn end_those_of(&self, core: &Core, id: MrId) {
        let mut state = self.0.lock();
        let ends = |wait: &mut Wait| {
            let can_end = matches!(wait.what, What::Told { .. });
            wait.lease.mr().id == id && (can_end || wait.is_over(core))
        };
        let ended: Vec<_> = state.waits.extract_if(.., ends).collect();
        drop(state);
        drop(ended);
    }

    /// Ends the waits that are over. Those for words of the host are over, too, when their endpoint closes.
    pub(crate) fn look(&self, core: &Core) {
        let mut state = self.0.lock();
        let over: Vec<_> = state.waits.extract_if(.., |wait| wait.is_over(core)).collect();
        drop(state);
        drop(over);
    }

    /// Whether the thread may end: nothing is left for it.
    fn leaves(&self, core: &Core) -> bool {
        let mut state = self.0.lock();
        let leaves = state.waits.is_empty() || core.usable().is_err();
        state.is_running &= !leaves;
        leaves
    }

    fn is_brisk(&self) -> bool {
        self.0.lock().began.is_some_and(|began| began.elapsed() < BRISK)
    }

    /// Waits for the thread, which ends when the endpoint is closed.
    pub(crate) fn join(&self) {
        let thread = self.0.lock().thread.take();
        if let Some(thread) =
            thread.filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            let _ = thread.join();
        }
    }
}

fn watch(core: &Weak<Core>) {
    loop {
        let brisk = {
            let Some(core) = core.upgrade() else { return };
            core.held.look(&core);
            if core.held.leaves(&core) {
                return;
            }
            core.held.is_brisk()
        };
        match brisk {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }
}

impl Wait {
    fn is_over(&self, core: &Core) -> bool {
        match &self.what {
            What::Passes(passing) => passing.is_over(),
            What::Told { address, at_least, until, .. } => {
                // SAFETY: an aligned word in a region that the lease keeps registered, of host memory.
                let word = unsafe { AtomicU64::from_ptr(*address as *mut u64) };
                let has_come = word.load(Acquire).wrapping_sub(*at_least) as i64 >= 0;
                let is_late = || until.is_some_and(|until| until <= Instant::now());
                has_come || is_late() || core.usable().is_err()
            }
        }
    }
}
