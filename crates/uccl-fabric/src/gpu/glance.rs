//! Reads words in GPU memory while no thread waits for them.

use std::{
    sync::atomic::{AtomicU64, Ordering::Acquire},
    time::Instant,
};

use uccl_device::cuda::{Direction, Event, GpuError, Gpus, PinnedBuffer, Priority, Stream};

/// Fetches words of a GPU's memory, one after the other, by copies on a stream of its own.
#[derive(Debug)]
pub struct WordReader {
    device: u32,
    stream: Stream,
    event: Event,
    here: PinnedBuffer,
    /// When the look that is under way began.
    began: Option<Instant>,
}

impl WordReader {
    /// Locks a word of host memory. Make it before any stream is held up until a word that it reads
    /// changes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: u32) -> Result<Self, GpuError> {
        let context = Gpus::get().device(device)?.context()?;
        let stream = Stream::new(context, Priority::High)?;
        let here = PinnedBuffer::new(context, size_of::<u64>())?;
        Ok(Self { device, stream, event: Event::new(context)?, here, began: None })
    }

    /// The ordinal of the GPU.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Whether a look is under way.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.began.is_some()
    }

    /// Starts to fetch a word, if no look is under way.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The aligned eight bytes must be this GPU's memory, and stay so while the look [is under
    /// way](Self::is_under_way).
    pub unsafe fn begin(&mut self, address: usize) -> Result<(), GpuError> {
        if self.is_under_way() {
            return Ok(());
        }
        let here = self.here.address();
        // If the event cannot be recorded behind the copy, the context is lost, and nothing is
        // copied.
        // SAFETY: the caller's promise; the word here is ours, and nobody reads it before the
        // event.
        unsafe {
            self.stream.copy(here, address as u64, size_of::<u64>(), Direction::DeviceToHost)?
        };
        self.event.record(&self.stream)?;
        self.began = Some(Instant::now());
        Ok(())
    }

    /// The value of the word and the time at which the look began, once the look has ended. Each
    /// look is reported once.
    ///
    /// # Errors
    /// The error with which the copy ended: no look is under way then.
    pub fn seen(&mut self) -> Result<Option<(u64, Instant)>, GpuError> {
        let Some(began) = self.began else { return Ok(None) };
        let is_done = self.event.is_done();
        if is_done != Ok(false) {
            self.began = None;
        }
        if !is_done? {
            return Ok(None);
        }
        // SAFETY: locked memory of eight bytes, at the start of a page, which no copy writes to
        // now.
        let word = unsafe { AtomicU64::from_ptr(self.here.as_ptr().cast()) };
        Ok(Some((word.load(Acquire), began)))
    }
}
