//! A word of locked host memory, and copies between it and words in a GPU's memory.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed},
};

use uccl_device::cuda::{Direction, Event, GpuError, Gpus, PinnedBuffer, Priority, Stream};

/// Copies a word at a time, on a stream of its own. Its user begins no copy while one runs.
#[derive(Debug)]
pub(super) struct WordCopier {
    stream: Stream,
    event: Event,
    here: PinnedBuffer,
}

impl WordCopier {
    /// Locks the word. The driver may wait for the GPU meanwhile.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn new(device: u32) -> Result<Self, GpuError> {
        let context = Gpus::get().device(device)?.context()?;
        let stream = Stream::new(context, Priority::High)?;
        let here = PinnedBuffer::new(context, size_of::<u64>())?;
        Ok(Self { stream, event: Event::new(context)?, here })
    }

    /// The value of the locked word. No copy may run.
    pub(super) fn value(&self) -> u64 {
        self.word().load(Acquire)
    }

    /// Starts to copy a word of the GPU's to the locked word.
    ///
    /// # Errors
    /// The driver's error: no copy runs.
    ///
    /// # Safety
    /// The aligned eight bytes must be this GPU's memory until the copy has ended. No other copy
    /// may run.
    pub(super) unsafe fn fetch(&mut self, address: u64) -> Result<(), GpuError> {
        let here = self.here.address();
        // SAFETY: the caller's promise; the locked word lives as long as the stream.
        unsafe { self.copy(here, address, Direction::DeviceToHost) }
    }

    /// Starts to copy this value to a word of the GPU's.
    ///
    /// # Errors
    /// As for [`fetch`](Self::fetch).
    ///
    /// # Safety
    /// As for [`fetch`](Self::fetch); nobody else changes the bytes meanwhile.
    pub(super) unsafe fn store(&mut self, address: u64, value: u64) -> Result<(), GpuError> {
        self.word().store(value, Relaxed);
        let here = self.here.address();
        // SAFETY: as in `fetch`.
        unsafe { self.copy(address, here, Direction::HostToDevice) }
    }

    /// Whether the copy has ended.
    ///
    /// # Errors
    /// The error with which it ended.
    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        self.event.is_done()
    }

    /// # Safety
    /// As for [`Self::fetch`].
    unsafe fn copy(&self, to: u64, from: u64, direction: Direction) -> Result<(), GpuError> {
        // If the event cannot be recorded behind the copy, the context is lost, and nothing is
        // copied.
        // SAFETY: the caller's promise.
        unsafe { self.stream.copy(to, from, size_of::<u64>(), direction)? };
        self.event.record(&self.stream)
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: eight bytes at the start of a page, which live as long as the buffer. The callers
        // touch them while no copy runs.
        unsafe { AtomicU64::from_ptr(self.here.as_ptr().cast()) }
    }
}
