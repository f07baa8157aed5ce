//! CUDA streams that wait for words of this endpoint's memory.
//!
//! A word in host memory is looked at by a thread of ours, and the stream waits for a word of the engine's: so the wait has
//! an end. A word in a GPU's memory is the stream's own to look at: to fetch it takes a copy, which could stand behind the
//! wait. Either way the word's region stays leased for as long, and no memory goes back to the driver meanwhile, which could wait for the
//! stream and hold up what changes the word.

use std::{
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Release},
        },
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Passing, Signal};

use super::regions::Lease;
use crate::ids::MrId;

/// How long the thread sleeps between two looks.
const NAP: Duration = Duration::from_micros(50);
/// For so long after the last wait began it yields only.
const BRISK: Duration = Duration::from_millis(1);

/// The waits, and the thread that looks at them.
#[derive(Default)]
pub(crate) struct HeldStreams(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// The endpoint is closed or broken: waits for words of the host are over.
    is_closed: AtomicBool,
}

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
    pub(crate) fn add(&self, wait: Wait) {
        let mut state = self.0.state.lock();
        state.waits.push(wait);
        state.began = Some(Instant::now());
        if state.is_running {
            return;
        }
        if let Some(ended) = state.thread.take() {
            // It has left its loop.
            let _ = ended.join();
        }
        let shared = Arc::downgrade(&self.0);
        let thread = std::thread::Builder::new().name("uccl-words".to_owned());
        state.thread = thread.spawn(move || watch(&shared)).ok();
        state.is_running = state.thread.is_some();
    }

    /// Ends the waits for words of a region that are over or can be ended, because it is about to be let go of.
    pub(crate) fn end_those_of(&self, id: MrId) {
        self.0.end_if(|wait, is_closed| {
            let can_end = matches!(wait.what, What::Told { .. });
            wait.lease.mr().id == id && (can_end || wait.is_over(is_closed))
        });
    }

    /// Ends the waits that are over.
    pub(crate) fn look(&self) {
        self.0.end_if(Wait::is_over);
    }

    /// Ends the waits for words of the host, and the thread.
    pub(crate) fn close(&self) {
        self.0.is_closed.store(true, Release);
        self.look();
        // Without the lock, which the thread takes.
        let thread = self.0.state.lock().thread.take();
        if let Some(thread) = thread {
            // A panic of it ends its looks, which the endpoint's end makes by itself.
            let _ = thread.join();
        }
    }
}

impl Drop for HeldStreams {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn end_if(&self, is_over: impl Fn(&Wait, bool) -> bool) {
        let is_closed = self.is_closed.load(Acquire);
        let mut state = self.state.lock();
        let over: Vec<_> = state.waits.extract_if(.., |wait| is_over(wait, is_closed)).collect();
        drop(state);
        drop(over);
    }

    /// Whether the thread may end: nothing is left for it.
    fn leaves(&self) -> bool {
        let mut state = self.state.lock();
        let leaves = state.waits.is_empty() || self.is_closed.load(Acquire);
        state.is_running &= !leaves;
        leaves
    }

    fn is_brisk(&self) -> bool {
        self.state.lock().began.is_some_and(|began| began.elapsed() < BRISK)
    }
}

fn watch(shared: &Weak<Shared>) {
    loop {
        let is_brisk = {
            let Some(shared) = shared.upgrade() else { return };
            shared.end_if(Wait::is_over);
            if shared.leaves() {
                return;
            }
            shared.is_brisk()
        };
        match is_brisk {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }
}

impl Wait {
    fn is_over(&self, is_closed: bool) -> bool {
        match &self.what {
            What::Passes(passing) => passing.is_over(),
            What::Told { address, at_least, until, .. } => {
                // SAFETY: an aligned word in a region that the lease keeps registered, of host memory.
                let word = unsafe { AtomicU64::from_ptr(*address as *mut u64) };
                let has_come = word.load(Acquire).wrapping_sub(*at_least) as i64 >= 0;
                let is_late = || until.is_some_and(|until| until <= Instant::now());
                has_come || is_late() || is_closed
            }
        }
    }
}
