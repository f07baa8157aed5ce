//! Signals: words of host memory that streams wait for. With them the CPU can let a GPU continue,
//! and neither has to interrupt the other.

use std::{
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{Context, Event, GpuError, PinnedBuffer, Stream, driver::Driver, reaper};

/// How many words are allocated at a time, each on a cache line of its own.
const WORDS: usize = 64;
const LINE: usize = 64;
/// The stream continues once the word is at the value or beyond it, where it may wrap around
/// (`CU_STREAM_WAIT_VALUE_GEQ`).
const AT_LEAST: u32 = 0;

/// Words that no signal uses. They are reused and never freed: a stream that has not come to its
/// wait yet may still look at a word, and then finds it at or beyond the value.
static SPARE: Mutex<Vec<Word>> = Mutex::new(Vec::new());

/// A word in memory that is locked for as long as the process runs.
#[derive(Debug)]
struct Word(NonNull<AtomicU32>);

// SAFETY: it points to an atomic that is never freed.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    fn get(&self) -> &AtomicU32 {
        // SAFETY: it lies in locked memory that is never freed, is aligned, and is accessed only as
        // an atomic.
        unsafe { self.0.as_ref() }
    }
}

/// A signal that streams wait for until it is dropped. While one exists, no driver call is made
/// that frees something and would have to wait for a held stream.
#[derive(Debug)]
pub struct Signal {
    word: Option<Word>,
    value: u32,
}

impl Signal {
    /// Makes a signal that has not been given. If the reaper is freeing something, this waits for
    /// that, which takes as long as the work that the GPU already has.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if no more host memory can be locked.
    pub fn new(context: &'static Context) -> Result<Self, GpuError> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_empty() {
            let page = PinnedBuffer::new(context, WORDS * LINE)?;
            let start = page.as_ptr();
            // Never freed, as streams may look at the words at any time.
            std::mem::forget(page);
            spare.extend((0..WORDS).filter_map(|i| {
                let word = start.wrapping_add(i * LINE).cast::<AtomicU32>();
                NonNull::new(word).map(Word)
            }));
        }
        let word = spare.pop();
        drop(spare);
        let value = word.as_ref().map_or(0, |word| word.get().load(Ordering::Relaxed));
        reaper::hold_begins();
        Ok(Self { word, value: value.wrapping_add(1) })
    }

    /// Makes work enqueued on the stream from now on wait until this is dropped.
    ///
    /// # Errors
    /// [`GpuError::Missing`] if the driver has no such wait, [`GpuError::Driver`] if it refuses.
    pub fn hold(&self, stream: &Stream) -> Result<(), GpuError> {
        let context = stream.context();
        let wait = Driver::need(context.driver().stream_wait_value, "cuStreamWaitValue32")?;
        let _current = context.make_current()?;
        let Some(word) = &self.word else { return Ok(()) };
        let address = word.0.addr().get() as u64;
        // SAFETY: the stream lives, and the word is locked memory that is never freed.
        let code = unsafe { wait(stream.raw(), address, self.value, AT_LEAST) };
        context.check(code, format_args!("letting a stream wait for the host"))
    }
}

/// A stream's wait for a word that another thread or device changes. While this exists, the reaper
/// makes no driver call that would have to wait for the stream.
#[derive(Debug)]
pub struct WordWait {
    event: Event,
    _known: ReaperHold,
}

/// A wait that the reaper knows of.
#[derive(Debug)]
struct ReaperHold;

impl ReaperHold {
    fn new() -> Self {
        reaper::hold_begins();
        Self
    }
}

impl Drop for ReaperHold {
    fn drop(&mut self) {
        reaper::hold_ends();
    }
}

impl WordWait {
    /// Makes work enqueued on the stream from now on wait for a word, as [`Stream::wait_for_word`]
    /// does.
    ///
    /// # Errors
    /// Those of [`Stream::wait_for_word`]: then the stream does not wait.
    pub fn of(stream: &Stream, address: u64, at_least: u64) -> Result<Self, GpuError> {
        let event = Event::new(stream.context())?;
        let known = ReaperHold::new();
        stream.wait_for_word(address, at_least)?;
        if let Err(e) = event.record(stream) {
            // Nothing will show the end of the wait.
            std::mem::forget(known);
            return Err(e);
        }
        Ok(Self { event, _known: known })
    }

    /// Whether the stream has passed the wait, or will never come to it.
    pub fn is_over(&self) -> bool {
        self.event.is_done().unwrap_or(true)
    }
}

impl Drop for Signal {
    /// Gives the signal: streams that wait for it continue.
    fn drop(&mut self) {
        if let Some(word) = self.word.take() {
            word.get().store(self.value, Ordering::Release);
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(word);
        }
        reaper::hold_ends();
    }
}
