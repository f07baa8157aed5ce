//! Looks at words in GPU memory for streams that wait for them.
//!
//! Each look is a copy. A call that enqueues one may block while a stream is held and the program
//! frees GPU memory, so a thread of its own makes these calls, and the thread that ends a stream's
//! wait does not wait for it. A word stays registered as long as a look at it may be under way.

use std::{
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    time::Instant,
};

use parking_lot::Mutex;
use uccl_device::{DemandThread, cuda::GpuError};
use uccl_fabric::gpu::WordReader;

use super::{pace::Pace, regions::Lease};
use crate::{
    error::{Error, Result},
    ids::MrId,
};

/// Most idle [`WordReader`]s that are kept for reuse.
const MOST_SPARE: usize = 8;

/// The words that are looked at, and the thread.
#[derive(Default)]
pub(super) struct Glances(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    added: Vec<(Arc<Word>, WordReader)>,
    /// All words, also those that are not looked at any more.
    words: Vec<Weak<Word>>,
    spare: Vec<WordReader>,
    pace: Pace,
    thread: DemandThread,
}

struct Word {
    address: usize,
    /// Keeps the word's region registered.
    lease: Lease,
    /// The word's value at the last look, and the beginning of that look.
    seen: Mutex<std::result::Result<Option<(u64, Instant)>, GpuError>>,
    is_over: AtomicBool,
}

/// A word that is looked at until this is dropped, and while the last look is under way.
pub(crate) struct WatchedWord(Arc<Word>);

impl WatchedWord {
    /// The word's value at the last look that has ended, and the beginning of that look.
    pub(super) fn seen(&self) -> std::result::Result<Option<(u64, Instant)>, GpuError> {
        self.0.seen.lock().clone()
    }
}

impl Drop for WatchedWord {
    fn drop(&mut self) {
        self.0.is_over.store(true, Release);
    }
}

impl Glances {
    /// Looks at a word of this GPU, in the region of this lease. Call it before the stream is held.
    ///
    /// # Errors
    /// When no more host memory can be locked, or no thread be started.
    pub(super) fn at(&self, device: u32, address: usize, lease: Lease) -> Result<WatchedWord> {
        let spare = {
            let spare = &mut self.0.lock().spare;
            let at = spare.iter().position(|glance| glance.device() == device);
            at.map(|at| spare.swap_remove(at))
        };
        // Without the lock: the driver may take long.
        let glance = spare.map_or_else(|| WordReader::new(device), Ok);
        let glance = glance.map_err(|e| Error::Invalid(format!("stream: {e}")))?;
        let (seen, is_over) = (Mutex::new(Ok(None)), AtomicBool::new(false));
        let word = Arc::new(Word { address, lease, seen, is_over });
        let mut state = self.0.lock();
        let ours = Arc::clone(&self.0);
        let started = state.thread.start("uccl-glances", move || look_at_all(&ours));
        started.map_err(|e| Error::os("starting a thread", e))?;
        state.words.retain(|word| word.strong_count() > 0);
        state.words.push(Arc::downgrade(&word));
        state.added.push((Arc::clone(&word), glance));
        state.pace.quicken();
        Ok(WatchedWord(word))
    }

    /// Whether a look at a word of this region may be under way.
    pub(super) fn are_at(&self, id: MrId) -> bool {
        let words: Vec<_> = self.0.lock().words.iter().filter_map(Weak::upgrade).collect();
        words.iter().any(|word| word.lease.mr().id == id)
    }
}

impl Drop for Glances {
    /// The thread ends when nothing is looked at. If the driver holds it up for good, it is left to
    /// itself.
    fn drop(&mut self) {
        self.0.lock().thread.join_if_over();
    }
}

fn look_at_all(all: &Mutex<State>) {
    let mut words: Vec<(Arc<Word>, WordReader)> = Vec::new();
    loop {
        let pace = {
            let mut state = all.lock();
            words.append(&mut state.added);
            if words.is_empty() {
                return state.thread.leave();
            }
            state.pace
        };
        for (_, glance) in words.extract_if(.., |(word, glance)| !goes_on(word, glance)) {
            let mut state = all.lock();
            if !glance.is_under_way() && state.spare.len() < MOST_SPARE {
                state.spare.push(glance);
            }
        }
        pace.pause();
    }
}

/// Looks at a word. False if it need not be looked at any more, and no look is under way.
fn goes_on(word: &Word, glance: &mut WordReader) -> bool {
    let looked = look(word, glance);
    let is_under_way = glance.is_under_way();
    if let Err(e) = looked {
        // A failed copy counts as over: it has ended, or the context is lost.
        *word.seen.lock() = Err(e);
        return is_under_way;
    }
    is_under_way || !word.is_over.load(Acquire)
}

fn look(word: &Word, glance: &mut WordReader) -> std::result::Result<(), GpuError> {
    if let Some(seen) = glance.seen()? {
        *word.seen.lock() = Ok(Some(seen));
    }
    if word.is_over.load(Acquire) {
        return Ok(());
    }
    // SAFETY: an aligned word in a region that the lease keeps registered, of this GPU's memory.
    // The lease is dropped when the look is not under way.
    unsafe { glance.begin(word.address) }
}
