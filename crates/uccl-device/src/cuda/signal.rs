//! Words of host memory that streams wait for: how the CPU lets a GPU go on, without either waiting for the
//! other's attention.

use std::{
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{Context, GpuError, PinnedBuffer, Stream, driver::Driver, reaper};

/// Words in a page, each on a cache line of its own.
const WORDS: usize = 64;
const LINE: usize = 64;
/// The stream goes on once the word has come round to the value or beyond (`CU_STREAM_WAIT_VALUE_GEQ`).
const AT_LEAST: u32 = 0;

/// Words that nobody waits for. They are used again and never given back: a stream that has not come to its
/// wait yet may still look at one, and finds it at or beyond the value.
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
        // SAFETY: in locked memory that is never freed, aligned, and reached through atomics alone.
        unsafe { self.0.as_ref() }
    }
}

/// Something that streams wait for until it is dropped. While one is there, nothing is given back to the driver that it
/// would have to wait for a held stream with.
#[derive(Debug)]
pub struct Signal {
    word: Option<Word>,
    value: u32,
}

impl Signal {
    /// A signal that has not been given. Waits while memory is being given back to the driver, which lasts as long as
    /// work that the GPU has already.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if no more host memory can be locked.
    pub fn new(context: &'static Context) -> Result<Self, GpuError> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_empty() {
            let page = PinnedBuffer::new(context, WORDS * LINE)?;
            let start = page.as_ptr();
            // Never freed, as the words say.
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

    /// Has what is enqueued on the stream from now on wait until this is dropped.
    ///
    /// # Errors
    /// [`GpuError::Missing`] where the driver knows no such wait, [`GpuError::Driver`] if it refuses.
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

impl Drop for Signal {
    /// Gives the signal.
    fn drop(&mut self) {
        if let Some(word) = self.word.take() {
            word.get().store(self.value, Ordering::Release);
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(word);
        }
        reaper::hold_ends();
    }
}
