//! CUDA streams that wait for words of this endpoint's memory.
//!
//! A thread of ours looks at a word in host memory, and the stream waits for a word of the
//! engine's: so the wait can be ended. The same holds for a word in a GPU's memory if the wait
//! depends on a connection. Each look at such a word is a copy (`glances.rs`), which could stand
//! behind the wait, in a hardware queue that both have by chance: then only the wait's end lets it
//! through.
//! Without a connection the stream looks at a GPU's word by itself, which is faster, but then only
//! the word ends the wait.
//!
//! Either way the word's region stays leased for as long, and no memory goes back to the driver
//! meanwhile: that could wait for the stream and hold up the change of the word.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Release},
        },
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::{
    DemandThread,
    cuda::{GpuError, Signal, WordWait},
};

use super::{
    glances::{Glances, WatchedWord},
    pace::{self, Pace},
    regions::Lease,
    timers,
};
use crate::{
    error::{Error, Result},
    ids::MrId,
};

/// How long a GPU's word may take to be seen for the last time when its connection is lost.
const LAST_LOOK: Duration = Duration::from_millis(200);

/// The waits, and the thread that looks at them.
#[derive(Default)]
pub(crate) struct StreamWaits(Arc<WaitList>);

#[derive(Default)]
struct WaitList {
    state: Mutex<State>,
    glances: Glances,
    /// The endpoint is closed or broken: waits that can be ended are over.
    is_closed: AtomicBool,
}

#[derive(Default)]
struct State {
    waits: Vec<Wait>,
    pace: Pace,
    thread: DemandThread,
}

/// A stream's wait. Once it is dropped, the stream goes on or has gone on.
pub(crate) struct Wait {
    /// Keeps the word's region registered.
    pub(crate) lease: Lease,
    pub(crate) gate: Gate,
}

/// How a stream waits.
pub(crate) enum Gate {
    /// For the word itself.
    Word(WordWait),
    /// For a signal.
    Signal(Box<SignalGate>),
}

/// A wait for a signal, which is given when the word is at the value or ahead of it, or the wait is
/// over for another reason.
pub(crate) struct SignalGate {
    word: Source,
    at_least: u64,
    time: Duration,
    until: Option<Instant>,
    /// The check of the connection to the peer that changes the word; the first reason that it
    /// gave, and when.
    is_lost: Option<LossCheck>,
    lost: Option<(Error, Instant)>,
    /// None: the stream goes on.
    signal: Option<Signal>,
    outcome: Arc<OnceLock<Result<()>>>,
}

/// Says why a connection was lost, if it was.
pub(crate) type LossCheck = Box<dyn Fn() -> Option<Error> + Send>;

/// Where the word is.
pub(crate) enum Source {
    Host(usize),
    Gpu(WatchedWord),
}

impl SignalGate {
    /// A wait that is over after this time (zero: never), and when a connection is lost.
    pub(crate) fn new(
        word: Source,
        at_least: u64,
        time: Duration,
        is_lost: Option<LossCheck>,
        signal: Signal,
    ) -> Self {
        let until = timers::end_unless_zero(time);
        let (lost, signal, outcome) = (None, Some(signal), Arc::default());
        Self { word, at_least, time, until, is_lost, lost, signal, outcome }
    }

    /// How the wait ends, once it has.
    pub(crate) fn outcome(&self) -> Arc<OnceLock<Result<()>>> {
        Arc::clone(&self.outcome)
    }

    /// Lets the stream go on, unless it does already.
    fn end(&mut self, outcome: Result<()>) {
        if let Some(signal) = self.signal.take() {
            // It is set once.
            let _ = self.outcome.set(outcome);
            drop(signal);
        }
    }

    /// Ends the wait if it is over. True if it is.
    fn look(&mut self, is_closed: bool) -> bool {
        if self.signal.is_some()
            && let Some(outcome) = self.verdict(is_closed)
        {
            self.end(outcome);
        }
        self.signal.is_none()
    }

    fn verdict(&mut self, is_closed: bool) -> Option<Result<()>> {
        // Before the look, which then sees all changes that the peer made before its end.
        if self.lost.is_none() {
            let why = self.is_lost.as_ref().and_then(|is_lost| is_lost());
            self.lost = why.map(|why| (why, Instant::now()));
        }
        let is_late = self.until.is_some_and(|until| until <= Instant::now());
        let lost_at = self.lost.as_ref().map(|(_, at)| *at);
        let seen = match self.word.look(lost_at) {
            Ok(seen) => seen,
            Err(e) => return Some(Err(Error::LocalMemory(format!("the word: {e}")))),
        };
        if seen.is_some_and(|(word, _)| word.wrapping_sub(self.at_least) as i64 >= 0) {
            return Some(Ok(()));
        }
        let is_last = seen.is_some_and(|(_, is_last)| is_last);
        match &self.lost {
            Some((e, at)) if is_last || at.elapsed() >= LAST_LOOK => Some(Err(e.clone())),
            _ if is_late => Some(Err(Error::Timeout(self.time))),
            _ if is_closed => Some(Err(Error::Closed)),
            _ => None,
        }
    }
}

impl Source {
    /// The word's value, if it is known, and whether the look began after this time.
    fn look(&self, after: Option<Instant>) -> Result<Option<(u64, bool)>, GpuError> {
        match self {
            Self::Host(address) => {
                // SAFETY: an aligned word in a region that the wait's lease keeps registered, of
                // host memory.
                let word = unsafe { AtomicU64::from_ptr(*address as *mut u64) };
                Ok(Some((word.load(Acquire), after.is_some())))
            }
            Self::Gpu(looking) => {
                let is_after = |began| after.is_some_and(|after| began >= after);
                Ok(looking.seen()?.map(|(word, began)| (word, is_after(began))))
            }
        }
    }
}

impl StreamWaits {
    /// Looks after a wait until it is over. If no thread can be started, the next call tries again;
    /// the end of the endpoint looks at the waits in any case.
    pub(crate) fn add(&self, wait: Wait) {
        let mut state = self.0.state.lock();
        state.waits.push(wait);
        state.pace.quicken();
        let shared = Arc::downgrade(&self.0);
        let _ = state.thread.start("uccl-words", move || watch(&shared));
    }

    /// Ends the waits for words of a region that are over or can be ended, because the region is
    /// about to be let go of. Waits until `until` at most for looks at its words that are under
    /// way.
    pub(crate) fn end_those_of(&self, id: MrId, until: Option<Instant>) {
        self.0.end_if(|wait, is_closed| {
            if wait.lease.mr().id == id
                && let Gate::Signal(signal) = &mut wait.gate
            {
                signal.end(Err(Error::UnknownRegion(id)));
            }
            wait.is_over(is_closed)
        });
        while self.0.glances.are_at(id) && until.is_none_or(|until| Instant::now() < until) {
            pace::nap();
        }
    }

    /// Looks at a word of this GPU, for a wait that begins after this.
    pub(crate) fn glance(&self, device: u32, address: usize, lease: Lease) -> Result<Source> {
        Ok(Source::Gpu(self.0.glances.at(device, address, lease)?))
    }

    /// Ends the waits that are over.
    pub(crate) fn look(&self) {
        self.0.end_if(Wait::is_over);
    }

    /// Ends the waits that can be ended, and the thread.
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

impl Drop for StreamWaits {
    fn drop(&mut self) {
        self.close();
    }
}

impl WaitList {
    fn end_if(&self, is_over: impl Fn(&mut Wait, bool) -> bool) {
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
        if leaves {
            state.thread.leave();
        }
        leaves
    }

    fn pace(&self) -> Pace {
        self.state.lock().pace
    }
}

fn watch(shared: &Weak<WaitList>) {
    loop {
        let pace = {
            let Some(shared) = shared.upgrade() else { return };
            shared.end_if(Wait::is_over);
            if shared.leaves() {
                return;
            }
            shared.pace()
        };
        pace.pause();
    }
}

impl Wait {
    /// Ends the wait, if it can be ended and is over. True if it can be forgotten.
    fn is_over(&mut self, is_closed: bool) -> bool {
        match &mut self.gate {
            Gate::Word(word) => word.is_over(),
            Gate::Signal(signal) => signal.look(is_closed),
        }
    }
}
